"""What is on disk before ``CURRENT`` is replaced, so that replacing it is one rename.

Invariant: the line that the trail is to get lies in ``.moving-*``, flushed, before ``CURRENT`` is
replaced, and until the trail has it; so a crash at any point loses neither the move nor its line.
What another change of the agent found meanwhile it has taken away, and then the move is not
``standing`` any more: it is to be prepared again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marft_agents.registry import durable
from marft_agents.registry.audit import Change
from marft_agents.registry.intents import LATE
from marft_agents.registry.reader import CURRENT_FILE, folder_name

MOVING_FILE = ".moving"
_NEW_FILE = f".{CURRENT_FILE}"


@dataclass
class Move:
    """One move of an agent; ``before`` was in use when it was prepared.

    ``held`` keeps others from changing the registry from its commit until it is finished.
    """

    folder: Path
    version: int
    before: int | None
    change: Change
    new: Path | None = None
    """The next ``CURRENT``; ``None`` when there is nothing to move."""
    line: Path | None = None
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    unpins: bool = False

    @property
    def agent(self) -> str:
        return self.folder.name

    def write(self, entry: Mapping[str, Any]) -> None:
        """Write the next ``CURRENT`` and the line, and wait for the disk."""
        own = f"-{os.getpid()}-{secrets.token_hex(4)}"
        new, line = (self.folder / f"{name}{own}" for name in (_NEW_FILE, MOVING_FILE))
        text = f"{folder_name(self.version)}\n".encode()
        durable.write_files({new: text, line: json.dumps(entry).encode()})
        self.new, self.line = new, line

    @property
    def standing(self) -> bool:
        """Whether what was prepared is still there."""
        return all(path is not None and path.exists() for path in (self.new, self.line))

    def take_away(self) -> None:
        """Leave nothing behind of what was prepared."""
        for path in (self.new, self.line):
            if path is not None:
                path.unlink(missing_ok=True)


def prepared_line(folder: Path, version: int | None) -> dict[str, Any] | None:
    """The line of a move to ``version`` that a crash cut off; ``None`` when there is none."""
    for path in sorted(folder.glob(f"{MOVING_FILE}*")):
        with contextlib.suppress(FileNotFoundError, ValueError):
            entry: Any = json.loads(path.read_bytes())
            if isinstance(entry, dict) and entry.get("to") == version:
                evidence = {**entry["evidence"], "late": LATE}
                return {**entry, "evidence": evidence}
    return None


def remove_left(folder: Path) -> None:
    """Take away what moves that a crash cut off, or that are being prepared, left in a folder."""
    for path in [*folder.glob(f"{MOVING_FILE}*"), *folder.glob(f"{_NEW_FILE}-*")]:
        path.unlink(missing_ok=True)
