"""What a set of logs holds: counts, and why what is left out is left out.

Invariant: one pass, one episode in memory at a time. A turn counts as trainable when both it and
its episode are; otherwise it is counted under exactly one reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from marft_agents.cli._text import number, table
from marft_agents.log import LogReader, Skipped
from marft_agents.schema import Episode, RewardEvent, Turn

_SHOWN = 10
_FEW = 3


@dataclass
class Range:
    """Mean and extremes of the values added."""

    count: int = 0
    total: float = 0.0
    low: float | None = None
    high: float | None = None

    def add(self, value: float | None) -> None:
        if value is not None:
            self.count += 1
            self.total += value
            self.low = value if self.low is None else min(self.low, value)
            self.high = value if self.high is None else max(self.high, value)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def as_json(self) -> dict[str, Any]:
        return {"scored": self.count, "mean": self.mean, "min": self.low, "max": self.high}


@dataclass
class AgentCounts:
    """Calls and tokens of one agent."""

    turns: int = 0
    trainable: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    trainable_tokens: int = 0

    def add(self, turn: Turn, reason: str | None) -> None:
        self.turns += 1
        self.prompt_tokens += len(turn.prompt_token_ids or ())
        self.sampled_tokens += len(turn.token_ids or ())
        if reason is None:
            self.trainable += 1
            self.trainable_tokens += len(turn.token_ids or ())
        else:
            self.left_out[reason] += 1

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"left_out": dict(self.left_out.most_common())}


@dataclass
class Summary:
    """Everything that ``inspect`` says about logs as a whole."""

    logs: list[str]
    files: int
    episodes: int = 0
    scored: int = 0
    trainable: int = 0
    incomplete: int = 0
    unknown: list[str] = field(default_factory=list[str])
    """Episodes that only rewards or edits name: a wrong id, or a log that is not there."""
    ended: Counter[str] = field(default_factory=Counter[str])
    left_out: Counter[str] = field(default_factory=Counter[str])
    reward_records: Counter[str] = field(default_factory=Counter[str])
    agents: dict[str, AgentCounts] = field(default_factory=dict[str, AgentCounts])
    all_teams: Range = field(default_factory=Range)
    teams: dict[tuple[str, ...], Range] = field(default_factory=dict[tuple[str, ...], Range])
    agent_rewards: dict[str, Range] = field(default_factory=dict[str, Range])
    adapters: Counter[str] = field(default_factory=Counter[str])
    skipped_count: int = 0
    skipped: list[Skipped] = field(default_factory=list[Skipped])
    duplicates: int = 0

    def add(self, episode: Episode) -> None:
        _add(self, episode)

    def finish(self, reader: LogReader) -> None:
        """Take over what only the reader knows, once it has read everything."""
        self.skipped_count, self.skipped = reader.skipped_count, reader.skipped
        self.duplicates = reader.duplicates

    def as_json(self) -> dict[str, Any]:
        """The same, as one document."""
        return {
            "logs": self.logs,
            "files": self.files,
            "episodes": {
                "total": self.episodes,
                "scored": self.scored,
                "trainable": self.trainable,
                "left_out": dict(self.left_out.most_common()),
                "ended": dict(self.ended.most_common()),
                "incomplete": self.incomplete,
                "unknown": self.unknown,
            },
            "agents": {name: counts.as_json() for name, counts in sorted(self.agents.items())},
            "rewards": {
                "records": {kind: self.reward_records[kind] for kind in _REWARD_KINDS},
                "team": self.all_teams.as_json(),
                "by_team": [
                    {"agents": list(team), **seen.as_json()}
                    for team, seen in sorted(self.teams.items())
                ],
                "by_agent": {n: seen.as_json() for n, seen in sorted(self.agent_rewards.items())},
            },
            "adapters": dict(self.adapters.most_common()),
            "skipped": {
                "count": self.skipped_count,
                "first": [vars(s) | {"file": str(s.file)} for s in self.skipped],
            },
            "duplicates": self.duplicates,
        }


NO_TURN = "none of its turns can be trained on"
_REWARD_KINDS = ("numbers", "empty", "refused")


def summarise(reader: LogReader) -> Summary:
    """Read everything once."""
    summary = Summary(logs=[str(path) for path in reader.paths], files=len(reader.files))
    for episode in reader.episodes():
        summary.add(episode)
    summary.finish(reader)
    return summary


def left_out_reason(episode: Episode) -> str | None:
    """Why an episode is left out, the same for all that are left out for the same reason."""
    if episode.untrainable_reason is not None:
        # What is in brackets differs from episode to episode.
        return episode.untrainable_reason.split(" (", 1)[0]
    if all(turn.untrainable_reason is not None for turn in episode.turns):
        return NO_TURN
    return None


def turn_reason(turn: Turn, episode_reason: str | None) -> str | None:
    """Why a turn is left out: its own reason, or that its episode is."""
    if turn.untrainable_reason is not None or episode_reason in (None, NO_TURN):
        return turn.untrainable_reason
    return f"its episode is left out: {episode_reason}"


def _add(summary: Summary, episode: Episode) -> None:
    reason = left_out_reason(episode)
    summary.episodes += 1
    summary.scored += episode.scored
    summary.trainable += reason is None
    summary.ended[episode.ended.reason if episode.ended else "not ended"] += 1
    summary.incomplete += bool(episode.ended and episode.ended.dropped_events)
    if not (episode.started or episode.turns or episode.tools or episode.humans or episode.ended):
        summary.unknown.append(episode.episode_id)
    if reason is not None:
        summary.left_out[reason] += 1
    summary.reward_records.update(_reward_kind(reward) for reward in episode.rewards)
    for turn in episode.turns:
        counts = summary.agents.setdefault(turn.agent, AgentCounts())
        counts.add(turn, turn_reason(turn, reason))
        summary.adapters[adapter_of(turn)] += 1
    summary.all_teams.add(episode.team_reward)
    team = tuple(sorted({turn.agent for turn in episode.turns}))
    summary.teams.setdefault(team, Range()).add(episode.team_reward)
    for agent, value in episode.agent_rewards.items():
        summary.agent_rewards.setdefault(agent, Range()).add(value)


def _reward_kind(reward: RewardEvent) -> str:
    if reward.refused is not None:
        return "refused"
    return "empty" if reward.value is None else "numbers"


def adapter_of(turn: Turn) -> str:
    """The version that answered, or both when it changed meanwhile."""
    start, end = turn.adapter_start or "not recorded", turn.adapter_end or "not recorded"
    return start if start == end else f"{start} to {end}"


def summary_lines(summary: Summary) -> Iterator[str]:
    """The summary, for people."""
    yield f"{', '.join(summary.logs)}: {_count(summary.files, 'file')}"
    yield ""
    yield f"episodes   {summary.episodes}"
    yield f"scored     {summary.scored}"
    yield f"trainable  {summary.trainable}"
    for reason, count in summary.left_out.most_common():
        yield f"  left out: {count}  {reason}"
    yield "ended      " + ", ".join(f"{n} {reason}" for reason, n in summary.ended.most_common())
    if summary.incomplete:
        yield f"  incomplete: {summary.incomplete}  the recorder could not write every event"
    if summary.unknown:
        first = ", ".join(map(repr, summary.unknown[:_FEW]))
        more = f" and {len(summary.unknown) - _FEW} more" * (len(summary.unknown) > _FEW)
        yield f"  unknown: {len(summary.unknown)}  named by rewards or edits alone: {first}{more}"
    yield ""
    yield from _agent_lines(summary)
    yield ""
    yield from reward_lines(summary)
    yield ""
    yield "adapter versions that answered"
    yield from (f"  {name}  {_count(n, 'turn')}" for name, n in summary.adapters.most_common())
    yield ""
    yield from damage_lines(summary)


def damage_lines(summary: Summary) -> Iterator[str]:
    """What was skipped while reading."""
    yield f"skipped lines  {summary.skipped_count}"
    yield from (f"  {place}" for place in summary.skipped[:_SHOWN])
    if summary.skipped_count > _SHOWN:
        yield f"  and {summary.skipped_count - _SHOWN} more"
    yield f"duplicate turns dropped  {summary.duplicates}"


def counted(what: str, counts: Mapping[str, AgentCounts]) -> list[str]:
    """A table of calls and tokens by ``what``."""
    header = (what, "turns", "trainable", "prompt tokens", "sampled tokens", "trainable tokens")
    rows = [
        (name, *map(str, (a.turns, a.trainable, a.prompt_tokens, a.sampled_tokens,
                          a.trainable_tokens)))
        for name, a in sorted(counts.items())
    ]  # fmt: skip
    return table(header, rows, right=range(1, 6))


def _agent_lines(summary: Summary) -> Iterator[str]:
    if not summary.agents:
        yield "no model call was recorded"
        return
    agents = sorted(summary.agents.items())
    yield from counted("agent", summary.agents)
    for name, counts in agents:
        for reason, count in counts.left_out.most_common():
            yield f"  {name}, left out: {count}  {reason}"
    silent = [name for name, counts in agents if not counts.trainable]
    if silent:
        yield f"agents with no trainable turn: {', '.join(silent)}"


def reward_lines(summary: Summary) -> Iterator[str]:
    """Rewards of teams and agents, and how many records they came from."""
    rows = [("team reward, all episodes", summary.all_teams)]
    if len(summary.teams) > 1:
        teams = sorted(summary.teams.items())
        rows += [(f"  of {', '.join(t) or 'nobody'}", seen) for t, seen in teams[:_SHOWN]]
    rows += [(f"reward of {name}", seen) for name, seen in sorted(summary.agent_rewards.items())]
    cells = [
        (name, str(r.count), number(r.mean), number(r.low), number(r.high)) for name, r in rows
    ]
    yield from table(("reward", "scored", "mean", "min", "max"), cells, right=range(1, 5))
    if len(summary.teams) > _SHOWN:
        yield f"  and {len(summary.teams) - _SHOWN} more teams; --json has all"
    kinds = (f"{summary.reward_records[kind]} {kind}" for kind in _REWARD_KINDS)
    yield f"reward records: {', '.join(kinds)}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
