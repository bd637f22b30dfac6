"""What collecting one iteration's episodes gave, in numbers.

Invariant: every run, episode, task and turn that was not used is counted under its reason. Rewards
are those of all scored fresh episodes, also of those that were then left out, so that dropping
tasks does not move the mean; replayed episodes are not among them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from marft_agents.rewards import ScoreTally
from marft_agents.training.dataset import TrainingSet
from marft_agents.training.rollouts import Outcome, failures

ADAPTER_CHANGED = "adapter version changed during the call"
"""``Turn.untrainable_reason`` of a call that spans a swap."""


@dataclass
class OnlineReport:
    """Counts of one iteration; filled while it is collected."""

    iteration: int
    seconds: float = 0.0
    """Spent running the app."""
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    tasks: int = 0
    episodes: int = 0
    """Read from the iteration's log."""
    returns: list[float] = field(default_factory=list[float])
    left_out: Counter[str] = field(default_factory=Counter[str])
    """Why fresh episodes could not be used."""
    dropped_flat: int = 0
    """Tasks whose scored episodes all earned the same."""
    flat_episodes: int = 0
    empty: int = 0
    """Tasks without any usable episode that were replaced too."""
    replaced: int = 0
    """Tasks drawn in place of others."""
    stale_turns: int = 0
    mixed_turns: int = 0
    unversioned: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """(agent, what answered it) to turns of unknown age."""
    replayed: int = 0
    replayed_tasks: int = 0
    lost: int = 0
    """Episodes to replay whose log is gone."""
    outside: int = 0
    """Episodes that no run is known for."""
    refused: list[str] = field(default_factory=list[str])
    no_number: Counter[str] = field(default_factory=Counter[str])
    unreadable: int = 0
    """Lines of the log."""
    unwritten: bool = False
    """The recorder was still writing when the log was read."""
    max_staleness: int = 0
    tally: ScoreTally | None = None
    used_episodes: int = 0
    used_turns: int = 0

    def count_turns(self, fresh: TrainingSet, used: TrainingSet) -> None:
        """What was recorded in this iteration, and what is learned from in the end."""
        changed = [n for (_, why), n in fresh.left_out_turns.items() if why == ADAPTER_CHANGED]
        self.mixed_turns = sum(changed)
        self.used_episodes, self.used_turns = len(used.episodes), len(used.rows)

    @property
    def failed(self) -> int:
        return sum(outcome.failure is not None for outcome in self.outcomes)

    @property
    def without_episode(self) -> int:
        return sum(o.failure is None and not o.episode_ids for o in self.outcomes)

    @property
    def unscored(self) -> int:
        return sum(n for why, n in self.left_out.items() if why.startswith("no reward"))

    @property
    def mean(self) -> float | None:
        """Mean reward of the scored fresh episodes; ``None`` when there is none."""
        return math.fsum(self.returns) / len(self.returns) if self.returns else None

    @property
    def std(self) -> float | None:
        mean = self.mean
        if mean is None:
            return None
        return math.sqrt(math.fsum((x - mean) ** 2 for x in self.returns) / len(self.returns))

    def metrics(self) -> dict[str, float]:
        """``online/<name>`` to number, for tracking; no reward, no ``reward_…``."""
        counts = {
            "runs": len(self.outcomes),
            "failed": self.failed,
            "without_episode": self.without_episode,
            "tasks": self.tasks,
            "episodes": self.episodes,
            "scored": len(self.returns),
            "unscored": self.unscored,
            "refused": self.left_out["refused reward"],
            "dropped_flat": self.dropped_flat,
            "replaced": self.replaced,
            "stale_turns": self.stale_turns,
            "mixed_turns": self.mixed_turns,
            "unversioned_turns": self.unversioned.total(),
            "replayed": self.replayed,
            "used_episodes": self.used_episodes,
            "used_turns": self.used_turns,
            "seconds": self.seconds,
        }
        out = {f"online/{name}": float(value) for name, value in counts.items()}
        mean, std = self.mean, self.std
        if mean is not None and std is not None:
            out |= {"online/reward_mean": mean, "online/reward_std": std}
            out |= {"online/reward_min": min(self.returns), "online/reward_max": max(self.returns)}
        return out

    def lines(self) -> Iterator[str]:
        """The same for people: what was collected, then what was left out and why."""
        yield (
            f"collected {_many(self.episodes, 'episode')} of {_many(self.tasks, 'task')} in"
            f" {self.seconds:.0f} s: {self._reward_text()}; learning from"
            f" {_many(self.used_episodes, 'episode')}, {_many(self.used_turns, 'turn')}"
        )
        for line in failures(self.outcomes):
            yield f"  runs failed: {line}"
        if self.without_episode:
            yield f"  {_many(self.without_episode, 'run')} recorded no episode"
        if self.left_out:
            reasons = ", ".join(f"{n} {why}" for why, n in self.left_out.most_common())
            yield f"  episodes left out: {reasons}"
        yield from (f"  refused: {what}" for what in self.refused[:3])
        yield from self._sampling_lines()
        yield from self._turn_lines()
        yield from self._warnings()

    def _reward_text(self) -> str:
        mean, std = self.mean, self.std
        if mean is None or std is None:
            return "none has a reward"
        return (
            f"{len(self.returns)} scored, mean {mean:.3f} (std {std:.3f}, from"
            f" {min(self.returns):g} to {max(self.returns):g})"
        )

    def _sampling_lines(self) -> Iterator[str]:
        if self.dropped_flat or self.empty:
            yield (
                f"  {_many(self.dropped_flat, 'task')} earned the same every time"
                f" ({_many(self.flat_episodes, 'episode')} dropped), {self.empty} gave nothing;"
                f" {self.replaced} drawn in their place"
            )
        if self.replayed or self.lost:
            lost = f"; {self.lost} more are gone from the logs" if self.lost else ""
            yield (
                f"  replayed {_many(self.replayed, 'episode')} of"
                f" {_many(self.replayed_tasks, 'task')} from earlier iterations{lost}"
            )
        if self.tally is not None:
            t = self.tally
            yield (
                f"  reward function: {t.scored} scored, {t.already_scored} had a reward,"
                f" {t.unscored} not scored, {t.failed} failed"
            )
            yield from (f"    {example}" for example in t.examples)

    def _turn_lines(self) -> Iterator[str]:
        if self.stale_turns:
            yield (
                f"  {_many(self.stale_turns, 'turn')} older than {self.max_staleness} versions"
                " left out; the rewards stay"
            )
        if self.mixed_turns:
            yield (
                f"  {_many(self.mixed_turns, 'turn')} whose adapter changed while it answered left"
                " out; the rewards stay"
            )
        for (agent, answered), n in sorted(self.unversioned.items()):
            yield (
                f"  {_many(n, 'turn')} of {agent} answered by {answered}, not by a version of an"
                " adapter: its age is not known"
            )

    def _warnings(self) -> Iterator[str]:
        if self.outside:
            yield (
                f"WARNING: {_many(self.outside, 'episode')} began outside the run they belong to,"
                " so what run returned did not score them; start threads of your own with"
                " contextvars.copy_context().run"
            )
        if self.unreadable:
            yield f"WARNING: {_many(self.unreadable, 'line')} of the log cannot be read"
        if self.unwritten:
            yield "WARNING: the recorder was still writing when the log was read; is the disk slow?"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
