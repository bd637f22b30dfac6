"""Each agent alone: which rewards reach it, and what it does not see."""

from __future__ import annotations

import pytest

from marft_agents.credit import action_gae, independent_gae, independent_token_gae, own_turns

AGENTS = ["a", "b", "a", "b", "c"]
TEAM = [0.0, 1.0, 0.0, 2.0, 4.0]
OWN = [0.0, 10.0, 20.0, 0.0, 40.0]
STEPS = [0, 0, 0, 1, 2]


def test_the_teams_reward_reaches_the_latest_own_turn_and_own_rewards_nobody_else() -> None:
    a = own_turns(AGENTS, TEAM, OWN, STEPS, "a")
    assert (a.index, a.reward, a.steps) == ([0, 2], [1, 26], [0, 0])
    b = own_turns(AGENTS, TEAM, OWN, STEPS, "b")
    assert (b.index, b.reward, b.steps) == ([1, 3], [11, 6], [0, 1])


def test_what_came_before_the_first_turn_goes_to_the_first_turn() -> None:
    c = own_turns(AGENTS, TEAM, OWN, STEPS, "c")
    assert (c.index, c.reward, c.steps) == ([4], [47], [2])


def test_an_agent_that_did_not_act_has_no_chain() -> None:
    assert own_turns(AGENTS, TEAM, OWN, STEPS, "d").index == []


def test_every_agent_gets_the_whole_team_reward() -> None:
    for agent in "abc":
        own = own_turns(AGENTS, TEAM, [0.0] * 5, STEPS, agent)
        assert sum(own.reward) == sum(TEAM)


def test_own_turns_of_one_step_are_a_hand_off_and_others_turns_are_not_there() -> None:
    credit = independent_gae(
        ["a", "b", "a"], [0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 1, 1], gamma=0.5, lam=1
    )
    assert credit.advantage_K == [0.5, 1, 1], "a's own step changed; b's chain ends with it"
    same_step = independent_gae(
        ["a", "b", "a"], [0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0], gamma=0.5, lam=1
    )
    assert same_step.advantage_K == [1, 1, 1]


def test_another_agents_values_do_not_matter() -> None:
    credits = [
        independent_gae(
            ["a", "b", "a"], [0, 0, 1], [0, 0, 0], [0.5, v, 0.25], [0, 0, 0], gamma=1, lam=0.5
        )
        for v in (0.0, 9.0)
    ]
    assert [c.advantage_K[::2] for c in credits] == [[-0.25 + 0.5 * 0.75, 0.75]] * 2
    assert credits[0].advantage_K[1] != credits[1].advantage_K[1]


def test_a_truncated_end_has_one_value_or_one_an_agent() -> None:
    def ends(final: float | dict[str, float]) -> list[float]:
        return independent_gae(
            ["a", "b"], [0, 0], [0, 0], [0, 0], [0, 0], gamma=0.5, lam=1, final_value=final
        ).advantage_K

    assert ends(4.0) == [2, 2]
    assert ends({"a": 4.0}) == [2, 0]


def test_tokens_of_one_value_are_the_actions() -> None:
    values = [0.1, 0.2, 0.3, 0.4, 0.5]
    action = independent_gae(AGENTS, TEAM, OWN, values, STEPS, gamma=0.9, lam=0.8)
    token = independent_token_gae(
        AGENTS, TEAM, OWN, [[v] for v in values], STEPS, gamma=0.9, lam=0.8
    )
    assert [a for (a,) in token.advantage_KL] == action.advantage_K
    assert [r for (r,) in token.return_KL] == action.return_K


def test_the_baseline_differs_from_the_chained_credit() -> None:
    chained = action_gae([0, 1], [0.5, 0.9], [0, 0], gamma=1, lam=0)
    alone = independent_gae(["a", "b"], [0, 1], [0, 0], [0.5, 0.9], [0, 0], gamma=1, lam=0)
    assert chained.advantage_K == pytest.approx([0.4, 0.1])
    assert alone.advantage_K == pytest.approx([0.5, 0.1])


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry an action"):
        own_turns(["a"], [0, 0], [0], [0], "a")
    with pytest.raises(ValueError, match="values must have"):
        independent_gae(["a"], [0], [0], [], [0], gamma=1, lam=1)
    with pytest.raises(ValueError, match="values must have"):
        independent_token_gae(["a"], [0], [0], [], [0], gamma=1, lam=1)
