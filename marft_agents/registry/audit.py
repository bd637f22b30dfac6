"""Who changed which agent's adapter, when, and on which evidence.

Invariant: lines are only ever appended, each flushed before the change that it tells of is called
done. A line that a crash tore is skipped by readers and never swallows the next one. ``current`` is
the version in use after the line, so every move of ``CURRENT`` is one line in which it changes.
"""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from marft_agents.registry import durable

CanaryAction = Literal["canary", "canary-passed", "canary-stop", "canary-rollback"]
Action = Literal["publish", "promote", "rollback", "found", "pin", "unpin", "prune"] | CanaryAction
DONE = "done"


def current_user() -> str:
    """Who runs this process, for the trail: ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container without a passwd entry
        user = "unknown"
    return f"{user}@{socket.gethostname() or 'unknown'}"


@dataclass(frozen=True)
class Change:
    """Who asks for a change, by which command, and why."""

    by: str | None = None
    command: str | None = None
    action: Literal["promote", "rollback"] = "promote"
    evidence: Mapping[str, Any] = field(default_factory=dict[str, Any])
    force: bool = False
    """Also away from a pinned version, whose pin is taken off, and although there is a canary."""


class AuditLog:
    """The file ``adapters/audit.jsonl``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def entry(
        action: Action,
        agent: str,
        origin: int | None,
        version: int | None,
        current: int | None,
        change: Change,
        *,
        result: str = DONE,
    ) -> dict[str, Any]:
        """One line: ``agent`` went from ``origin`` to ``version``; ``current`` is in use now."""
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "who": change.by or current_user(),
            "command": change.command,
            "action": action,
            "agent": agent,
            "from": origin,
            "to": version,
            "current": current,
            "evidence": dict(change.evidence),
            "result": result,
        }
        return json.loads(json.dumps(entry, default=str))

    def write(self, *entries: Mapping[str, Any], flush: bool = True) -> None:
        """Append lines, all or none; without ``flush`` a power cut may take them until then."""
        line = "\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
        # What no encoding has becomes an escape that JSON reads back.
        data = line.encode("utf-8", "backslashreplace")
        if flush:
            durable.append_line(self.path, data)
        else:
            durable.append_line(self.path, data, flush=False)

    def flush(self) -> None:
        """Make every line survive a power cut."""
        durable.flush_file(self.path)

    def entries(self, agent: str | None = None) -> list[dict[str, Any]]:
        """Every readable line (of one agent), oldest first."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        out: list[dict[str, Any]] = []
        for line in lines:
            try:
                entry: Any = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                out.append(cast("dict[str, Any]", entry))
        return [e for e in out if agent is None or e.get("agent") == agent]

    def versions_named(self, agent: str) -> list[int]:
        """Every version of the agent that any line leads to."""
        return versions_named(self.entries(agent))


def versions_named(entries: Iterable[Mapping[str, Any]]) -> list[int]:
    """Every version that any of these lines leads to."""
    targets = [e.get("to") for e in entries if e.get("result", DONE) == DONE]
    return [version for version in targets if isinstance(version, int)]


def in_use(entries: Iterable[Mapping[str, Any]]) -> list[int]:
    """Versions of one agent as a rollback walks back through them; the last is in use.

    A rollback takes off what it went back from, so going back twice goes back two versions.
    """
    out: list[int] = []
    for entry in entries:
        action, origin, version = entry.get("action"), entry.get("from"), entry.get("to")
        if entry.get("result", DONE) != DONE or not isinstance(version, int):
            continue
        if action == "publish":
            # Lines without "current" are of an earlier format; an agent's first one came in use.
            current = entry.get("current", None if out else version)
            if isinstance(current, int) and current not in out[-1:]:
                out.append(current)
        elif action == "rollback" and version in out:
            while out[-1] != version:
                out.pop()
        elif action in ("promote", "rollback", "found"):
            if isinstance(origin, int) and origin not in out[-1:]:
                out.append(origin)
            if version not in out[-1:]:
                out.append(version)
    return out
