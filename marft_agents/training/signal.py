"""Whether the rewards say anything about which action was better.

Invariant: a run that cannot learn stops before it starts. Rewards carry signal when episodes of
one task differ, or when tasks that were tried once differ among each other (the critic then
separates hard tasks from bad play). Repetitions of a task that all earned the same say nothing,
whatever other tasks earned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from marft_agents.errors import NothingToLearn, RewardError
from marft_agents.training.dataset import EpisodeView, TrainingSet

_FLAT = 1e-9
_WITHOUT_TOKENS = ("no prompt token ids", "no sampled token ids", "no log-probabilities")


def _earned(episode: EpisodeView) -> tuple[float, ...]:
    """Total reward and each agent's share, comparable between episodes of one team."""
    agents = sorted(set(episode.agents_K))
    shares = [
        math.fsum(r for r, a in zip(episode.reward_K, episode.agents_K, strict=True) if a == agent)
        for agent in agents
    ]
    return (episode.total_reward, *shares)


def _differ(first: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return len(other) != len(first) or any(
        abs(x - y) > _FLAT for x, y in zip(first, other, strict=True)
    )


class _Task:
    """The episodes of one task: how many, and whether they earned differently."""

    def __init__(self, first: tuple[float, ...]) -> None:
        self.first, self.count, self.differs = first, 1, False

    def see(self, earned: tuple[float, ...]) -> None:
        self.count += 1
        self.differs = self.differs or _differ(self.first, earned)


def _tasks(episodes: Iterable[EpisodeView], *, named: bool) -> list[_Task]:
    """By task; an episode without one is a task of its own, or none at all (``named``)."""
    tasks: dict[str, _Task] = {}
    for episode in episodes:
        if named and episode.task is None:
            continue
        task, earned = episode.task or f"\0{episode.episode_id}", _earned(episode)
        if task in tasks:
            tasks[task].see(earned)
        else:
            tasks[task] = _Task(earned)
    return list(tasks.values())


def has_spread(episodes: Iterable[EpisodeView]) -> bool:
    """Whether the rewards of these episodes carry signal."""
    tasks = _tasks(episodes, named=False)
    once = [task.first for task in tasks if task.count == 1]
    return any(task.differs for task in tasks) or any(_differ(once[0], x) for x in once[1:])


def flat_tasks(episodes: Iterable[EpisodeView]) -> tuple[int, int]:
    """Number of tasks that were repeated, and of those that always earned the same."""
    repeated = [task for task in _tasks(episodes, named=True) if task.count > 1]
    return len(repeated), sum(not task.differs for task in repeated)


def _reasons(data: TrainingSet) -> str:
    counts = data.left_out_episodes.most_common(4)
    return ", ".join(f"{n} {reason}" for reason, n in counts) or "none was left out"


def require_signal(data: TrainingSet, *, spread: bool = True) -> None:
    """Stop when there is nothing to learn from.

    ``spread`` is false for supervised training above a given reward: that learns from episodes that
    all earned the same.

    Raises:
        RewardError: no episode has a usable reward.
        NothingToLearn: no trainable turn, or rewards that do not differ.
    """
    if not data.episodes:
        unscored = any("reward" in reason for reason in data.left_out_episodes)
        kind = RewardError if unscored else NothingToLearn
        raise kind(
            f"no usable episode among {data.episodes_read} ({_reasons(data)}); nothing was changed."
            + (" Score them in the app, or pass --reward package.module:function" * unscored)
        )
    if not data.rows:
        reasons = ", ".join(f"{n} of {a}: {why}" for (a, why), n in data.left_out_turns.items())
        text = any(why in _WITHOUT_TOKENS for _, why in data.left_out_turns)
        raise NothingToLearn(
            f"no trainable turn ({reasons}); nothing was changed."
            + (" Imitate what was said with --offline sft, which makes ids of text" * text)
        )
    if spread and not has_spread(data.episodes):
        rewards = sorted({round(e.total_reward, 6) for e in data.episodes})
        raise NothingToLearn(
            f"no signal: all {len(data.episodes)} usable episodes of a task earned the same"
            f" ({', '.join(f'{r:g}' for r in rewards[:5])}), so no action was better than another;"
            " nothing was changed. Record more episodes, at a higher temperature if needed"
        )
