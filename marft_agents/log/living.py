"""Which segments are still being written.

Invariant: a segment counts as finished only when that is certain enough to leave it out of use: its
writer is of this machine and gone, or of another one and has been silent for long.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from marft_agents.log.segment import host_name, in_use

SILENT_S = 86_400.0
"""Seconds without a write after which a segment of another machine counts as finished."""
_SEGMENT = re.compile(r"events-\d{8}T\d{6}Z-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{8}\.jsonl")


def writer_of(path: Path, *, now: float | None = None) -> str | None:
    """Who may still write to a segment; ``None`` when nobody does, or it is no segment of ours."""
    match = _SEGMENT.fullmatch(path.name)
    if match is None:
        return None
    pid = int(match["pid"])
    if match["host"] == host_name():
        locked = os.access(path, os.W_OK) and in_use(path)
        return f"process {pid}" if locked or _has_open(pid, path) else None
    age = (time.time() if now is None else now) - path.stat().st_mtime
    return f"process {pid} on {match['host']}" if age < SILENT_S else None


def _has_open(pid: int, path: Path) -> bool:
    """Whether the process lives and has the file open; only that it lives, where no one may look.

    A number may have been given to another process, or belong to another container's.
    """
    if os.name == "nt":  # signal 0 is not a question there
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it lives, and is somebody else's
    try:
        wanted = path.stat()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found = link.stat()
            except OSError:
                continue
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
        return False
    except OSError:
        return True
