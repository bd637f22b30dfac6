"""Changes that a full disk or a kill cuts off: all of them or nothing, and always their line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from marft_agents.registry import CanaryPlan, Change, Registry, durable
from tests.registry.test_moves import killed
from tests.serving.stage import make_house

ME = Change("me", "test")
FORCED = Change("me", "test", force=True)
KILL = """
    import os, signal, sys
    from marft_agents.registry import CanaryPlan, Change, Registry, durable
    def die(*a, **k):
        os.kill(os.getpid(), signal.SIGKILL)
    registry, me = Registry(sys.argv[1]), Change("killed", "test")
    forced = Change("killed", "test", force=True)
    plan = CanaryPlan.model_validate_json(sys.argv[2])
"""


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """router: v1 in use, v2, v3."""
    house = make_house(tmp_path)
    for untrained in (True, False, False):
        house.publish("router", untrained=untrained)
    return house.registry


def plan(version: int = 2) -> CanaryPlan:
    return CanaryPlan(version=version, share=0.1, key="k", since=datetime.now(UTC), by="me")


def no_room(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def dot_files(registry: Registry) -> list[str]:
    return [p.name for p in (registry.root / "router").iterdir() if p.name[0] == "."]


@pytest.mark.parametrize(
    ("module", "step"),
    [(durable, "write_file"), (durable, "write_files"), (os, "replace"), (durable, "append_line")],
)
def test_a_forced_move_that_finds_no_room_ends_no_canary(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, module: object, step: str
) -> None:
    registry.set_canary("router", plan(), ME)
    trail = registry.audit()
    with monkeypatch.context() as patch:
        patch.setattr(module, step, no_room)
        if step == "write_file":  # a move does without it: what it begins with is another's
            registry.move("router", 1, FORCED)
        else:
            with pytest.raises(OSError, match="No space"):
                registry.move("router", 3, FORCED)
    assert registry.current("router") == 1 and registry.audit() == trail
    now = registry.canary("router")
    assert now is not None and now.version == 2
    assert dot_files(registry) == []


def test_a_line_that_fits_by_half_leaves_nothing_of_itself(tmp_path: Path) -> None:
    code = """
import os, resource, signal, sys
from pathlib import Path
from marft_agents.registry import durable
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
durable.append_line(path, b"whole")
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
try:
    durable.append_line(path, b"x" * 40)
except OSError:
    sys.exit(3)
"""
    path = tmp_path / "trail"
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 3
    assert path.read_bytes() == b"whole\n"


CHANGES: dict[str, tuple[str, Callable[[Registry], object], str, str]] = {
    "canary": ("registry.set_canary('router', plan, me)", lambda r: None, "CANARY", "canary"),
    "stop": (
        "registry.end_canary('router', me)",
        lambda r: r.set_canary("router", plan(), ME),
        "CANARY",
        "canary-stop",
    ),
    "pin": ("registry.pin('router', me)", lambda r: None, "PINNED", "pin"),
    "unpin": ("registry.unpin('router', me)", lambda r: r.pin("router", ME), "PINNED", "unpin"),
}


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_kill_between_a_file_and_its_line_loses_no_line(
    registry: Registry, name: str, made: bool
) -> None:
    act, before, file, action = CHANGES[name]
    before(registry)
    there, lines = (registry.root / "router" / file).exists(), len(registry.audit())
    place = "durable.append_line" if made else "durable.restored_on_error"
    assert killed(KILL + f"    {place} = die\n    {act}\n", registry.root, plan().model_dump_json())
    assert (registry.root / "router" / file).exists() == (there != made)
    with registry.changing("router"):  # what any change begins with
        told = registry.audit()[lines:]
    assert [(e["action"], e["who"]) for e in told] == ([(action, "killed")] if made else [])
    assert all("late" in e["evidence"] for e in told)
    assert dot_files(registry) == []
    with registry.changing("router"):
        assert registry.audit()[lines:] == told, "once"


def test_a_forced_move_that_is_killed_before_it_has_cleaned_up_is_ended_by_the_next(
    registry: Registry,
) -> None:
    registry.pin("router", ME)
    registry.set_canary("router", plan(), FORCED)
    code = KILL + "    Registry._clean_up = die\n    registry.move('router', 3, forced)\n"
    assert killed(code, registry.root, plan().model_dump_json())
    assert registry.current("router") == 3
    with registry.changing("router"):
        pass
    assert registry.canary("router") is None and registry.pinned("router") is None
    assert [e["action"] for e in registry.audit()[-2:]] == ["canary-stop", "promote"]
    assert dot_files(registry) == []


def test_a_publisher_that_is_killed_before_its_line_is_in_the_trail_all_the_same(
    registry: Registry,
) -> None:
    code = """
        import os, signal, sys
        from marft_agents.registry import Registry, durable
        def die(*a, **k):
            os.kill(os.getpid(), signal.SIGKILL)
        registry = Registry(sys.argv[1])
        first = registry.manifest("router", 1)
        durable.append_line = die
        folder = registry.path("router", 2)
        registry.publish("router", folder, base=first.base, parent=2)
    """
    lines = len(registry.audit())
    assert killed(code, registry.root)
    assert registry.versions("router") == [1, 2, 3, 4]
    registry.move("router", 4, ME)
    told = [(e["action"], e["from"], e["to"], e["current"]) for e in registry.audit()[lines:]]
    assert told == [("publish", 2, 4, 1), ("promote", 1, 4, 4)]
    assert registry.previous("router") == 1
