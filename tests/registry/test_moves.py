"""Every move of ``CURRENT`` is in the trail once, whoever makes it and whatever cuts it off."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import ConfigError, RegistryError
from marft_agents.registry import Change, Registry, describe_base, durable, locks
from marft_agents.registry.audit import AuditLog, in_use
from tests.registry.bases import make_adapter, make_base

ROLLBACK = Change("ops", "test", action="rollback")


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """Four versions of router; the first is in use."""
    base, staged = describe_base(make_base(tmp_path / "base")), make_adapter(tmp_path / "staged")
    registry = Registry(tmp_path / "adapters")
    for _ in range(4):
        registry.publish("router", staged, base=base, parent=None)
    return registry


def moves(registry: Registry) -> list[tuple[str, int | None]]:
    """(action, version in use after it) of every line in which that changes; no other says so."""
    out: list[tuple[str, int | None]] = []
    now: int | None = None
    for entry in registry.audit("router"):
        moved, now = entry["current"] != now, entry["current"]
        if moved:
            out.append((entry["action"], now))
        assert moved or entry["action"] in ("publish", "pin", "unpin")
    return out


def killed(code: str, *arguments: object) -> bool:
    """Run it in a process of its own, which must kill itself."""
    argv = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, check=False)
    return (done.returncode, done.stderr) == (-signal.SIGKILL, b"")


def test_a_line_says_who_when_how_and_what_came_of_it(registry: Registry) -> None:
    registry.move("router", 3, Change("me@here", "swap", evidence={"reason": "naïve \udcff"}))
    line = registry.audit()[-1]
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "who": "me@here", "command": "swap", "action": "promote", "agent": "router",
        "from": 1, "to": 3, "current": 3, "evidence": {"reason": "naïve \udcff"}, "result": "done",
    }  # fmt: skip
    assert "@" in registry.audit()[0]["who"]


def test_moving_to_the_version_in_use_is_no_move(registry: Registry) -> None:
    registry.promote("router", 3, by="me", evidence={})
    lines = len(registry.audit())
    assert registry.move("router", 3, Change("me")) == 3
    assert len(registry.audit()) == lines
    assert registry.rollback("router") == 1


def test_a_rollback_walks_back_through_what_was_in_use(registry: Registry) -> None:
    for version in (3, 1, 4):
        registry.promote("router", version, by="me", evidence={})
    assert registry.history("router") == [1, 3, 1, 4]
    assert [registry.rollback("router", ROLLBACK) for _ in range(3)] == [1, 3, 1]
    with pytest.raises(RegistryError, match="nothing came before it, says the audit trail"):
        registry.rollback("router")
    assert moves(registry)[-3:] == [("rollback", 1), ("rollback", 3), ("rollback", 1)]


def test_a_rollback_to_a_version_that_was_in_use(registry: Registry) -> None:
    for version in (2, 3):
        registry.promote("router", version, by="me", evidence={})
    with pytest.raises(RegistryError, match="version 4 was never in use"):
        registry.rollback("router", to=4)
    with pytest.raises(RegistryError, match="no version 9"):
        registry.rollback("router", to=9)
    assert registry.rollback("router", to=1) == 1
    assert registry.previous("router") is None


def test_an_earlier_format_and_failed_attempts(tmp_path: Path) -> None:
    def line(action: str, origin: int | None, to: int, **more: Any) -> dict[str, Any]:
        return {"action": action, "agent": "a", "from": origin, "to": to} | more

    old = [line("publish", None, 1), line("publish", 1, 2), line("promote", 1, 2)]
    assert in_use(old) == [1, 2]
    assert in_use([*old, line("promote", 2, 9, result="step probe: wrong")]) == [1, 2]
    assert in_use([line("promote", 4, 5)]) == [4, 5]
    log = AuditLog(tmp_path / "audit.jsonl")
    for entry in (*old, line("promote", 2, 900, result="step check: no such version")):
        log.write(entry)
    assert max(log.versions_named("a")) == 2, "a number that was only asked for is not used"


def test_a_current_changed_by_hand_is_noted_by_the_next_change(registry: Registry) -> None:
    (registry.root / "router" / "CURRENT").write_text("v0003\n")
    assert registry.previous("router") == 1
    registry.promote("router", 4, by="me", evidence={})
    assert moves(registry) == [("publish", 1), ("found", 3), ("promote", 4)]
    assert registry.rollback("router") == 3


@pytest.mark.parametrize(
    ("patch", "current"),
    [
        ("durable.write_files = die_after(0)", 1),
        ("durable.flush_file = die_after(1)", 1),
        ("os.fsync = die_after(2)", 1),
        ("os.replace = die_after(0)", 1),
        ("os.fsync = die_after(3)", 3),
        ("durable.append_line = die_after(0)", 3),
        ("os.fsync = die_after(4)", 3),
    ],
)
@pytest.mark.parametrize("action", ["promote", "rollback"])
def test_a_kill_at_any_step_of_a_move(
    registry: Registry, patch: str, current: int, action: str
) -> None:
    registry.promote("router", 3, by="me", evidence={})
    registry.promote("router", 1, by="me", evidence={})
    code = f"""
        import os, signal, sys
        from marft_agents.registry import Change, Registry, durable
        def die_after(n, calls=[]):
            module, name = {patch.split(" = ")[0].rsplit(".", 1)[0]}, {patch.split(" = ")[0].rsplit(".", 1)[1]!r}
            real = getattr(module, name)
            def step(*a, **k):
                calls.append(1)
                if len(calls) > n:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*a, **k)
            return step
        {patch}
        registry = Registry(sys.argv[1])
        change = Change("killed", "test", action={action!r})
        registry.rollback("router", change) if {action == "rollback"} else registry.move("router", 3, change)
    """  # noqa: E501 one statement a line
    assert killed(code, registry.root)
    assert registry.current("router") == current
    registry.promote("router", 4, by="me", evidence={})
    cut = [(action, 3)] if current == 3 else []
    assert moves(registry) == [("publish", 1), ("promote", 3), ("promote", 1), *cut, ("promote", 4)]
    assert not [p.name for p in (registry.root / "router").iterdir() if p.name[0] == "."]


@pytest.mark.parametrize("step", ["os.rename", "durable.create_file", "durable.append_line"])
def test_a_kill_at_any_step_of_the_first_publication(
    registry: Registry, tmp_path: Path, step: str
) -> None:
    base, staged = registry.manifest("router", 1).base, tmp_path / "staged"
    code = f"""
        import os, signal, sys
        from pathlib import Path
        from marft_agents.registry import Registry, durable
        from marft_agents.schema import BaseModelInfo
        def die(*a, **k):
            os.kill(os.getpid(), signal.SIGKILL)
        {step} = die
        base = BaseModelInfo.model_validate_json(sys.argv[3])
        Registry(sys.argv[1]).publish("router", Path(sys.argv[2]), base=base, parent=None)
    """
    fresh = Registry(tmp_path / "fresh")
    assert killed(code, fresh.root, staged, base.model_dump_json())
    fresh.publish("router", staged, base=base, parent=None)
    latest = fresh.publish("router", staged, base=base, parent=None).version
    fresh.promote("router", latest, by="x", evidence={})
    first = "found" if step == "durable.append_line" else "publish"
    assert moves(fresh) == [(first, 1), ("promote", latest)]
    assert fresh.rollback("router") == 1


def test_a_torn_line_of_a_killed_move_is_written_again(registry: Registry) -> None:
    registry.promote("router", 2, by="me", evidence={})
    trail = registry.root / "audit.jsonl"
    whole = trail.read_bytes()
    line = whole.splitlines()[-1]
    trail.write_bytes(whole[: -len(line) // 2])
    (registry.root / "router" / ".moving").write_bytes(line)
    registry.promote("router", 3, by="me", evidence={})
    assert moves(registry) == [("publish", 1), ("promote", 2), ("promote", 3)]


def test_two_processes_move_at_once(registry: Registry) -> None:
    code = """
        import sys
        from marft_agents.registry import Change, Registry
        registry = Registry(sys.argv[1])
        print("ready", flush=True)
        sys.stdin.readline()
        for turn in range(25):
            for version in (int(sys.argv[2]), 1):
                registry.move("router", version, Change(sys.argv[2]))
    """
    children = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(registry.root), version],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for version in ("2", "3")
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
    assert [child.communicate()[0] + bytes([child.returncode]) for child in children] == [b"\0"] * 2
    trail = [e for e in registry.audit("router") if e["action"] == "promote"]
    assert {e["who"] for e in trail} == {"2", "3"}
    for before, after in itertools.pairwise(trail):
        assert after["from"] == before["to"] == before["current"]
    assert trail[-1]["to"] == registry.current("router")


def test_a_change_waits_for_another_and_says_so_when_it_does_not_end(registry: Registry) -> None:
    with locks.changing(registry.root):
        late = locks.changing(registry.root, timeout_s=0.05)
        with pytest.raises(RegistryError, match=r"another process .* changing"), late:
            pass
    with registry.changing("router"):
        pass


def test_a_lock_is_not_left_to_a_forked_child(registry: Registry) -> None:
    code = """
        import os, sys
        from marft_agents.registry import Registry, locks
        registry = Registry(sys.argv[1])
        hold, go = os.pipe()
        with registry.changing("router"):
            child = os.fork()
            if child == 0:
                os.close(go)
                os.read(hold, 1)  # until the parent is gone
                os._exit(0)
        with locks.changing(registry.root, timeout_s=0.5):
            print("free")
    """
    argv = [sys.executable, "-c", textwrap.dedent(code), str(registry.root)]
    assert subprocess.run(argv, capture_output=True, check=True).stdout == b"free\n"


def test_a_pinned_version_stays(registry: Registry) -> None:
    registry.promote("router", 2, by="me", evidence={})
    assert registry.pin("router", Change("me")) == registry.pinned("router") == 2
    calls: list[Callable[[], object]] = [
        lambda: registry.promote("router", 3, by="me", evidence={}),
        lambda: registry.rollback("router"),
        lambda: registry.rollback("router", to=1),
    ]
    for call in calls:
        with pytest.raises(RegistryError, match=r"pinned to version 2.*pin router --remove"):
            call()
    assert registry.current("router") == 2
    assert registry.move("router", 2, Change("me")) == 2
    registry.move("router", 3, Change("me", force=True))
    assert (registry.current("router"), registry.pinned("router")) == (3, None)
    assert registry.audit()[-1]["evidence"] == {"unpinned": 2}
    assert registry.unpin("router") is None
    registry.pin("router")
    assert registry.unpin("router") == 3
    assert [e["action"] for e in registry.audit()[-2:]] == ["pin", "unpin"]
    assert moves(registry) == [("publish", 1), ("promote", 2), ("promote", 3)]


def test_a_pin_that_cannot_be_noted_is_none(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "append_line", full)
        with pytest.raises(OSError, match="No space"):
            registry.pin("router")
    assert registry.pinned("router") is None
    (registry.root / "router" / "PINNED").write_text("v0009\n")
    with pytest.raises(RegistryError, match=r"PINNED says 'v0009'"):
        registry.promote("router", 2, by="me", evidence={})


def test_one_server_a_folder(tmp_path: Path) -> None:
    assert locks.server_of(tmp_path) is None
    with locks.serving(tmp_path, "http://here:1"):
        who = locks.server_of(tmp_path)
        assert who is not None and f"process {os.getpid()} on " in who and "http://here:1" in who
        with pytest.raises(ConfigError, match=r"served already, by process .* http://here:1"):
            locks.require_not_served(tmp_path)
        second = locks.serving(tmp_path, "http://there:2")
        with pytest.raises(ConfigError, match="served already"), second:
            pass
    assert locks.server_of(tmp_path) is None


def test_a_killed_server_serves_no_longer(tmp_path: Path) -> None:
    code = """
        import os, signal, sys
        from pathlib import Path
        from marft_agents.registry import locks
        with locks.serving(Path(sys.argv[1]), "http://gone:1"):
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert killed(code, tmp_path)
    assert json.loads((tmp_path / ".server.lock").read_text())["url"] == "http://gone:1"
    assert locks.server_of(tmp_path) is None
    with locks.serving(tmp_path, "http://here:1"):
        assert "http://here:1" in (locks.server_of(tmp_path) or "")
