"""``marft-agents logs stats``: how much of what there is.

Invariant: one pass, one episode in memory at a time. Events are counted as they were written, turns
once in every table; what can be trained on is told by the same rules as in ``inspect``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from marft_agents.cli._inspect_summary import (
    AgentCounts,
    Range,
    Summary,
    adapter_of,
    counted,
    damage_lines,
    left_out_reason,
    reward_lines,
    turn_reason,
)
from marft_agents.cli._text import number, say
from marft_agents.log import LogReader
from marft_agents.log.reader import Record
from marft_agents.schema import Episode, Turn

_BY = ("agent", "kind", "adapter", "runtime")


@dataclass
class Statistics:
    """Counts over whole logs; ``summary`` is what ``inspect`` counts of them."""

    summary: Summary
    bytes: int
    events: Counter[str] = field(default_factory=Counter[str])
    by: dict[str, dict[str, AgentCounts]] = field(
        default_factory=lambda: {name: dict[str, AgentCounts]() for name in _BY}
    )
    left_out: Counter[str] = field(default_factory=Counter[str])
    finished: Counter[str] = field(default_factory=Counter[str])
    failed: int = 0
    cached: int = 0
    turns: Range = field(default_factory=Range)
    """Turns of an episode."""
    latency: Range = field(default_factory=Range)
    first: datetime | None = None
    last: datetime | None = None

    def add(self, episode: Episode, records: Iterable[Record]) -> None:
        self.summary.add(episode)
        self.turns.add(len(episode.turns))
        reason = left_out_reason(episode)
        runtime = (episode.started.runtime if episode.started else None) or "not recorded"
        for event in (record.event for record in records):
            self.events[event.type] += 1
            self.first = event.time if self.first is None else min(self.first, event.time)
            self.last = event.time if self.last is None else max(self.last, event.time)
        for turn in episode.turns:
            self._add_turn(turn, turn_reason(turn, reason), runtime)

    def _add_turn(self, turn: Turn, reason: str | None, runtime: str) -> None:
        for by, name in zip(_BY, (turn.agent, turn.kind, adapter_of(turn), runtime), strict=True):
            self.by[by].setdefault(name, AgentCounts()).add(turn, reason)
        if reason is not None:
            self.left_out[reason] += 1
        self.finished[turn.finish_reason or "not recorded"] += 1
        self.failed += turn.error is not None
        self.cached += turn.cached
        self.latency.add(turn.latency_s)

    def as_json(self) -> dict[str, Any]:
        seen = self.summary.as_json()
        return {
            "logs": seen["logs"],
            "files": seen["files"],
            "bytes": self.bytes,
            "events": dict(self.events.most_common()),
            "time": {
                "first": self.first.isoformat() if self.first else None,
                "last": self.last.isoformat() if self.last else None,
            },
            "episodes": seen["episodes"] | {"turns": self._range(self.turns)},
            "turns": {
                **{
                    f"by_{by}": {name: counts.as_json() for name, counts in sorted(group.items())}
                    for by, group in self.by.items()
                },
                "left_out": dict(self.left_out.most_common()),
                "finish_reasons": dict(self.finished.most_common()),
                "failed": self.failed,
                "cached": self.cached,
                "latency_s": self._range(self.latency),
            },
            "rewards": seen["rewards"],
            "skipped": seen["skipped"],
            "duplicates": seen["duplicates"],
        }

    @staticmethod
    def _range(values: Range) -> dict[str, float | None]:
        return {"mean": values.mean, "min": values.low, "max": values.high}


def gather(*logs: Path) -> Statistics:
    """Read everything once."""
    reader = LogReader(*logs)
    size = sum(path.stat().st_size for path in reader.files)
    summary = Summary(logs=[str(path) for path in reader.paths], files=len(reader.files))
    statistics = Statistics(summary, size)
    for episode_id, records in reader.records():
        statistics.add(reader.fold(episode_id, records), records)
    summary.finish(reader)
    return statistics


def lines(seen: Statistics) -> Iterator[str]:
    """The same, for people."""
    summary = seen.summary
    events = ", ".join(f"{n} {name}" for name, n in seen.events.most_common())
    yield f"{', '.join(summary.logs)}"
    yield f"files     {summary.files}, {seen.bytes / 1e6:.1f} MB"
    yield f"events    {seen.events.total()}: {events}"
    yield f"time      {_time(seen.first)} to {_time(seen.last)}"
    yield (
        f"episodes  {summary.episodes}, {summary.scored} scored, {summary.trainable} trainable;"
        f" {_spread(seen.turns)} turns each"
    )
    yield from (f"  left out: {n}  {why}" for why, n in summary.left_out.most_common())
    yield "ended     " + ", ".join(f"{n} {why}" for why, n in summary.ended.most_common())
    yield ""
    for by, group in seen.by.items():
        if group:
            yield from (*counted(by, group), "")
    yield from (f"turns left out: {n}  {why}" for why, n in seen.left_out.most_common())
    finished = ", ".join(f"{n} {why}" for why, n in seen.finished.most_common())
    yield f"calls     {seen.failed} failed, {seen.cached} cached; finished: {finished or 'none'}"
    yield f"latency   {_spread(seen.latency)} s"
    yield ""
    yield from reward_lines(summary)
    yield ""
    yield from damage_lines(summary)


def _time(time: datetime | None) -> str:
    return time.isoformat(sep=" ", timespec="seconds") if time else "-"


def _spread(values: Range) -> str:
    return f"{number(values.mean)} ({number(values.low)} to {number(values.high)})"


@click.command("stats")
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
def command(logs: tuple[Path, ...], as_json: bool) -> None:
    """Count what LOGS (files, or folders of *.jsonl) hold.

    Bytes, events, time; turns and tokens by agent, kind of call, adapter version and runtime; what
    is trainable and why the rest is not; rewards and ends. `inspect` answers whether it can be
    learned from, and shows single episodes.
    """
    seen = gather(*logs)
    say(json.dumps(seen.as_json(), indent=2) if as_json else "\n".join(lines(seen)))
