"""When rewards say which action was better."""

from __future__ import annotations

import pytest

from marft_agents.errors import NothingToLearn, RewardError
from marft_agents.schema import Episode, EpisodeEnded, EpisodeStarted, RewardEvent, Sampling, Turn
from marft_agents.training.dataset import TrainingSet, read_training_set
from marft_agents.training.signal import flat_tasks, has_spread, require_signal


def episode(name: str, reward: float | None, task: str | None = None) -> Episode:
    turn = Turn(
        episode_id=name, turn_id=f"{name}.0", agent="planner", index=0,
        prompt_token_ids=[1, 9], token_ids=[5, 2], logprobs=[-0.1, -0.2],
        sampling=Sampling(temperature=1.0),
    )  # fmt: skip
    return Episode(
        episode_id=name,
        started=EpisodeStarted(episode_id=name, task=task),
        turns=[turn],
        rewards=[] if reward is None else [RewardEvent(episode_id=name, value=reward)],
        ended=EpisodeEnded(episode_id=name),
    )


def data(*rewards: tuple[str | None, float | None]) -> TrainingSet:
    return read_training_set(episode(f"e{n}", r, task) for n, (task, r) in enumerate(rewards))


@pytest.mark.parametrize(
    ("rewards", "spread"),
    [
        ([("a", 0.0), ("a", 1.0)], True),
        ([("a", 1.0), ("a", 1.0), ("b", 0.0), ("b", 0.0)], False),
        ([("a", 1.0), ("b", 0.0)], True),
        ([("a", 1.0)], False),
        ([(None, 1.0), (None, 0.0)], True),
        ([("a", 1.0), ("a", 1.0), ("b", 0.0)], False),
        ([("a", 0.1 + 0.2), ("a", 0.3)], False),
    ],
)
def test_spread(rewards: list[tuple[str | None, float]], spread: bool) -> None:
    assert has_spread(data(*rewards).episodes) is spread


def test_flat_tasks_are_counted_among_the_repeated_ones() -> None:
    made = data(("a", 1.0), ("a", 1.0), ("b", 0.0), ("b", 1.0), ("c", 0.0))
    assert flat_tasks(made.episodes) == (2, 1)


def test_imitating_above_a_given_reward_needs_no_spread() -> None:
    flat = data(("a", 1.0), ("a", 1.0))
    with pytest.raises(NothingToLearn, match="no signal: all 2 usable episodes"):
        require_signal(flat)
    require_signal(flat, spread=False)
    with pytest.raises(RewardError, match=r"2 no reward.*pass --reward"):
        require_signal(data(("a", None), ("b", None)), spread=False)
