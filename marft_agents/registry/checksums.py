"""Checksums of files that never change, so that each is computed once.

Invariant: what is remembered of a file is used only while its device, inode, size and times are
those that it had when it was read from end to end, and only if it was older than the coarsest clock
of a file system then: a later write would have changed them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from marft_agents.registry import durable

_SETTLED_NS = 2_000_000_000
_MOST = 10_000
_State = tuple[int, ...]


def _state(path: Path) -> _State:
    s = os.stat(path)
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns


class Checksums:
    """sha256 by path; may be used from several threads."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[_State, str]] = {}

    def of(self, path: Path) -> str:
        """The file's sha256, in hexadecimal.

        Raises:
            OSError: it cannot be read.
        """
        state = _state(path)
        known = self._known.get(path)
        if known is not None and known[0] == state:
            return known[1]
        began = time.time_ns()
        digest = durable.sha256_file(path)
        if _state(path) == state and max(state[-2:]) < began - _SETTLED_NS:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[path] = state, digest
        return digest
