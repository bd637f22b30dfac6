"""Who is imitated, labelled or preferred: counted by hand."""

from __future__ import annotations

import math

import pytest

from marft_agents.errors import NothingToLearn
from marft_agents.schema import RewardEvent
from marft_agents.training.config import MarftConfig
from marft_agents.training.dataset import read_training_set
from marft_agents.training.preferences import (
    METHODS,
    PAIRS_PER_PROMPT,
    MethodRow,
    Preference,
    imitated,
    labelled,
    method_rows,
    paired,
    select,
)
from tests.training.test_dataset import episode, turn


def row(
    reply: int, advantage: float = 0.0, *, prompt: int = 1, episode: int = 0, reward: float = 0.0
) -> MethodRow:
    return MethodRow([prompt, 7], [reply, 2], episode, reward, advantage)


def shown(pairs: list[Preference]) -> list[tuple[int, int]]:
    return [(pair.chosen.token_ids[0], pair.rejected.token_ids[0]) for pair in pairs]


def config(threshold: float | None = None) -> MarftConfig:
    return MarftConfig(use_cpu=True, sft_threshold=threshold)


def test_sft_takes_episodes_above_the_mean_of_all_episodes() -> None:
    rows = [row(n, episode=n, reward=r) for n, r in enumerate([0.0, 0.0, 0.5, 1.0, 1.0])]
    many = [*rows, *[row(9, episode=0, reward=0.0)] * 20]
    chosen = select("sft", {"router": many[:3], "writer": many[3:]}, config())
    assert chosen.idle == {
        "router": "none of its 3 turns is of an episode with more than the mean reward of 0.5,"
        " the best has 0.5"
    }
    assert [r.episode for r in chosen.imitated["writer"]] == [3, 4]
    assert chosen.lines == [
        "sft: writer imitates 2 of 22 turns, from 2 episodes with more than the mean reward of 0.5"
    ]


def test_an_sft_threshold_is_the_lowest_reward_taken() -> None:
    rows = [row(n, episode=n, reward=r) for n, r in enumerate([0.2, 0.5, 0.7])]
    assert [r.episode for r in imitated(rows, 0.5, [])] == [1, 2]


def test_rewards_that_are_all_the_same_leave_nobody_above_the_mean() -> None:
    """A mean of equal numbers may be a hair below them."""
    rows = [row(n, episode=n, reward=0.7) for n in range(3)]
    assert math.fsum([0.7] * 3) / 3 < 0.7
    with pytest.raises(NothingToLearn, match=r"none of its 3 .* best has 0\.7.*sft_threshold"):
        select("sft", {"router": rows}, config())
    chosen = select("sft", {"router": rows}, config(0.7))
    assert len(chosen.imitated["router"]) == 3


@pytest.mark.parametrize("method", METHODS)
def test_no_turns_at_all_are_nothing_to_learn_from(method: str) -> None:
    with pytest.raises(NothingToLearn, match=f"{method} has nothing to learn from .router: "):
        select(method, {"router": []}, config())
    with pytest.raises(NothingToLearn):
        select(method, {}, config())


def test_kto_labels_by_the_sign_and_leaves_zero_out() -> None:
    known = labelled([row(1, 0.3), row(2, -0.2), row(3, 0.0), row(4, 1e-12)])
    assert [(one.row.token_ids[0], one.desirable) for one in known] == [(1, True), (2, False)]


@pytest.mark.parametrize("sign", [1, -1])
def test_kto_refuses_one_label_alone(sign: int) -> None:
    rows = [row(n, sign * 0.5) for n in range(3)] + [row(9, 0.0)]
    counts = {1: "3 desirable and 0 undesirable", -1: "0 desirable and 3 undesirable"}[sign]
    said = f"{counts} turns, 1 without advantage left out.*with good and bad ends"
    with pytest.raises(NothingToLearn, match=said):
        select("kto", {"router": rows}, config())


def test_dpo_pairs_different_replies_to_one_prompt() -> None:
    rows = [
        row(1, 0.5), row(2, -0.5), row(3, 0.1),
        row(1, 0.9, prompt=2), row(1, -0.9, prompt=2),  # one reply only
        row(4, 0.2, prompt=3), row(5, 0.2, prompt=3),  # no difference
    ]  # fmt: skip
    assert shown(paired(rows)) == [(1, 2), (3, 2), (1, 3)]


def test_dpo_takes_a_repeated_reply_once_with_its_mean() -> None:
    rows = [row(1, 1.0), row(1, -2.0), row(2, 0.0), row(2, 0.0)]
    pairs = paired(rows)
    assert shown(pairs) == [(2, 1)]
    assert pairs[0].rejected.advantage == -0.5


def test_dpo_takes_the_pairs_furthest_apart_and_no_more_than_its_bound() -> None:
    rows = [row(n, n / 10) for n in range(12)]
    pairs = paired(rows)
    assert len(pairs) == PAIRS_PER_PROMPT
    assert len(set(shown(pairs))) == len(pairs)
    gaps = [p.chosen.advantage - p.rejected.advantage for p in pairs]
    assert gaps == sorted(gaps, reverse=True) and gaps[0] == pytest.approx(1.1)
    other = [row(n, n / 10, prompt=2) for n in range(12)]
    assert len(paired([*rows, *other])) == 2 * PAIRS_PER_PROMPT


def test_dpo_without_a_pair_says_what_to_record() -> None:
    rows = [row(1, 0.5), row(1, -0.5, prompt=2)]
    with pytest.raises(NothingToLearn) as raised:
        select("dpo", {"router": rows, "writer": rows[:1]}, config())
    assert str(raised.value) == (
        "dpo has nothing to learn from (router: 2 turns over 2 prompts, 0 of them with different"
        " replies, none of different advantage; writer: 1 turns over 1 prompts, 0 of them with"
        " different replies, none of different advantage); dpo needs several replies to one prompt:"
        " record each task more than once; kto and awr do not; no adapter was changed"
    )


def test_an_adapter_with_nothing_does_not_stop_the_others() -> None:
    adapters = {"router": [row(1, 0.5), row(2, -0.5)], "writer": [row(1, 0.5)]}
    assert list(select("dpo", adapters, config()).idle) == ["writer"]
    assert select("dpo", adapters, config()).adapters == ["router"]


def test_rows_come_from_the_data_set_with_their_mean_advantage() -> None:
    scored = episode(turn(0), turn(1), reward=0.5)
    scored.rewards.append(RewardEvent(episode_id="e", value=1.0, agent="writer", source="extra"))
    data = read_training_set([scored])
    (only,) = method_rows(data, [1], {1: [0.5, -0.1]})
    assert only.advantage == pytest.approx(0.2)
    assert (only.episode, only.episode_reward) == (0, 1.5)
    assert list(only.token_ids) == [5, 2]
    assert method_rows(data, [0])[0].advantage == 0
