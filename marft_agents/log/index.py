"""Which bytes belong to which episode, on disk instead of in memory.

Invariant: memory does not grow with the log. The index is a temporary SQLite database that the
system deletes when it is closed or the process dies.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import NamedTuple

from marft_agents.errors import LogError


class Entry(NamedTuple):
    """Bytes of one event: ``length`` of them at ``offset`` in the ``file``-th file."""

    file: int
    offset: int
    length: int


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
                "CREATE TABLE event (seq INTEGER PRIMARY KEY, episode TEXT NOT NULL,"
                " file INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL)"
            )
            self._db.executemany(
                "INSERT INTO event (episode, file, offset, length) VALUES (?, ?, ?, ?)",
                ((episode_id, *entry) for episode_id, entry in rows),
            )
            self._db.execute("CREATE INDEX by_episode ON event (episode, seq)")
        except sqlite3.Error as error:
            self.close()
            raise LogError(
                f"cannot index the log in the folder for temporary files: {error};"
                " free some space there, or point SQLITE_TMPDIR at another folder"
            ) from error
        except BaseException:
            self.close()
            raise

    def episode_ids(self) -> Iterator[str]:
        query = "SELECT episode FROM event GROUP BY episode ORDER BY MIN(seq)"
        for (episode_id,) in self._db.execute(query):
            yield episode_id

    def entries(self, episode_id: str) -> Iterator[Entry]:
        query = "SELECT file, offset, length FROM event WHERE episode = ? ORDER BY seq"
        for row in self._db.execute(query, (episode_id,)):
            yield Entry(*row)

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
