"""Whether the rewards say anything about which action was better.

Invariant: a run that cannot learn stops before it starts. Rewards carry signal when episodes of
one task differ, or when tasks that were tried once differ among each other (the critic then
separates hard tasks from bad play). Repetitions of a task that all earned the same say nothing,
whatever other tasks earned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from marft_agents.errors import NothingToLearn, RewardError
from marft_agents.training.dataset import EpisodeView, TrainingSet

_FLAT = 1e-9


def _earned(episode: EpisodeView) -> tuple[float, ...]:
    """Total reward and each agent's share, comparable between episodes of one team."""
    agents = sorted(set(episode.agents_K))
    shares = [
        math.fsum(r for r, a in zip(episode.reward_K, episode.agents_K, strict=True) if a == agent)
        for agent in agents
    ]
    return (episode.total_reward, *shares)


def _differ(episodes: Sequence[EpisodeView]) -> bool:
    first = _earned(episodes[0])
    return any(
        len(other) != len(first)
        or any(abs(x - y) > _FLAT for x, y in zip(first, other, strict=True))
        for other in map(_earned, episodes[1:])
    )


def has_spread(episodes: Sequence[EpisodeView]) -> bool:
    """Whether the rewards of these episodes carry signal."""
    tasks: dict[str, list[EpisodeView]] = {}
    for episode in episodes:
        tasks.setdefault(episode.task or f"\0{episode.episode_id}", []).append(episode)
    repeated = [group for group in tasks.values() if len(group) > 1]
    once = [group[0] for group in tasks.values() if len(group) == 1]
    return any(map(_differ, repeated)) or (len(once) > 1 and _differ(once))


def flat_tasks(episodes: Sequence[EpisodeView]) -> tuple[int, int]:
    """Number of tasks that were repeated, and of those that always earned the same."""
    tasks: dict[str, list[EpisodeView]] = {}
    for episode in episodes:
        if episode.task is not None:
            tasks.setdefault(episode.task, []).append(episode)
    repeated = [group for group in tasks.values() if len(group) > 1]
    return len(repeated), sum(not _differ(group) for group in repeated)


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
        raise NothingToLearn(f"no trainable turn ({reasons}); nothing was changed")
    if spread and not has_spread(data.episodes):
        rewards = sorted({round(e.total_reward, 6) for e in data.episodes})
        raise NothingToLearn(
            f"no signal: all {len(data.episodes)} usable episodes of a task earned the same"
            f" ({', '.join(f'{r:g}' for r in rewards[:5])}), so no action was better than another;"
            " nothing was changed. Record more episodes, at a higher temperature if needed"
        )
