"""Who changed which agent's adapter, when, and on which evidence.

Invariant: lines are only ever appended, each flushed before the call returns. A line that a crash
tore is skipped by readers and never swallows the next one.
"""

from __future__ import annotations

import getpass
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from marft_agents.registry import durable

Action = Literal["publish", "promote", "rollback"]


def current_user() -> str:
    """Who runs this process, for the trail."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container without a passwd entry
        return "unknown"


class AuditLog:
    """The file ``adapters/audit.jsonl``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(
        self,
        action: Action,
        agent: str,
        origin: int | None,
        version: int,
        *,
        by: str | None,
        evidence: Mapping[str, Any],
    ) -> None:
        """Note that ``agent`` went from version ``origin`` to ``version``."""
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "who": by or current_user(),
            "action": action,
            "agent": agent,
            "from": origin,
            "to": version,
            "evidence": dict(evidence),
        }
        line = json.dumps(entry, default=str, ensure_ascii=False)
        durable.append_line(self.path, line.encode())

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
        targets = [entry.get("to") for entry in self.entries(agent)]
        return [version for version in targets if isinstance(version, int)]

    def before(self, agent: str, current: int) -> int | None:
        """The version that was in use when ``current`` was last promoted."""
        for entry in reversed(self.entries(agent)):
            if entry.get("action") == "promote" and entry.get("to") == current:
                origin = entry.get("from")
                return origin if isinstance(origin, int) else None
        return None
