"""Few files in place of many, without what is there twice.

Invariant: what the compacted log folds to is what its source folds to: only turns that fold as
duplicates, rewards and edits that later ones supersede, and second starts and ends are left out.
Lines are copied as they are, except those that name a turn that went. The source is only read; the
target appears whole, on disk and under its name, or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from marft_agents.errors import LogError
from marft_agents.log.encode import encode_line
from marft_agents.log.fold import with_known_turn, with_known_turns, without_duplicates
from marft_agents.log.living import writer_of
from marft_agents.log.reader import LogReader, Record
from marft_agents.log.whole import refuse_existing, whole_folder
from marft_agents.schema import (
    AnyEvent,
    EditEvent,
    EpisodeEnded,
    EpisodeStarted,
    RewardEvent,
    Turn,
)

FILE_BYTES = 256 * 2**20
"""A file is ended behind the episode that makes it this large."""


@dataclass
class Compacted:
    """What was written, and what was not."""

    files: int = 0
    bytes: int = 0
    source_files: int = 0
    source_bytes: int = 0
    episodes: int = 0
    events: int = 0
    left_out: int = 0
    """Events that are there twice or that later ones supersede."""
    deleted: list[str] = field(default_factory=list[str])
    later: int = 0
    """Episodes with an event at or after ``before``."""
    damaged: int = 0
    """Lines that are no event; they stay in the source only."""
    still_written: dict[str, str] = field(default_factory=dict[str, str])
    """Segment to who writes it."""


def compact(
    sources: Sequence[Path],
    target: Path,
    *,
    before: datetime | None = None,
    delete: Collection[str] = (),
    file_bytes: int = FILE_BYTES,
) -> Compacted:
    """Write the episodes of ``sources`` into the folder ``target``, one after the other.

    Args:
        before: only episodes whose events are all older.
        delete: ids of episodes to leave out.

    Raises:
        LogError: the target is in use, a source cannot be read, an episode to delete is not there
            or still being written, or the disk refused; there is no target then.
    """
    refuse_existing(target)
    every = LogReader(*sources).files
    living = {path: who for path in every if (who := writer_of(path)) is not None}
    finished = [path for path in every if path not in living]
    if not finished:
        raise LogError(f"nothing to compact: {_first(living)}; end the app first")
    if delete:
        _refuse_living(delete, living)
    done = Compacted(
        source_files=len(finished),
        source_bytes=sum(path.stat().st_size for path in finished),
        still_written={str(path): who for path, who in living.items()},
    )
    try:
        with whole_folder(target.absolute()) as folder:
            _write(LogReader(*finished), folder, done, before, set(delete), file_bytes)
            missing = sorted(set(delete) - set(done.deleted))
            if missing:
                names = ", ".join(map(repr, missing))
                raise LogError(f"no episode {names} to delete; nothing written")
    except OSError as error:
        raise LogError(
            f"cannot write {target}: {error.strerror or error}; nothing written"
        ) from error
    return done


def _write(
    reader: LogReader,
    folder: Path,
    done: Compacted,
    before: datetime | None,
    delete: set[str],
    file_bytes: int,
) -> None:
    file: BinaryIO | None = None
    try:
        for episode_id, records in reader.records():
            if episode_id in delete:
                done.deleted.append(episode_id)
                continue
            if before is not None and max(r.event.time for r in records) >= before:
                done.later += 1
                continue
            if file is None or file.tell() >= file_bytes:
                file = _next(file, folder, done)
            kept = list(kept_lines(records))
            file.writelines(kept)
            done.bytes += sum(map(len, kept))
            done.episodes += 1
            done.events += len(kept)
            done.left_out += len(records) - len(kept)
    finally:
        if file is not None:
            file.close()
    done.damaged = reader.skipped_count


def _next(last: BinaryIO | None, folder: Path, done: Compacted) -> BinaryIO:
    if last is not None:
        last.close()
    done.files += 1
    return (folder / f"compacted-{done.files:05d}.jsonl").open("xb", buffering=2**20)


def kept_lines(records: Sequence[Record]) -> Iterator[bytes]:
    """The lines of one episode that are needed, in the order of their appearance."""
    turns, same_as = without_duplicates(r.event for r in records if isinstance(r.event, Turn))
    kept = {id(turn) for turn in turns} | _last_words([r.event for r in records], same_as)
    for record in records:
        event = record.event
        if id(event) in kept or not isinstance(
            event, Turn | RewardEvent | EditEvent | EpisodeStarted | EpisodeEnded
        ):
            renamed = _with_known(event, same_as)
            yield record.data + b"\n" if renamed is event else encode_line(renamed)


def _with_known(event: AnyEvent, same_as: dict[str, str]) -> AnyEvent:
    if isinstance(event, Turn):
        return with_known_turns(event, same_as)
    if isinstance(event, RewardEvent):
        return with_known_turn(event, same_as)
    if isinstance(event, EditEvent) and event.turn_id in same_as:
        return event.model_copy(update={"turn_id": same_as[event.turn_id]})
    return event


def _last_words(events: Sequence[AnyEvent], same_as: dict[str, str]) -> set[int]:
    """Identities of the rewards, edits and borders that count; a refused reward always does."""
    latest: dict[tuple[str | None, ...], AnyEvent] = {}
    refused: set[int] = set()
    for event in sorted(events, key=lambda event: event.time):
        match event:
            case RewardEvent():
                turn_id = same_as.get(event.turn_id or "", event.turn_id)
                latest["reward", event.agent, turn_id, event.source] = event
                if event.refused is not None:
                    refused.add(id(event))
            case EditEvent():
                latest["edit", same_as.get(event.turn_id, event.turn_id)] = event
            case EpisodeEnded():
                latest["end",] = event
            case _:
                pass
    starts = [event for event in events if isinstance(event, EpisodeStarted)]
    earliest = {id(min(starts, key=lambda event: event.time))} if starts else set[int]()
    return {id(event) for event in latest.values()} | refused | earliest


def _refuse_living(delete: Collection[str], living: dict[Path, str]) -> None:
    for path, who in living.items():
        try:
            present = {event.episode_id for event, _ in LogReader(path).events()}
        except LogError:
            continue  # nothing in it yet
        for episode_id in delete:
            if episode_id in present:
                raise LogError(
                    f"episode {episode_id!r} is in {path}, which {who} still writes;"
                    " end the app, then delete it"
                )


def _first(living: dict[Path, str]) -> str:
    path, who = next(iter(living.items()))
    return f"{path} is still written by {who}"
