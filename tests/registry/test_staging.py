"""What killed publishers leave goes at once; what belongs to a living one stays."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from marft_agents.registry import Change, Registry, describe_base, locks, staging
from marft_agents.registry.prune import prune
from tests.registry.bases import make_adapter, make_base
from tests.registry.test_moves import killed

PUBLISH = """
    import os, signal, sys
    from pathlib import Path
    from marft_agents.registry import Registry, describe_base, durable
    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)
    def wait(*_):
        print("here", flush=True)
        sys.stdin.read()
    durable.copy_file = {step}
    root, staged, base = sys.argv[1:]
    base = describe_base(base)
    Registry(root).publish("router", Path(staged), base=base, parent=None)
"""


class Place:
    """A registry with one version, and what is needed for the next."""

    def __init__(self, folder: Path) -> None:
        self.base_dir = make_base(folder / "base")
        self.staged = make_adapter(folder / "staged")
        self.registry = Registry(folder / "adapters")
        self.folder = self.registry.root / "router"
        self.publish()

    def publish(self) -> None:
        base = describe_base(self.base_dir)
        self.registry.publish("router", self.staged, base=base, parent=None)

    @property
    def arguments(self) -> tuple[Path, ...]:
        return self.registry.root, self.staged, self.base_dir

    def kill_a_publisher(self) -> None:
        assert killed(PUBLISH.format(step="kill"), *self.arguments)
        assert len(self.left()) == 2

    def left(self) -> list[str]:
        return sorted(p.name for p in self.folder.iterdir() if p.name[0] == ".")

    @contextmanager
    def living_publisher(self) -> Generator[None]:
        argv = [sys.executable, "-c", textwrap.dedent(PUBLISH.format(step="wait"))]
        process = subprocess.Popen(
            [*argv, *map(str, self.arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"here\n"
            yield
            process.kill()

    def grow_old(self) -> None:
        for name in self.left():
            os.utime(self.folder / name, (1, 1))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def _prune(place: Place) -> None:
    list(prune(place.registry, ["router"], 1, {}, Change("me", "prune")))


BEGINNINGS: dict[str, Callable[[Place], None]] = {
    "publish": Place.publish,
    "prune": _prune,
    "serve": lambda place: place.registry.settle(),
}


@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=BEGINNINGS)
def test_what_a_killed_publisher_left_goes_at_once(
    place: Place, begin: Callable[[Place], None]
) -> None:
    place.kill_a_publisher()
    begin(place)
    assert place.left() == []


@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=BEGINNINGS)
def test_what_a_living_publisher_needs_stays_however_old(
    place: Place, begin: Callable[[Place], None]
) -> None:
    with place.living_publisher():
        place.grow_old()
        left = place.left()
        begin(place)
        assert len(left) == 2 and place.left() == left
    begin(place)
    assert place.left() == []


def test_what_is_left_of_another_kernel_or_without_locks_goes_after_an_hour(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place.kill_a_publisher()
    other = tmp_path / "boot_id"
    other.write_text("of another machine\n")
    for name, module, value in (("_BOOT_ID", staging, other), ("fcntl", locks, None)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            place.registry.settle()
            assert len(place.left()) == 2
    with monkeypatch.context() as patch:
        patch.setattr(staging, "_BOOT_ID", tmp_path / "none")  # a kernel that does not tell
        place.registry.settle()
        assert len(place.left()) == 2
        place.grow_old()
        place.registry.settle()
    assert place.left() == []


def test_a_lock_that_nothing_is_said_in_yet_is_left_alone(place: Place) -> None:
    (place.folder / ".publishing-1-a").touch()
    place.registry.settle()
    assert place.left() == [".publishing-1-a"]
    old = time.time() - 7200
    os.utime(place.folder / ".publishing-1-a", (old, old))
    place.registry.settle()
    assert place.left() == []


def test_a_publisher_whose_lock_is_looked_at_takes_another(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter([False, True])
    take = locks._take  # pyright: ignore[reportPrivateUsage] as if somebody had it for an instant

    def seldom(handle: int, timeout_s: float, *, shared: bool = False) -> bool | None:
        return take(handle, timeout_s, shared=shared) if shared or next(taken, True) else False

    monkeypatch.setattr(locks, "_take", seldom)
    with staging.staging(place.folder) as work:
        assert work.is_dir() and len(place.left()) == 2
    assert place.left() == []


def test_a_server_completes_every_trail_that_a_kill_left_open(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.publish()
    base = describe_base(place.base_dir)
    place.registry.publish("coder", place.staged, base=base, parent=None)
    code = """
        import os, signal, sys
        from marft_agents.registry import Change, Registry, durable
        durable.append_line = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        Registry(sys.argv[1]).move("router", 2, Change("killed", "test"))
    """
    lines = len(place.registry.audit())
    assert killed(code, place.registry.root)
    (place.registry.root / "coder" / "CURRENT").unlink()
    assert place.registry.current("router") == 2 and len(place.registry.audit()) == lines
    place.registry.settle()
    told = [(e["action"], e["who"], e["agent"], e["to"]) for e in place.registry.audit()[lines:]]
    assert told == [("promote", "killed", "router", 2)]
    place.registry.settle()
    assert len(place.registry.audit()) == lines + 1
