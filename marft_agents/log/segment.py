"""An append-only file of lines.

Invariant: a line is handed to the system in one write at the file's end, so a reader never sees
two lines mixed; and a line never begins behind the rest of a torn one. Torn bytes stay where they
are: they may be all that is left of somebody's record.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType

from marft_agents.log.encode import encode_line
from marft_agents.schema import Event


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

    @property
    def deleted(self) -> bool:
        """Whether somebody removed the file: what is appended to it now is lost."""
        return os.fstat(self._fd).st_nlink == 0

    def append(self, line: bytes) -> None:
        """Append one line; when this returns it survives the death of the process.

        Raises:
            OSError: the disk refused. Part of the line may be in the file; the next one that is
                appended starts behind it, on a line of its own.
        """
        rest = b"\n" + line if self._torn else line
        self._torn = True
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self._torn = False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)

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


def _ends_inside_a_line(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
