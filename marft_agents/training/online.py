"""The collecting half of online training: run the app, read what it recorded, keep what counts.

    tasks ─▶ runs ─▶ log ─▶ rewards ─▶ tasks without spread replaced ─▶ replayed added ─▶ stale out

Invariant: an iteration is learned from what its own folder holds, plus what is replayed on purpose.
An unscored episode never counts as 0. A turn that is too old is dropped as a turn; the reward of
its episode stays. Everything dropped is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from marft_agents.errors import ConfigError, NothingToLearn, TrainingError
from marft_agents.rewards import RewardFunction
from marft_agents.schema import parse_served_name
from marft_agents.training.app import Run
from marft_agents.training.dataset import TrainingSet, TurnRow, read_training_set
from marft_agents.training.online_report import OnlineReport
from marft_agents.training.past import PastEpisodes, PastGroup, oldest_versions
from marft_agents.training.rollouts import Recorder, Say
from marft_agents.training.rounds import Group, OnlineSettings, Rounds, marked, merged
from marft_agents.training.signal import has_spread
from marft_agents.training.tasks import Task, TaskMixer

__all__ = ["OnlineReport", "OnlineSettings", "OnlineSource"]

MOST_SILENT = 3
"""Iterations in a row without signal that end a run."""


class OnlineSource:
    """Episodes for one iteration after another.

    Args:
        run: the user's ``run(task, recorder)``.
        tasks: what to draw from.
        config: settings; a ``MarftConfig``.
        logs: the logs' folder; iteration 3 is recorded in ``online/<run_id>/iteration-0003`` of it.
        make_recorder: a recorder into a folder, for each iteration a new one.
        reward: scores episodes that neither the app nor ``run`` scored.
        say: receives lines of progress.

    Raises:
        ConfigError: ``group_size`` is larger than ``episodes_per_iteration``.
    """

    def __init__(
        self,
        run: Run,
        tasks: Sequence[Task],
        config: OnlineSettings,
        *,
        logs: str | Path,
        run_id: str,
        make_recorder: Callable[[Path], Recorder],
        reward: RewardFunction | None = None,
        say: Say = print,
    ) -> None:
        if config.group_size > config.episodes_per_iteration:
            raise ConfigError(
                f"group_size is {config.group_size} and episodes_per_iteration is"
                f" {config.episodes_per_iteration}; it must be at least one group"
            )
        self.logs, self.run_id = Path(logs), run_id
        self.report = OnlineReport(0)
        """Of the latest iteration."""
        self.signal = False
        """Whether the latest iteration has something to learn from; if not, skip the update."""
        self.ended: set[str] = set()
        """Episodes that have ended since somebody took them out: a server keeps versions for them
        until it is told."""
        self._run, self._config, self._reward, self._say = run, config, reward, say
        self._make_recorder = make_recorder
        self._mixer = TaskMixer(tasks, config.seed)
        self._past = PastEpisodes(self.logs, seed=config.seed, max_staleness=config.max_staleness)
        self._silent = 0
        self._scored_before = False
        self._runner = asyncio.Runner()

    def collect(self, iteration: int, current: Mapping[str, int]) -> TrainingSet:
        """The episodes of one iteration; ``current`` is the served version per adapter.

        Raises:
            TrainingError: every run failed, or none recorded an episode.
            RewardError: no episode was ever scored.
            NothingToLearn: this was the third iteration in a row without signal.
        """
        self.signal = False
        self.report = OnlineReport(iteration, max_staleness=self._config.max_staleness)
        folder = self._folder(iteration)
        groups = self._play(folder)
        self._scored_before = self._scored_before or bool(self.report.returns)
        fresh = merged(group.data for group in groups)
        data = merged([fresh, self._replayed(iteration, len(fresh.episodes), current)])
        self._drop_stale(data, current)
        self.report.count_turns(fresh, data)
        if self._config.replay_share:
            place = folder.relative_to(self.logs).as_posix()
            for group in groups:
                if group.task:
                    self._past.remember(_past_group(group, iteration, place))
        self._judge(data)
        return data

    def _play(self, folder: Path) -> list[Group]:
        recorder = self._make_recorder(folder)
        rounds = Rounds(
            run=self._run,
            mixer=self._mixer,
            config=self._config,
            reward=self._reward,
            say=self._say,
            runner=self._runner,
            recorder=recorder,
            folder=folder,
            report=self.report,
            require_rewards=not self._scored_before,
        )
        try:
            return rounds.play()
        finally:
            self.ended |= rounds.ended
            recorder.close()

    def lines(self) -> list[str]:
        """The latest iteration in words."""
        return list(self.report.lines())

    def metrics(self) -> dict[str, float]:
        """The latest iteration in numbers, ``online/<name>``."""
        return self.report.metrics()

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides the logs, as JSON."""
        return {
            "tasks": self._mixer.fingerprint,
            "past": self._past.state(),
            "silent": self._silent,
            "scored_before": self._scored_before,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            TrainingError: it is no state of an ``OnlineSource``; nothing was loaded.
        """
        silent, scored = state.get("silent"), state.get("scored_before")
        if not isinstance(silent, int) or not isinstance(scored, bool) or "past" not in state:
            raise TrainingError(f"no saved state of an online run: it holds {sorted(state)}")
        self._past.load_state(state["past"])
        self._silent, self._scored_before = silent, scored
        if state.get("tasks") != self._mixer.fingerprint:
            self._say("WARNING: the tasks or the seed changed since the checkpoint was written")

    def close(self) -> None:
        """Stop what the app left running on the event loop."""
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _folder(self, iteration: int) -> Path:
        """A folder that nobody recorded into, also where an earlier try was interrupted."""
        first = self.logs / "online" / self.run_id / f"iteration-{iteration:04d}"
        folder, number = first, 1
        while folder.exists() and any(folder.iterdir()):
            number += 1
            folder = first.with_name(f"{first.name}-{number}")
        return folder

    def _replayed(self, iteration: int, fresh: int, current: Mapping[str, int]) -> TrainingSet:
        """Earlier episodes, ``replay_share`` times as many as fresh ones.

        They are groups of their own: an older policy's rewards are no baseline for this one's.
        """
        count = round(self._config.replay_share * fresh)
        groups = self._past.pick(iteration, count, current) if count else []
        parts: list[TrainingSet] = []
        for group, episode in self._past.read(groups):
            part = read_training_set([episode])
            part.rows = [row for row in part.rows if parse_served_name(row.adapter or "")]
            parts.append(marked(part, f"{group.task} of iteration {group.iteration}"))
        data = merged(parts)
        self.report.replayed, self.report.replayed_tasks = len(data.episodes), len(groups)
        self.report.lost = sum(len(g.episodes) for g in groups) - len(data.episodes)
        return data

    def _drop_stale(self, data: TrainingSet, current: Mapping[str, int]) -> None:
        kept: list[TurnRow] = []
        for row in data.rows:
            named = parse_served_name(row.adapter or "")
            if named is None:
                self.report.unversioned[row.agent, row.adapter or "an unnamed model"] += 1
            elif current.get(named[0], 0) - named[1] > self._config.max_staleness:
                data.left_out_turns[row.agent, "older than max_staleness versions"] += 1
                continue
            kept.append(row)
        self.report.stale_turns = len(data.rows) - len(kept)
        data.rows = kept

    def _judge(self, data: TrainingSet) -> None:
        """Set ``signal``; end the run after too many iterations without."""
        self.signal = bool(data.rows) and has_spread(data.episodes)
        self._silent = 0 if self.signal else self._silent + 1
        if self._silent >= MOST_SILENT:
            raise NothingToLearn(
                f"{self._silent} iterations in a row had nothing to learn from; the latest:"
                f" {self.lines()[0]}. Use tasks that succeed sometimes, a higher temperature, or"
                " more episodes of each task (group_size)"
            )


def _past_group(group: Group, iteration: int, folder: str) -> PastGroup:
    episodes = [episode.episode_id for episode in group.data.episodes]
    return PastGroup(iteration, group.task, folder, episodes, oldest_versions(group.data.rows))
