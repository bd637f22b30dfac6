"""An append-only file of lines.

Invariant: a line is handed to the system in one write at the file's end, so a reader never sees
two lines mixed; and a line never begins behind the rest of a torn one. Torn bytes stay where they
are: they may be all that is left of somebody's record. A file being written is locked, so that
nobody clears it away; a descriptor that the app closed (and perhaps got again for a file of its
own) is never written to.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType

from marft_agents.log.encode import encode_line
from marft_agents.schema import Event

try:
    import fcntl
except ImportError:  # Windows, which keeps open files from being removed by itself
    fcntl = None


class _CutError(Exception):
    """The disk took ``written`` bytes and refused the rest."""

    def __init__(self, written: int, cause: OSError) -> None:
        super().__init__(written)
        self.written, self.cause = written, cause


class LineFile:
    """A file opened for appending lines; not locked, so use it from one thread at a time.

    Args:
        fresh: refuse a file that exists, so that no other writer shares it.
    """

    def __init__(self, path: str | Path, *, fresh: bool = False) -> None:
        self.path = Path(path)
        mode = os.O_RDWR | os.O_APPEND | os.O_CREAT | (os.O_EXCL if fresh else 0)
        self._fd = os.open(self.path, mode, 0o666)
        self._torn = False if fresh else _ends_inside_a_line(self._fd)
        self._identity = _identity(self._fd)
        self.size = os.fstat(self._fd).st_size
        """Bytes in the file, as far as this writer knows."""
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    @property
    def gone(self) -> bool:
        """Whether what is appended now is lost: somebody removed the file, or closed it."""
        try:
            found = os.fstat(self._fd)  # once: the app's threads wait for those who come back
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != self._identity or found.st_nlink == 0

    def append(self, line: bytes) -> None:
        """Append one line; when this returns it survives the death of the process.

        Raises:
            OSError: the disk refused. Part of the line may be in the file; the next one that is
                appended starts behind it, on a line of its own.
        """
        try:
            self._put(line)
        except _CutError as cut:
            raise cut.cause from None

    def append_many(self, lines: Sequence[bytes]) -> int:
        """Append lines in one go; how many, from the first on, are in the file whole.

        Fewer than there are where the disk refused: as in ``append``, part of the next one may be
        in the file, too.
        """
        try:
            self._put(b"".join(lines))
        except _CutError as cut:
            ends = accumulate(map(len, lines))
            return sum(end <= cut.written for end in ends)
        return len(lines)

    def _put(self, data: bytes) -> None:
        """Append whole lines.

        Raises:
            _CutError: the disk refused, after so many bytes of ``data``.
        """
        mended = int(self._torn)
        rest = b"\n" + data if mended else data
        whole, self._torn = len(rest), True
        while rest:
            try:
                written = os.write(self._fd, rest)
            except OSError as error:
                raise _CutError(max(0, whole - len(rest) - mended), error) from error
            self.size += written
            rest = rest[written:]
        self._torn = False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if _identity(self._fd) == self._identity:  # else it is somebody else's by now
                os.close(self._fd)
        self._identity = (-1, -1)

    def __del__(self) -> None:
        if hasattr(self, "_identity"):
            self.close()

    def __enter__(self) -> LineFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def append_event(path: str | Path, event: Event) -> None:
    """Append one event to a file that may exist and may end in a torn line.

    Raises:
        OSError: the file cannot be opened or written.
    """
    line = encode_line(event)
    with LineFile(path) as file:
        file.append(line)


def host_name() -> str:
    """This machine's name as it stands in the names of segments."""
    return re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname()).strip("-")[:32] or "host"


def in_use(path: Path) -> bool:
    """Whether a living process writes ``path``; also True where that cannot be found out."""
    if fcntl is None:
        return False
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _ends_inside_a_line(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
