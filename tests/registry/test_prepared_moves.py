"""A move that is prepared beforehand, and what happens between its steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from marft_agents.errors import RegistryError
from marft_agents.registry import Change, Registry, describe_base, durable, locks
from marft_agents.registry.checksums import Checksums
from tests.registry.bases import make_adapter, make_base

ME = Change("me", "swap", evidence={"reason": "better"})


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """Four versions of router; the first is in use."""
    base, staged = describe_base(make_base(tmp_path / "base")), make_adapter(tmp_path / "staged")
    registry = Registry(tmp_path / "adapters")
    for _ in range(4):
        registry.publish("router", staged, base=base, parent=None)
    return registry


def promoted(registry: Registry) -> list[tuple[int | None, int]]:
    return [(e["from"], e["to"]) for e in registry.audit("router") if e["action"] == "promote"]


def left(registry: Registry) -> list[str]:
    return [p.name for p in (registry.root / "router").iterdir() if p.name[0] == "."]


def test_nothing_moves_before_the_commit_and_the_line_has_what_was_learnt(
    registry: Registry,
) -> None:
    move = registry.prepare_move("router", 3, ME)
    assert (registry.current("router"), promoted(registry)) == (1, [])
    registry.commit_move(move, {"probe": 7})
    assert registry.current("router") == 3
    with pytest.raises(RegistryError, match="another process"), locks.changing(registry.root, 0.05):
        pass  # until it is finished
    registry.finish_move(move)
    assert registry.audit()[-1]["evidence"] == {"reason": "better", "probe": 7}
    assert (promoted(registry), left(registry)) == ([(1, 3)], [])
    registry.promote("router", 2, by="x", evidence={})
    assert promoted(registry) == [(1, 3), (3, 2)]


@pytest.mark.parametrize(("other", "before"), [("promote", 2), ("unpin", 1), ("by hand", 4)])
def test_what_others_change_meanwhile_is_taken_into_account(
    registry: Registry, other: str, before: int
) -> None:
    move = registry.prepare_move("router", 3, ME)
    if other == "promote":
        registry.promote("router", 2, by="x", evidence={})
    elif other == "unpin":
        registry.unpin("router")
    else:
        (registry.root / "router" / "CURRENT").write_text("v0004\n")
    registry.commit_move(move, {})
    registry.finish_move(move)
    assert promoted(registry)[-1] == (before, 3)
    assert (registry.current("router"), left(registry)) == (3, [])


def test_an_agent_that_is_pinned_meanwhile_stays(registry: Registry) -> None:
    move = registry.prepare_move("router", 3, ME)
    registry.pin("router")
    with pytest.raises(RegistryError, match="pinned to version 1"):
        registry.commit_move(move, {})
    assert (registry.current("router"), promoted(registry), left(registry)) == (1, [], [])
    registry.unpin("router")  # nobody is kept from the registry


def test_a_move_that_is_not_wanted_leaves_nothing(registry: Registry) -> None:
    move = registry.prepare_move("router", 3, ME)
    assert len(left(registry)) == 2
    registry.discard_move(move)
    registry.discard_move(move)
    assert (registry.current("router"), left(registry)) == (1, [])


@pytest.mark.parametrize(
    ("dies", "current"),
    [("os.replace", 1), ("durable.append_line", 3), ("durable.flush_file", 3)],
)
def test_a_kill_between_the_steps_loses_no_line(
    registry: Registry, dies: str, current: int
) -> None:
    code = f"""
        import os, signal, sys
        from marft_agents.registry import Change, Registry, durable
        registry = Registry(sys.argv[1])
        move = registry.prepare_move("router", 3, Change("killed"))
        def die(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)
        {dies} = die
        registry.commit_move(move, {{"probe": 7}})
        registry.finish_move(move)
    """
    argv = [sys.executable, "-c", textwrap.dedent(code), str(registry.root)]
    assert subprocess.run(argv, check=False).returncode == -signal.SIGKILL
    assert registry.current("router") == current
    registry.promote("router", 4, by="me", evidence={})
    cut = [(1, 3)] if current == 3 else []
    assert promoted(registry) == [*cut, (current, 4)]
    assert left(registry) == []
    if dies == "durable.append_line":
        line = next(e for e in registry.audit() if e["who"] == "killed")
        assert "late" in line["evidence"] and "probe" not in line["evidence"]


# -- checksums -----------------------------------------------------------------------------------


def test_a_file_is_read_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    whole = durable.sha256_file

    def noting(path: Path) -> str:
        reads.append(path)
        return whole(path)

    monkeypatch.setattr(durable, "sha256_file", noting)
    monkeypatch.setattr("marft_agents.registry.checksums._SETTLED_NS", -(10**9))
    file, sums = tmp_path / "file", Checksums()
    file.write_bytes(b"one")
    assert sums.of(file) == sums.of(file) == whole(file)
    assert len(reads) == 1
    state = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))  # its times are not what tells
    assert sums.of(file) == whole(file)
    assert len(reads) == 2


def test_a_file_that_was_just_written_is_read_again(tmp_path: Path) -> None:
    file, sums = tmp_path / "file", Checksums()
    file.write_bytes(b"one")
    assert sums.of(file) == durable.sha256_file(file)
    with file.open("r+b") as open_file:
        open_file.write(b"two")  # perhaps within one tick of the clock
    assert sums.of(file) == durable.sha256_file(file)
