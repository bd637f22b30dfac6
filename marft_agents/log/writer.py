"""The writer of one process: its own segment, one line an event.

Invariant: an event whose ``write`` returned is readable after ``kill -9`` of the process (a power
cut may still lose it: nothing is flushed through to the device). No two processes share a segment:
a forked child begins its own. A segment that has grown large is ended and a new one begun; where
that fails, the old one goes on.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from types import TracebackType

from marft_agents.log.encode import encode_line
from marft_agents.log.retention import Retention, clear
from marft_agents.log.segment import LineFile, host_name
from marft_agents.schema import Event

SEGMENT_BYTES = 256 * 2**20

logger = logging.getLogger("marft_agents.log")


class LogWriter:
    """Appends events to a segment in ``directory``; may be used from any thread.

    The folder and the segment are made at the first write; a relative ``directory`` is that of the
    moment the writer was made. ``close`` ends the segment, and so does its deletion; a later write
    begins a new one.

    Args:
        segment_bytes: size from which on a new segment is begun; with ``retention.max_bytes`` at
            most an eighth of that.
        retention: which old segments of the folder to remove whenever a new one is begun.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        retention: Retention | None = None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self._retention = retention
        limit = retention.max_bytes if retention else None
        self._segment_bytes = min(segment_bytes, limit // 8) if limit else segment_bytes
        self._lock = threading.Lock()
        self._file: LineFile | None = None
        self._said = False
        _writers.add(self)

    @property
    def path(self) -> Path | None:
        """The open segment; ``None`` before the first write."""
        return self._file.path if self._file else None

    def write(self, event: Event) -> None:
        """Append one event.

        Raises:
            OSError: the disk refused; the event may be torn, those before and after it are not.
        """
        line = encode_line(event)
        with self._lock:
            self._segment().append(line)

    def write_many(self, events: Sequence[Event]) -> int:
        """Append events in one go; how many, from the first on, are in the log.

        Fewer than there are where the disk refused, as ``write`` would have said.
        """
        lines, done = [encode_line(event) for event in events], 0
        with self._lock:
            while done < len(lines):
                try:
                    file = self._segment()
                    ends = accumulate(map(len, lines[done:]), initial=file.size)
                    fitting = max(1, sum(end < self._segment_bytes for end in ends))
                    taken = file.append_many(lines[done : done + fitting])
                except Exception:  # ``write`` says which, for the next event
                    break
                done += taken
                if taken < min(fitting, len(lines) - done + taken):
                    break
        return done

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _segment(self) -> LineFile:
        """The segment to write to; the caller holds the lock."""
        if self._file is not None and self._file.gone:
            self._file.close()
            self._file = None
        if self._file is not None and self._file.size < self._segment_bytes:
            return self._file
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            new = LineFile(self.directory / _segment_name(), fresh=True)
        except OSError:
            if self._file is None:
                raise
            return self._file
        if self._file is not None:
            self._file.close()
        self._file = new
        if self._retention is not None:
            self._clear(self._retention, new)
        return new

    def _clear(self, retention: Retention, current: LineFile) -> None:
        try:
            said = clear(self.directory, retention, current)
        except Exception as error:  # writing goes on whatever happens to old segments
            said = f"could not remove old segments in {self.directory}: {error}"
        if said and not self._said:
            self._said = True
            logger.warning("marft-agents %s", said)

    def _after_fork(self) -> None:
        # Another thread may have held the lock when the process was forked; it is not here.
        self._lock = threading.Lock()
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _segment_name() -> str:
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return f"events-{now}-{host_name()}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"


_writers: weakref.WeakSet[LogWriter] = weakref.WeakSet()


def _reset_in_child() -> None:
    for writer in list(_writers):
        writer._after_fork()  # pyright: ignore[reportPrivateUsage] same module


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)
