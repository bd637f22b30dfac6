"""The writer of one process: its own segment, one line an event.

Invariant: an event whose ``write`` returned is readable after ``kill -9`` of the process (a power
cut may still lose it: nothing is flushed through to the device). No two processes share a segment:
a forked child begins its own.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import weakref
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from marft_agents.log.encode import encode_line
from marft_agents.log.segment import LineFile
from marft_agents.schema import Event


class LogWriter:
    """Appends events to a segment in ``directory``; may be used from any thread.

    The folder and the segment are made at the first write; a relative ``directory`` is that of the
    moment the writer was made. ``close`` ends the segment, and so does its deletion; a later write
    begins a new one.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).absolute()
        self._lock = threading.Lock()
        self._file: LineFile | None = None
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
            if self._file is not None and self._file.deleted:
                self._file.close()
                self._file = None
            if self._file is None:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._file = LineFile(self.directory / _segment_name(), fresh=True)
            self._file.append(line)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

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


def host_name() -> str:
    """This machine's name as it stands in the names of segments."""
    return re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname()).strip("-")[:32] or "host"


_writers: weakref.WeakSet[LogWriter] = weakref.WeakSet()


def _reset_in_child() -> None:
    for writer in list(_writers):
        writer._after_fork()  # pyright: ignore[reportPrivateUsage] same module


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)
