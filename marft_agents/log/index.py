"""Which bytes belong to which episode, on disk instead of in memory.

Invariant: memory does not grow with the log. The index is a temporary SQLite database that the
system deletes when it is closed or the process dies. Entries of one episode that are met soon after
each other are one row, so the index of a log of many episodes at a time is small too.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterable, Iterator
from itertools import groupby
from types import TracebackType
from typing import NamedTuple

from marft_agents.errors import LogError

_PENDING = 2**14
"""Entries that are held before they are written."""


class Entry(NamedTuple):
    """Whole events: ``length`` bytes at ``offset`` in the ``file``-th file, from ``line`` on."""

    file: int
    offset: int
    length: int
    line: int


_FIELDS = len(Entry._fields)
_ALL = (
    "SELECT part.episode, entries FROM part"
    " JOIN (SELECT episode, MIN(first) AS met FROM part GROUP BY episode) AS seen"
    " ON part.episode = seen.episode ORDER BY met, first"
)


class EpisodeIndex:
    """Events by episode, both in the order of their appearance.

    Raises:
        LogError: the disk for temporary files is full.
    """

    def __init__(self, rows: Iterable[tuple[str, Entry]]) -> None:
        # The empty name asks SQLite for a temporary file of its own.
        self._db = sqlite3.connect("", check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode = OFF")
            self._db.execute("PRAGMA temp_store = FILE")
            self._db.execute(
                "CREATE TABLE part (episode BLOB NOT NULL, first INTEGER NOT NULL,"
                " entries BLOB NOT NULL)"
            )
            self._db.executemany(
                "INSERT INTO part (episode, first, entries) VALUES (?, ?, ?)", _parts(rows)
            )
            self._db.execute("CREATE INDEX by_episode ON part (episode, first)")
        except sqlite3.Error as error:
            self.close()
            raise _full(error) from error
        except BaseException:
            self.close()
            raise

    def episodes(self) -> Iterator[tuple[str, Iterator[Entry]]]:
        """Every episode with its entries, which are to be used before the next is asked for."""
        try:
            for key, rows in groupby(self._db.execute(_ALL), key=lambda row: row[0]):
                yield key.decode(), (entry for row in rows for entry in _entries(row[1]))
        except sqlite3.Error as error:
            raise _full(error) from error

    def episode_ids(self) -> Iterator[str]:
        query = "SELECT episode FROM part GROUP BY episode ORDER BY MIN(first)"
        for (key,) in self._db.execute(query):
            yield key.decode()

    def entries(self, episode_id: str) -> Iterator[Entry]:
        query = "SELECT entries FROM part WHERE episode = ? ORDER BY first"
        for (packed,) in self._db.execute(query, (episode_id.encode(),)):
            yield from _entries(packed)

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> EpisodeIndex:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _parts(rows: Iterable[tuple[str, Entry]]) -> Iterator[tuple[bytes, int, bytes]]:
    """Episode, number of its first row in the part, and the part's entries."""
    pending: dict[str, tuple[int, array[int]]] = {}
    held = 0
    for number, (episode_id, entry) in enumerate(rows):
        known = pending.get(episode_id)
        if known is None:
            pending[episode_id] = number, array("q", entry)
        else:
            known[1].extend(entry)
        held += 1
        if held == _PENDING:
            yield from _packed(pending)
            pending, held = {}, 0
    yield from _packed(pending)


def _packed(pending: dict[str, tuple[int, array[int]]]) -> Iterator[tuple[bytes, int, bytes]]:
    return ((name.encode(), first, held.tobytes()) for name, (first, held) in pending.items())


def _entries(packed: bytes) -> Iterator[Entry]:
    numbers = iter(array("q", packed))
    yield from map(Entry._make, zip(*[numbers] * _FIELDS, strict=True))


def _full(error: sqlite3.Error) -> LogError:
    return LogError(
        f"cannot index the log in the folder for temporary files: {error};"
        " free some space there, or point SQLITE_TMPDIR at another folder"
    )
