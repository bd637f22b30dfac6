"""Groups of episodes of one task, and the weights of the regression."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from marft_agents.credit import (
    agent_group_advantages,
    agent_returns,
    awr_weights,
    group_advantages,
)

CASES = Path(__file__).parents[1] / "cases"


def signs(values: list[float | None]) -> list[int]:
    return [0 if not v else int(math.copysign(1, v)) for v in values]


def test_case_16_flat_groups_give_exact_zeros_and_are_counted() -> None:
    case = json.loads((CASES / "16-flat-groups.json").read_text())
    returns = [g for group in case["groups"] for g in group]
    groups = [n for n, group in enumerate(case["groups"]) for _ in group]
    expected = [s for group in case["want_advantage_signs"] for s in group]
    got = group_advantages(returns, groups)
    assert signs(got.advantage_B) == expected
    assert got.flat == [0, 1, 2]


def test_case_16_for_every_agent_of_a_team() -> None:
    case = json.loads((CASES / "16-flat-groups.json").read_text())
    returns: list[dict[str, float]] = [{"a": g, "b": g} for group in case["groups"] for g in group]
    groups = [n for n, group in enumerate(case["groups"]) for _ in group]
    expected = [s for group in case["want_advantage_signs"] for s in group]
    got = agent_group_advantages(returns, groups)
    for agent in "ab":
        assert signs([None if a is None else a[agent] for a in got.advantage_B]) == expected
    assert got.flat == {"a": [0, 1, 2], "b": [0, 1, 2]}
    assert got.silent == [0, 1, 2]


def test_case_15_an_unscored_episode_is_no_zero() -> None:
    got = group_advantages([1.0, None, 0.0], ["g1"] * 3)
    assert got.advantage_B[1] is None
    assert [got.advantage_B[0], got.advantage_B[2]] == pytest.approx([1, -1], abs=1e-6)
    team = agent_group_advantages([{"a": 1.0}, None, {"a": 0.0}], ["g1"] * 3)
    assert team.advantage_B == [{"a": pytest.approx(1)}, None, {"a": pytest.approx(-1)}]


def test_an_agents_return_is_the_teams_reward_and_its_own() -> None:
    got = agent_returns(["a", "b", "a"], [0, 0.5, 1], [0.25, 2, 0.125])
    assert got == {"a": 1.875, "b": 3.5}
    assert agent_returns([], [], []) == {}
    with pytest.raises(ValueError, match="one entry an action"):
        agent_returns(["a"], [0, 0], [0])


def test_own_rewards_speak_to_their_agent_only() -> None:
    """The team earned the same twice; only b did better once."""
    got = agent_group_advantages([{"a": 1, "b": 1}, {"a": 1, "b": 3}], ["task", "task"])
    assert [a and a["a"] for a in got.advantage_B] == [0, 0]
    assert [a and a["b"] for a in got.advantage_B] == [pytest.approx(-1), pytest.approx(1)]
    assert got.flat == {"a": ["task"], "b": []}
    assert got.silent == []


def test_an_agents_group_holds_the_episodes_in_which_it_acted() -> None:
    got = agent_group_advantages([{"a": 0, "b": 5}, {"a": 1, "b": 1}, {"a": 1}], ["task"] * 3)
    assert [sorted(a or {}) for a in got.advantage_B] == [["a", "b"], ["a", "b"], ["a"]]
    values = [a["b"] for a in got.advantage_B if a is not None and "b" in a]
    assert values == pytest.approx([1, -1]), "the third episode is no 0 of b's"


def test_a_group_in_which_nobody_was_scored_is_silent() -> None:
    got = agent_group_advantages([None, {"a": 1.0}, {"a": 0.0}], ["x", "y", "y"])
    assert got.silent == ["x"]
    assert group_advantages([None], ["x"]).flat == ["x"]


def test_one_entry_an_episode() -> None:
    with pytest.raises(ValueError, match="one entry an episode"):
        agent_group_advantages([None], [])


def test_weights_rise_with_the_advantage_and_stay_finite() -> None:
    weights = awr_weights([-1, 0, 1, 1e6, -1e6], temperature=0.5, weight_max=20)
    assert weights == pytest.approx([math.exp(-2), 1, math.exp(2), 20, 0])
    with pytest.raises(ValueError, match="positive"):
        awr_weights([0], temperature=0, weight_max=20)
