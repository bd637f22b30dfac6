"""Read any number of log files, whatever their state.

Invariant: damage costs the damaged lines only, and each is counted with its place. Memory holds
one episode at a time. Events of one episode may be spread over all files in any order; a reward
may come before its episode. For episodes a line is parsed once: where it belongs is seen at a
glance first, and whether it is a record when its episode is read.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

from marft_agents.errors import LogError
from marft_agents.log.fold import fold
from marft_agents.log.index import Entry, EpisodeIndex
from marft_agents.log.records import (
    Place,
    Refusal,
    Skipped,
    glances,
    parse,
    raw_lines,
    read_line,
)
from marft_agents.schema import AnyEvent, Episode

_MAX_SKIPPED = 100
_MAX_OPEN = 64
_RUN = 2**20
"""Bytes after which a run of lines is ended; it is read at once."""


class Record(NamedTuple):
    """An event, and the line of the log that it was read from, without its newline."""

    event: AnyEvent
    file: Path
    data: bytes
    line: int


class LogReader:
    """Reads files and folders (every ``*.jsonl`` in it, by name); a file named twice is read once.

    ``skipped`` (the first 100), ``skipped_count`` and ``duplicates`` describe the latest reading;
    ``on_skip`` is told of every one.

    Raises:
        LogError: a path is missing or cannot be read, a folder has no ``*.jsonl``, or (when read)
            there is no event in any of them.
    """

    def __init__(
        self, *paths: str | Path, on_skip: Callable[[Skipped], None] | None = None
    ) -> None:
        if not paths:
            raise LogError("no log was named; give a file or a folder of *.jsonl files")
        self.paths = [Path(path) for path in paths]
        self.files = list({file.resolve(): file for p in self.paths for file in _files(p)}.values())
        self.skipped: list[Skipped] = []
        self.skipped_count = 0
        self.duplicates = 0
        self._on_skip = on_skip

    def events(self) -> Iterator[tuple[AnyEvent, Place]]:
        """Every event in file order, duplicates included."""
        self._begin()
        empty = True
        for number, path in enumerate(self.files):
            for event, entry in self._parsed(number, path):
                empty = False
                yield event, Place(path, entry.offset, entry.line)
        if empty:
            raise self._no_event()

    def episodes(self) -> Iterator[Episode]:
        """Every episode, by its first appearance, with its turns by (index, time)."""
        for episode_id, records in self.records():
            yield self.fold(episode_id, records)

    def records(self) -> Iterator[tuple[str, list[Record]]]:
        """Every episode's events as they were written, by its first appearance."""
        self._begin()
        empty = True
        with self._index() as index, _Files(self.files) as files:
            for episode_id, entries in index.episodes():
                records = list(self._records(files, episode_id, entries))
                if records:
                    empty = False
                    yield episode_id, records
        if empty:
            raise self._no_event()

    def episode(self, episode_id: str) -> Episode:
        """One episode by its id.

        Raises:
            LogError: no file holds it; the message names ids that look like it.
        """
        self._begin()
        with self._index() as index, _Files(self.files) as files:
            records = list(self._records(files, episode_id, index.entries(episode_id)))
            if records:
                return self.fold(episode_id, records)
            if next(index.episode_ids(), None) is None:
                raise self._no_event()
            raise LogError(
                f"no episode {episode_id!r} in {self._names()};"
                f" did you mean {_near(episode_id, index)}?"
            )

    def _begin(self) -> None:
        self.skipped, self.skipped_count, self.duplicates = [], 0, 0

    def _index(self) -> EpisodeIndex:
        return EpisodeIndex(
            row for number, path in enumerate(self.files) for row in self._glanced(number, path)
        )

    def _glanced(self, number: int, path: Path) -> Iterator[tuple[str, Entry]]:
        """Where every line belongs; only a line that says so in no plain way is parsed.

        Lines of one episode that follow each other are one entry.
        """
        name: bytes | None = None
        begin = length = first = 0
        with _open(path) as file:
            for line, offset, size, episode, data in glances(file):
                if episode is not None and episode == name and length < _RUN:
                    length += size
                    continue
                if name is not None:
                    yield name.decode(), Entry(number, begin, length, first)
                name, begin, length, first = episode, offset, size, line
                if episode is None:
                    for event, entry in self._read(number, path, line, offset, data):
                        yield event.episode_id, entry
        if name is not None:
            yield name.decode(), Entry(number, begin, length, first)

    def _parsed(self, number: int, path: Path) -> Iterator[tuple[AnyEvent, Entry]]:
        with _open(path) as file:
            for line, offset, data in raw_lines(file):
                yield from self._read(number, path, line, offset, data)

    def _read(
        self, number: int, path: Path, line: int, offset: int, data: bytes | None
    ) -> Iterator[tuple[AnyEvent, Entry]]:
        found, lost = ([], "line too long") if data is None else read_line(data, offset)
        if lost is not None:
            self._skip(Place(path, offset, line), lost)
        for event, start, length in found:
            yield event, Entry(number, start, length, line)

    def _records(
        self, files: _Files, episode_id: str, entries: Iterable[Entry]
    ) -> Iterator[Record]:
        for entry in entries:
            path, offset = self.files[entry.file], entry.offset
            data = files.read(entry)
            if len(data) < entry.length:
                self._skip(Place(path, offset, entry.line), "changed while being read: cut")
            for number, line in enumerate(data.split(b"\n"), entry.line):
                event = parse(line) if line else None
                if isinstance(event, Refusal):
                    self._skip(Place(path, offset, number), event.reason)
                elif event is not None and event.episode_id != episode_id:
                    why = f"changed while being read: of episode {event.episode_id!r} now"
                    self._skip(Place(path, offset, number), why)
                elif event is not None:
                    yield Record(event, path, line, number)
                offset += len(line) + 1

    def fold(self, episode_id: str, records: Iterable[Record]) -> Episode:
        """The episode that its records make; what is left out of it is counted."""
        folded = fold(episode_id, ((record.event, str(record.file)) for record in records))
        self.duplicates += folded.duplicates
        return folded.episode

    def _no_event(self) -> LogError:
        first = "".join(f", first {skipped}" for skipped in self.skipped[:1])
        return LogError(f"no event in {self._names()}; lines skipped: {self.skipped_count}{first}")

    def _skip(self, place: Place, reason: str) -> None:
        self.skipped_count += 1
        skipped = Skipped(place.file, place.line, place.offset, reason)
        if self._on_skip is not None:
            self._on_skip(skipped)
        if len(self.skipped) < _MAX_SKIPPED:
            self.skipped.append(skipped)

    def _names(self) -> str:
        return ", ".join(str(path) for path in self.paths)


class _Files:
    """The log's files for reading here and there; few are open at a time."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._open: dict[int, BinaryIO] = {}
        self._latest: tuple[int, BinaryIO | None] = -1, None

    def read(self, entry: Entry) -> bytes:
        """The entry's bytes; fewer when the file was cut meanwhile."""
        number, file = self._latest
        if file is None or number != entry.file:
            file = self._open.pop(entry.file, None) or _open(self._paths[entry.file], 0)
            self._open[entry.file] = file  # the last one used is the last one closed
            self._latest = entry.file, file
            if len(self._open) > _MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
        try:
            file.seek(entry.offset)
            return file.read(entry.length)
        except OSError as error:
            raise LogError(f"cannot read {self._paths[entry.file]}: {error.strerror}") from error

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for file in self._open.values():
                stack.callback(file.close)


def _files(path: Path) -> list[Path]:
    try:
        if not path.exists():
            raise LogError(f"{path} does not exist; name a *.jsonl file or a folder of them")
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise LogError(
                f"{path} is neither a file nor a folder, and a log is read here and there; save"
                " what comes out of it to a file, and name that"
            )
        files = sorted(p for p in path.glob("*.jsonl") if p.is_file())
        if files:
            return files
        deeper = next((p.parent for p in path.glob("*/*.jsonl")), None)
    except OSError as error:
        raise LogError(f"cannot list {path}: {error.strerror}") from error
    hint = f"; {deeper} has some" if deeper else "; was anything recorded there?"
    raise LogError(f"no *.jsonl file in {path}{hint}")


def _open(path: Path, buffering: int = -1) -> BinaryIO:
    try:
        return path.open("rb", buffering)
    except OSError as error:
        raise LogError(f"cannot read {path}: {error.strerror}") from error


def _near(episode_id: str, index: EpisodeIndex) -> str:
    begins = (name for name in index.episode_ids() if episode_id and name.startswith(episode_id))
    near = [name for name, _ in zip(begins, range(3), strict=False)]
    near += difflib.get_close_matches(episode_id, list(index.episode_ids()), n=3)
    if not near:
        near = [name for name, _ in zip(index.episode_ids(), range(3), strict=False)]
    return " or ".join(repr(name) for name in list(dict.fromkeys(near))[:3])
