"""Rounds of running the app on drawn tasks, until every group of episodes has spread.

Invariant: an episode is read, scored and counted once, in the round that recorded it. A group is
the episodes of one task in one round. With several episodes a task, a group whose scored episodes
all earned the same says nothing about which action was better: it is dropped and another task drawn
in its place (dynamic sampling, arXiv 2503.14476).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from marft_agents.credit import agent_group_advantages, agent_returns
from marft_agents.errors import RewardError, TrainingError
from marft_agents.log import LogReader
from marft_agents.rewards import RewardFunction, ScoreTally, score_episodes
from marft_agents.schema import Episode
from marft_agents.training.app import Run
from marft_agents.training.dataset import EpisodeView, TrainingSet, TurnRow, read_training_set
from marft_agents.training.online_report import OnlineReport
from marft_agents.training.rollouts import (
    Attempt,
    Collected,
    Outcome,
    Recorder,
    Say,
    collect,
    give_returned,
)
from marft_agents.training.tasks import Task, TaskMixer

_FLUSH_S = 60.0


class OnlineSettings(Protocol):
    """What is needed of ``MarftConfig``."""

    @property
    def seed(self) -> int: ...
    @property
    def episodes_per_iteration(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def at_once(self) -> int: ...
    @property
    def episode_timeout(self) -> float: ...
    @property
    def dynamic_sampling(self) -> bool: ...
    @property
    def max_resample(self) -> int: ...
    @property
    def replay_share(self) -> float: ...
    @property
    def max_staleness(self) -> int: ...


@dataclass
class Group:
    """The episodes of one task in one round; ``draws`` is how often the round drew it."""

    task: str
    draws: int
    data: TrainingSet = field(default_factory=TrainingSet)

    @property
    def flat(self) -> bool:
        """Whether all scored episodes earned the same: the team, and every agent on its own."""
        returns = [
            agent_returns(e.agents_K, e.team_reward_K, e.own_reward_K) for e in self.data.episodes
        ]
        return bool(agent_group_advantages(returns, [self.task] * len(returns)).silent)


@dataclass
class Rounds:
    """The rounds of one iteration."""

    run: Run
    mixer: TaskMixer
    config: OnlineSettings
    reward: RewardFunction | None
    say: Say
    runner: asyncio.Runner
    recorder: Recorder
    folder: Path
    """What the recorder writes into; nothing else does."""
    report: OnlineReport
    require_rewards: bool
    """Whether an iteration without any reward is a mistake in the set-up."""
    _read_before: set[str] = field(default_factory=set[str])

    @property
    def ended(self) -> set[str]:
        """Ids of every episode that was recorded, read or not."""
        of_runs = {name for outcome in self.report.outcomes for name in outcome.episode_ids}
        return of_runs | self._read_before

    def play(self) -> list[Group]:
        """Play rounds until every group has spread, or no round is left.

        The group of no task, "", holds the episodes that no run is known for.

        Raises:
            TrainingError: every run failed, none recorded an episode, or two used one id.
            RewardError: no episode has a reward, and one is required.
        """
        config, iteration = self.config, self.report.iteration
        resample = config.dynamic_sampling and config.group_size > 1
        rounds = 1 + config.max_resample * resample
        missing = config.episodes_per_iteration // config.group_size
        drawn: set[str] = set()
        kept: list[Group] = []
        for round in range(rounds):
            tasks = self.mixer.draw(iteration, round, missing, last=drawn)
            drawn |= {task.id for task in tasks}
            self.report.tasks += len(tasks)
            self.report.replaced += len(tasks) if round else 0
            groups = self._round(tasks, round)
            poor = [g for g in groups if resample and g.task and (g.flat or not g.data.episodes)]
            kept += [g for g in groups if g not in poor]
            self._count_poor(poor)
            missing = sum(group.draws for group in poor)
            if not missing:
                break
            others = ", drawing others" if round + 1 < rounds else ""
            self.say(f"  {missing} of {len(tasks)} tasks gave no spread of rewards{others}")
        return kept

    def _round(self, tasks: Sequence[Task], round: int) -> list[Group]:
        """Run the app on the tasks, and read and score what it recorded."""
        config, report = self.config, self.report
        members = [task for task in tasks for _ in range(config.group_size)]
        name = f"{report.iteration}.{round}"
        collected = collect(
            self.run,
            [Attempt(f"{name}.{number}", task) for number, task in enumerate(members)],
            self.recorder,
            at_once=config.at_once,
            timeout=config.episode_timeout,
            say=self.say,
            runner=self.runner,
        )
        report.unwritten |= not self.recorder.flush(_FLUSH_S)
        report.seconds += collected.seconds
        report.outcomes += collected.outcomes
        recorded = self.folder.is_dir() and any(self.folder.glob("*.jsonl"))
        if round == 0:
            collected.require_episodes(elsewhere=recorded)
        self._require_own_ids(collected)
        groups = {task.id: Group(task.id, draws=0) for task in tasks} | {"": Group("", draws=0)}
        for task in tasks:
            groups[task.id].draws += 1
        if recorded:
            self._read(collected, groups)
        report.refused += collected.refused
        report.no_number += collected.no_number
        if self.require_rewards and report.episodes and not report.returns:
            raise RewardError(_no_rewards(report))
        return list(groups.values())

    def _require_own_ids(self, collected: Collected) -> None:
        """Two runs that record under one episode id would become one episode."""
        counts = Counter(name for o in collected.outcomes for name in o.episode_ids)
        twice = next((i for i, n in counts.items() if n > 1 or i in self._read_before), None)
        if twice is not None:
            raise TrainingError(
                f"episode id {twice!r} was used by several runs; leave out id= of"
                " recorder.episode(...), or make it unique for each run"
            )

    def _read(self, collected: Collected, groups: Mapping[str, Group]) -> None:
        """Put the episodes that were not read before into their groups."""
        report, reader = self.report, LogReader(self.folder)
        new = (e for e in reader.episodes() if e.episode_id not in self._read_before)
        owner = {name: o for o in collected.outcomes for name in o.episode_ids}
        parts: dict[str, list[TrainingSet]] = {task: [] for task in groups}
        for episode in self._scored(give_returned(collected, new, self.recorder)):
            self._read_before.add(episode.episode_id)
            task = _task_of(episode, owner)
            report.outside += not task
            parts[task].append(marked(read_training_set([episode]), task))
        report.unreadable = reader.skipped_count
        for task, group in groups.items():
            group.data = merged(parts[task])
            report.episodes += group.data.episodes_read
            report.left_out += group.data.left_out_episodes
            report.returns += [e.total_reward for e in group.data.episodes]

    def _scored(self, episodes: Iterable[Episode]) -> Iterator[Episode]:
        """The episodes with the reward function's scores, which are logged too."""
        if self.reward is None:
            yield from episodes
            return
        tally = self.report.tally = self.report.tally or ScoreTally()
        for before in episodes:
            for after in score_episodes(self.reward, [before], tally):
                for r in after.rewards[len(before.rewards) :]:
                    self.recorder.reward(r.episode_id, r.value, agent=r.agent, source=r.source)
                yield after

    def _count_poor(self, groups: Sequence[Group]) -> None:
        for group in groups:
            used = len(group.data.episodes)
            self.report.dropped_flat += bool(used)
            self.report.empty += not used
            self.report.flat_episodes += used


def _no_rewards(report: OnlineReport) -> str:
    reasons = ", ".join(f"{n} {why}" for why, n in report.left_out.most_common(3))
    types = ", ".join(f"{kind} x{n}" for kind, n in report.no_number.most_common(3))
    failures = report.tally.examples[:1] if report.tally else []
    details = [f"run returned {types}"] * bool(types) + report.refused[:1] + failures
    return (
        f"none of {report.episodes} episodes has a usable reward"
        f" ({'; '.join([reasons, *details])}). Return a number from run, call episode.reward(...),"
        " or pass --reward package.module:function"
    )


def _task_of(episode: Episode, owner: dict[str, Outcome]) -> str:
    """Id of the task that an episode, or the one around it, was recorded for; "" for none."""
    outcome = owner.get(episode.episode_id)
    if outcome is None and episode.started is not None:
        outcome = owner.get(episode.started.parent_id or "")
        if outcome is not None:
            owner[episode.episode_id] = outcome
    return outcome.attempt.task.id if outcome else ""


def marked(data: TrainingSet, task: str) -> TrainingSet:
    """The same, with the group's name as the task of its episodes."""
    if task:
        data.episodes = [replace(episode, task=task) for episode in data.episodes]
    return data


def merged(parts: Iterable[TrainingSet]) -> TrainingSet:
    """One data set of several, in their order."""
    episodes: list[EpisodeView] = []
    rows: list[TurnRow] = []
    out = TrainingSet(episodes, rows)
    for part in parts:
        offset = len(episodes)
        episodes += part.episodes
        rows += [replace(row, episode=row.episode + offset) for row in part.rows]
        for agent, calls in part.agents.items():
            out.agents[agent] = out.agents.get(agent, 0) + calls
        out.episodes_read += part.episodes_read
        out.left_out_episodes += part.left_out_episodes
        out.left_out_turns += part.left_out_turns
        out.notes += part.notes
    return out
