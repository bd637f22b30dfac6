"""Read any number of log files, whatever their state.

Invariant: damage costs the damaged lines only, and each is counted with its place. Memory holds
one episode at a time. Events of one episode may be spread over all files in any order; a reward
may come before its episode.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from marft_agents.errors import LogError
from marft_agents.log.fold import fold
from marft_agents.log.index import Entry, EpisodeIndex
from marft_agents.log.records import Place, Refusal, Skipped, parse, raw_lines, read_line
from marft_agents.schema import AnyEvent, Episode

_MAX_SKIPPED = 100


class LogReader:
    """Reads files and folders (every ``*.jsonl`` in it, by name); a file named twice is read once.

    ``skipped`` (the first 100), ``skipped_count`` and ``duplicates`` describe the latest reading.

    Raises:
        LogError: a path is missing or cannot be read, a folder has no ``*.jsonl``, or (when read)
            there is no event in any of them.
    """

    def __init__(self, *paths: str | Path) -> None:
        if not paths:
            raise LogError("no log was named; give a file or a folder of *.jsonl files")
        self.paths = [Path(path) for path in paths]
        self.files = list({file.resolve(): file for p in self.paths for file in _files(p)}.values())
        self.skipped: list[Skipped] = []
        self.skipped_count = 0
        self.duplicates = 0

    def events(self) -> Iterator[tuple[AnyEvent, Place]]:
        """Every event in file order, duplicates included."""
        for event, place, _, _ in self._scan():
            yield event, place

    def episodes(self) -> Iterator[Episode]:
        """Every episode, by its first appearance, with its turns by (index, time)."""
        with self._index() as index:
            for episode_id in index.episode_ids():
                episode = self._read(index, episode_id)
                if episode is not None:
                    yield episode

    def episode(self, episode_id: str) -> Episode:
        """One episode by its id.

        Raises:
            LogError: no file holds it; the message names ids that look like it.
        """
        with self._index() as index:
            episode = self._read(index, episode_id)
            if episode is not None:
                return episode
            raise LogError(
                f"no episode {episode_id!r} in {self._names()};"
                f" did you mean {_near(episode_id, index)}?"
            )

    def _index(self) -> EpisodeIndex:
        return EpisodeIndex(
            (event.episode_id, Entry(number, place.offset, length))
            for event, place, number, length in self._scan()
        )

    def _scan(self) -> Iterator[tuple[AnyEvent, Place, int, int]]:
        """Yields event, place, number of the file, length in bytes."""
        self.skipped, self.skipped_count, self.duplicates = [], 0, 0
        empty = True
        for number, path in enumerate(self.files):
            with _open(path) as file:
                for line in raw_lines(file):
                    if line.data is None:
                        self._skip(Place(path, line.offset, line.number), "line too long")
                        continue
                    found, lost = read_line(line.data, line.offset)
                    if lost is not None:
                        self._skip(Place(path, line.offset, line.number), lost)
                    for event, offset, length in found:
                        empty = False
                        yield event, Place(path, offset, line.number), number, length
        if empty:
            first = "".join(f", first {skipped}" for skipped in self.skipped[:1])
            raise LogError(
                f"no event in {self._names()}; lines skipped: {self.skipped_count}{first}"
            )

    def _read(self, index: EpisodeIndex, episode_id: str) -> Episode | None:
        folded = fold(episode_id, self._events_at(index.entries(episode_id)))
        self.duplicates += folded.duplicates
        return folded.episode if folded.episode.sources else None

    def _events_at(self, entries: Iterator[Entry]) -> Iterator[tuple[AnyEvent, str]]:
        with ExitStack() as stack:
            handles: dict[int, BinaryIO] = {}
            for number, offset, length in entries:
                path = self.files[number]
                if number not in handles:
                    handles[number] = stack.enter_context(_open(path))
                handles[number].seek(offset)
                event = parse(handles[number].read(length))
                if isinstance(event, Refusal):
                    self._skip(Place(path, offset, 0), f"changed while being read: {event.reason}")
                else:
                    yield event, str(path)

    def _skip(self, place: Place, reason: str) -> None:
        self.skipped_count += 1
        if len(self.skipped) < _MAX_SKIPPED:
            self.skipped.append(Skipped(place.file, place.line, place.offset, reason))

    def _names(self) -> str:
        return ", ".join(str(path) for path in self.paths)


def _files(path: Path) -> list[Path]:
    try:
        if not path.exists():
            raise LogError(f"{path} does not exist; name a *.jsonl file or a folder of them")
        if not path.is_dir():
            return [path]
        files = sorted(p for p in path.glob("*.jsonl") if p.is_file())
        if files:
            return files
        deeper = next((p.parent for p in path.glob("*/*.jsonl")), None)
    except OSError as error:
        raise LogError(f"cannot list {path}: {error.strerror}") from error
    hint = f"; {deeper} has some" if deeper else "; was anything recorded there?"
    raise LogError(f"no *.jsonl file in {path}{hint}")


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise LogError(f"cannot read {path}: {error.strerror}") from error


def _near(episode_id: str, index: EpisodeIndex) -> str:
    begins = (name for name in index.episode_ids() if episode_id and name.startswith(episode_id))
    near = [name for name, _ in zip(begins, range(3), strict=False)]
    near += difflib.get_close_matches(episode_id, list(index.episode_ids()), n=3)
    if not near:
        near = [name for name, _ in zip(index.episode_ids(), range(3), strict=False)]
    return " or ".join(repr(name) for name in list(dict.fromkeys(near))[:3])
