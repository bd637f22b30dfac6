"""What is wrong with a log, line by line.

Invariant: reading never stops at damage; a finding names the line to look at. A clean log is one
that an unharmed recorder writes of episodes that are over. Memory holds one episode at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from marft_agents.log.reader import LogReader, Record
from marft_agents.schema import (
    EditEvent,
    EpisodeEnded,
    EpisodeStarted,
    RewardEvent,
    Turn,
    are_ids,
    are_logprobs,
)

LARGEST_LINE = 16 * 2**20
"""Bytes of a line above which it is worth a look; the reader still takes it."""


@dataclass(frozen=True)
class Finding:
    """Something that should not be in a log, and where."""

    file: Path
    line: int
    episode: str | None
    what: str

    def __str__(self) -> str:
        whose = f"episode {self.episode}: " if self.episode is not None else ""
        return f"{self.file}:{self.line}: {whose}{self.what}"


class Checked(NamedTuple):
    """How much was looked at, and how much of it is wrong."""

    episodes: int
    events: int
    findings: int


def check(
    *paths: str | Path, tell: Callable[[Finding], None], largest_line: int = LARGEST_LINE
) -> Checked:
    """Read a log once and tell what is wrong: damage as it is met, then episode by episode.

    Raises:
        LogError: when a file cannot be read, or holds no event at all.
    """
    episodes = events = findings = 0

    def found(finding: Finding) -> None:
        nonlocal findings
        findings += 1
        tell(finding)

    reader = LogReader(*paths, on_skip=lambda s: found(Finding(s.file, s.line, None, s.reason)))
    for episode_id, records in reader.records():
        episodes, events = episodes + 1, events + len(records)
        for record, what in _wrong(records, largest_line):
            found(Finding(record.file, record.line, episode_id, what))
    return Checked(episodes, events, findings)


def _wrong(records: list[Record], largest_line: int) -> Iterator[tuple[Record, str]]:
    for record in records:
        if len(record.data) > largest_line:
            size = f"{len(record.data) / 2**20:.1f} MiB"
            yield record, f"oversized: the line has {size}; cut what the app sends or returns"
    turns = [record for record in records if isinstance(record.event, Turn)]
    yield from _borders(records)
    yield from _turns(turns)
    yield from _order(turns)
    yield from _names(records, turns)


def _borders(records: list[Record]) -> Iterator[tuple[Record, str]]:
    starts = [r for r in records if isinstance(r.event, EpisodeStarted)]
    ends = [r for r in records if isinstance(r.event, EpisodeEnded)]
    if all(isinstance(r.event, RewardEvent | EditEvent) for r in records):
        yield records[0], "unknown episode: only rewards or edits name it, nothing was recorded"
        return
    if not starts:
        yield records[0], "no start was recorded"
    if not ends:
        yield records[-1], "no end: still running, or the app was killed"
    yield from ((r, "started a second time") for r in starts[1:])
    yield from ((r, "ended a second time; the latest counts") for r in ends[1:])
    for record in ends:
        assert isinstance(record.event, EpisodeEnded)
        if record.event.dropped_events:
            yield record, f"{record.event.dropped_events} events could not be written"


def _turns(turns: list[Record]) -> Iterator[tuple[Record, str]]:
    replies: set[tuple[str, int]] = set()
    names: set[str] = set()
    for record in turns:
        turn = record.event
        assert isinstance(turn, Turn)
        reply = None if turn.response_id is None else (turn.response_id, turn.choice_index)
        if reply in replies and not turn.cached:
            yield record, f"duplicate: choice {turn.choice_index} of response {turn.response_id}"
            continue
        if reply is not None and not turn.cached:
            replies.add(reply)
        if turn.turn_id in names:
            yield record, f"turn id {turn.turn_id!r} is that of another turn"
        names.add(turn.turn_id)
        yield from ((record, what) for what in _tokens(turn))


def _tokens(turn: Turn) -> Iterator[str]:
    ids, logprobs = turn.token_ids, turn.logprobs
    if ids is not None and logprobs is not None and len(ids) != len(logprobs):
        yield f"{len(ids)} token ids but {len(logprobs)} log-probabilities"
    elif ids is None and logprobs:
        yield f"{len(logprobs)} log-probabilities without token ids"
    if not are_logprobs(logprobs):
        yield "a log-probability is not finite, positive or a placeholder"
    if not (are_ids(turn.prompt_token_ids) and are_ids(ids)):
        yield "a token id is out of any vocabulary"


def _order(turns: list[Record]) -> Iterator[tuple[Record, str]]:
    """Turns of one file must be in the order of their completion."""
    last: dict[Path, int] = {}
    seen: set[str] = set()
    for record in turns:
        turn = record.event
        assert isinstance(turn, Turn)
        before = last.get(record.file)
        if turn.turn_id in seen:
            continue
        seen.add(turn.turn_id)
        if before is not None and turn.index <= before:
            yield record, f"index {turn.index} after index {before}: not in order of completion"
        last[record.file] = max(turn.index, before if before is not None else turn.index)


def _names(records: list[Record], turns: list[Record]) -> Iterator[tuple[Record, str]]:
    """Every turn and agent that something points at must be there, and early enough."""
    index = {r.event.turn_id: r.event.index for r in turns if isinstance(r.event, Turn)}
    agents = {r.event.agent for r in turns if isinstance(r.event, Turn)}
    for record in records:
        match record.event:
            case Turn() as turn:
                yield from ((record, what) for what in _turn_names(turn, index))
            case RewardEvent() as reward:
                if reward.refused is not None:
                    yield record, f"reward refused: {reward.refused}"
                if reward.turn_id is not None and reward.turn_id not in index:
                    yield record, f"reward for the unknown turn {reward.turn_id!r}"
                if reward.agent is not None and agents and reward.agent not in agents:
                    yield record, f"reward for the agent {reward.agent!r}, which made no call"
            case EditEvent() as edit if edit.turn_id not in index:
                yield record, f"edit of the unknown turn {edit.turn_id!r}"
            case _:
                pass


def _turn_names(turn: Turn, index: dict[str, int]) -> Iterator[str]:
    for name in turn.depends_on:
        if name not in index:
            yield f"depends on the unknown turn {name!r}"
        elif index[name] >= turn.index:
            yield f"depends on the turn {name!r}, which was not over before it"
    for field in ("selected_by", "parent_turn"):
        name = getattr(turn, field)
        if name is not None and name not in index:
            yield f"{field} names the unknown turn {name!r}"
