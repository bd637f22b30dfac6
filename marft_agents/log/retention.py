"""Remove old segments of a log folder: by age, and by the size of all of them.

Invariant: off unless asked for. Only whole segments that ``LogWriter`` named go, oldest first, and
never one that a living process writes, nor one with an episode that a living process has begun and
not ended. Before a segment goes, what goes with it is appended to ``removed.ndjson`` beside it
(which readers of ``*.jsonl`` do not take for a log). An episode of which another segment still
holds a part is said to be incomplete, in the log.

Whether an episode was scored does not matter: one that waits for its reward longer than the limit
goes like any other (``removed.ndjson`` counts them), and a reward that comes later is logged and
belongs to no episode.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from marft_agents.errors import ConfigError
from marft_agents.log.encode import encode_line
from marft_agents.log.records import parse, raw_lines, read_line
from marft_agents.log.segment import LineFile, host_name, in_use
from marft_agents.schema import EpisodeEnded

REMOVED = "removed.ndjson"
_DAY_S = 86_400.0
_NAME = re.compile(r"events-\d{8}T\d{6}Z-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{8}\.jsonl")
_BEGIN = re.compile(
    rb'\{"schema_version":\d+,"time":"[^"\\]*","episode_id":"([^"\\]+)","type":"([a-z_]+)"'
)


@dataclass(frozen=True)
class Retention:
    """How much of a log folder to keep.

    Args:
        max_age_days: remove segments last written longer ago.
        max_bytes: remove the oldest segments while all together are larger.

    Raises:
        ConfigError: a limit is not positive.
    """

    max_age_days: float | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, limit in (("max_age_days", self.max_age_days), ("max_bytes", self.max_bytes)):
            if limit is not None and not limit > 0:
                raise ConfigError(
                    f"{name} is {limit}; give a positive number, or None for no limit"
                )


@dataclass
class Segment:
    """One segment of the folder, and (once read) its episodes."""

    path: Path
    size: int
    written: float
    """Unix time of the last write."""
    events: Counter[str] = field(default_factory=Counter[str])
    started: set[str] = field(default_factory=set[str])
    ended: dict[str, bytes] = field(default_factory=dict[str, bytes])
    scored: set[str] = field(default_factory=set[str])

    def read(self, only: set[str] | None = None) -> None:
        """Find the episodes of its events, or of ``only`` those."""
        for episode_id, kind, line in _events(self.path):
            if only is not None and episode_id not in only:
                continue
            self.events[episode_id] += 1
            if kind == "episode_started":
                self.started.add(episode_id)
            elif kind == "episode_ended":
                self.ended[episode_id] = line
            elif kind == "reward":
                self.scored.add(episode_id)


def clear(directory: Path, retention: Retention, current: LineFile) -> str | None:
    """Remove what ``retention`` says; returns what to tell the user, if anything went.

    ``current`` is the caller's open segment: it stays, and takes the records of torn episodes.

    Raises:
        OSError: the folder cannot be read or changed.
    """
    segments = _segments(directory)
    due = _due(segments, retention, current.path)
    if not due:
        return None
    for segment, _ in due:
        segment.read()
    going = {s.path for s, _ in due}
    wanted = {name for segment, _ in due for name in segment.events}
    staying = [s for s in segments if s.path not in going]
    for segment in staying:
        segment.read(only=wanted)
    everything = [s for s, _ in due] + staying
    due = [(s, why) for s, why in due if not _holds_a_running_episode(s, everything)]
    kept = [s for s in everything if all(s is not gone for gone, _ in due)]
    for segment, why in due:
        _remove(segment, why, kept, current)
    if not due:
        return None
    freed = sum(segment.size for segment, _ in due)
    return (
        f"removed {len(due)} old segments ({freed / 1e6:.1f} MB) from {directory}, as its retention"
        f" says; what they held is listed in {REMOVED} there"
    )


def _segments(directory: Path) -> list[Segment]:
    """The writers' segments in ``directory``, oldest first."""
    out: list[Segment] = []
    for path in directory.glob("events-*.jsonl"):
        if _NAME.fullmatch(path.name) is None:
            continue
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue  # another process clears up, too
        out.append(Segment(path, stat.st_size, stat.st_mtime))
    return sorted(out, key=lambda s: (s.written, s.path.name))


def _due(segments: list[Segment], retention: Retention, current: Path) -> list[tuple[Segment, str]]:
    """Segments beyond a limit that nobody writes, each with the reason."""
    out: list[tuple[Segment, str]] = []
    total = sum(s.size for s in segments)
    oldest = time.time() - (retention.max_age_days or 0) * _DAY_S
    for segment in segments:
        too_old = retention.max_age_days is not None and segment.written < oldest
        too_much = retention.max_bytes is not None and total > retention.max_bytes
        if not (too_old or too_much):
            continue
        if segment.path == current or segment.size == 0 or _may_be_written(segment):
            continue
        total -= segment.size
        why = f"older than {retention.max_age_days:g} days" if too_old else None
        out.append((segment, why or f"all segments held more than {retention.max_bytes} bytes"))
    return out


def _may_be_written(segment: Segment) -> bool:
    if in_use(segment.path):
        return True
    # On a shared folder, locks of another machine may not be seen here.
    return _host(segment.path) != host_name() and time.time() - segment.written < _DAY_S


def _holds_a_running_episode(segment: Segment, everything: list[Segment]) -> bool:
    if not _writer_lives(segment.path):
        return False
    begun = {name for s in everything for name in s.started} & segment.events.keys()
    return any(all(name not in s.ended for s in everything) for name in begun)


def _writer_lives(path: Path) -> bool:
    match = _NAME.fullmatch(path.name)
    if match is None or match["host"] != host_name():
        return False
    try:
        os.kill(int(match["pid"]), 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _remove(segment: Segment, why: str, kept: list[Segment], current: LineFile) -> None:
    torn = [name for name in segment.events if any(name in s.events for s in kept)]
    scored = segment.scored | {name for s in kept for name in s.scored}
    record = {
        "time": datetime.now(UTC).isoformat(),
        "file": segment.path.name,
        "bytes": segment.size,
        "last_written": datetime.fromtimestamp(segment.written, UTC).isoformat(),
        "reason": why,
        "episodes": list(segment.events),
        "unscored": sum(name not in scored for name in segment.events),
        "torn": torn,
    }
    with LineFile(segment.path.with_name(REMOVED)) as file:
        file.append(json.dumps(record).encode() + b"\n")
    for name in torn:
        _mark(name, segment.events[name], kept, current)
    segment.path.unlink(missing_ok=True)


def _mark(name: str, events: int, kept: list[Segment], current: LineFile) -> None:
    """Say that an episode has lost events; one without an end is incomplete as it is."""
    lines = [s.ended[name] for s in kept if name in s.ended]
    ended = parse(lines[-1]) if lines else None
    if not isinstance(ended, EpisodeEnded):
        return
    lost = {"dropped_events": ended.dropped_events + events, "time": datetime.now(UTC)}
    marked = ended.model_copy(update=lost)
    line = encode_line(marked)
    current.append(line)
    for segment in kept:
        if name in segment.ended:
            segment.ended[name] = line


def _events(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Episode, type and line of each event in a segment."""
    with path.open("rb") as file:
        for line in raw_lines(file):
            if line.data is None:
                continue
            match = _BEGIN.match(line.data)
            if match is not None:
                yield match[1].decode("utf-8", "replace"), match[2].decode(), line.data
                continue
            for found in read_line(line.data, line.offset)[0]:
                yield found.event.episode_id, found.event.type, encode_line(found.event)


def _host(path: Path) -> str | None:
    match = _NAME.fullmatch(path.name)
    return match["host"] if match else None
