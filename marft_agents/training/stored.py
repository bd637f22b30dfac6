"""Sequences of records that live on disk.

Invariant: what stays in memory is 8 bytes a record and one buffer, however large the records are.
They are in a file without a name, which the system takes away when the sequence is gone or the
process dies, in whatever way; a short sequence never reaches the disk. A record is made anew each
time it is asked for, equal to the one that was put in.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

from marft_agents.errors import LogError

T = TypeVar("T")
_HELD = 2**17
"""Bytes that are held before they are written: few enough to stay in the processor's cache."""


class Stored(Sequence[T]):
    """Records of type ``T``, appended as bytes, read in any order and any number of times.

    ``unpack`` makes a record of its bytes. Two sequences, or one and a list, are equal when their
    records are. A copy, or what another process gets, is a plain list.

    Raises:
        LogError: the disk for temporary files is full, or gives nothing back.
    """

    def __init__(self, unpack: Callable[[bytes], T]) -> None:
        self._unpack = unpack
        self._starts = array("q", [0])
        """Where each record begins, and at last where the next one will."""
        self._held: list[bytes] = []
        self._size = self._written = 0
        self._file: int | None = None

    def append(self, packed: bytes) -> None:
        self._held.append(packed)
        self._size += len(packed)
        self._starts.append(self._size)
        if self._size - self._written >= _HELD:
            self._write()

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        return self._unpack(self._packed(at))

    def __iter__(self) -> Iterator[T]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stored | list):
            return NotImplemented
        same: Sequence[Any] = other
        return len(self) == len(same) and all(a == b for a, b in zip(self, same, strict=True))

    __hash__ = None  # pyright: ignore[reportAssignmentType] it grows

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type[list[T]], tuple[list[T]]]:
        return list, (list(self),)

    def _packed(self, at: int) -> bytes:
        start, end = self._starts[at], self._starts[at + 1]
        if self._file is None or at >= len(self) - len(self._held):
            return self._held[at - len(self)]
        try:
            data = os.pread(self._file, end - start, start)
        except OSError as error:
            raise _failed("read", error) from error
        if len(data) < end - start:
            raise LogError(f"a temporary file in {_folder()} was cut; start again")
        return data

    def _write(self) -> None:
        try:
            if self._file is None:
                self._file = self._open()
            rest = memoryview(b"".join(self._held))
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise _failed("write", error) from error
        self._written = self._size
        self._held = []

    def _open(self) -> int:
        file = tempfile.TemporaryFile(buffering=0, dir=_folder())  # noqa: SIM115 closed with us
        weakref.finalize(self, file.close)
        return file.fileno()


class Picked(Sequence[T]):
    """Some records of a sequence by their indices, each made when it is asked for."""

    def __init__(self, records: Sequence[T], indices: Sequence[int]) -> None:
        self._records, self._indices = records, indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return Picked(self._records, self._indices[index])
        return self._records[self._indices[index]]


def _folder() -> str:
    """Where temporary files go: as the environment says, else where the system keeps large ones.

    The usual folder is in memory on many systems, which is what is to be spared here.
    """
    named = any(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    large = os.path.join(os.sep, "var", "tmp")
    return large if not named and os.access(large, os.W_OK) else tempfile.gettempdir()


def _failed(what: str, error: OSError) -> LogError:
    return LogError(
        f"cannot {what} the log's turns in the folder for temporary files, {_folder()}:"
        f" {error.strerror}; free some space there, or point TMPDIR at another folder"
    )
