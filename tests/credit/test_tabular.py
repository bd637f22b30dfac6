"""The nine tabular cases of the estimator: numbers worked out by hand.

Case 8 (one agent is plain PPO) also has its loss and gradient beside the losses' tests.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marft_agents.credit import (
    action_gae,
    compound_factors,
    credit_report,
    independent_gae,
    normalise,
    token_gae,
)
from marft_agents.credit.gae import step_discounts
from tests.credit.oracle import NUMBER, Episode, episodes


def test_tabular_1_no_discount_at_the_hand_off() -> None:
    credit = action_gae([0, 1], [0, 0], [0, 0], gamma=0.9, lam=1)
    assert credit.advantage_K == [1, 1]


def test_tabular_2_discount_only_where_the_environment_answered() -> None:
    credit = action_gae([0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1], gamma=0.9, lam=1)
    assert credit.advantage_K == pytest.approx([0.9, 0.9, 1, 1])


def test_tabular_3_nothing_leaks_across_episodes_and_the_hand_off_is_kept() -> None:
    batch = [action_gae(r, [0, 0], [0, 0], gamma=0.9, lam=1) for r in ([0, 0], [0, 1])]
    assert [c.advantage_K for c in batch] == [[0, 0], [1, 1]]
    tokens = [
        token_gae(r, [[0, 0], [0]], [0, 0], gamma=0.9, lam=1).advantage_KL for r in ([0, 0], [0, 1])
    ]
    assert tokens == [[[0, 0], [0]], [[1, 1], [1]]]


def test_tabular_4_deltas_telescope() -> None:
    report = credit_report(["a", "b", "a"], [0, 0, 1], [0.2, 0.5, 0.4], [0, 0, 0], gamma=1)
    assert report.delta_K == pytest.approx([0.3, -0.1, 0.6])
    assert report.total == pytest.approx(1 - 0.2)
    assert report.by_agent == pytest.approx({"a": 0.9, "b": -0.1})


def test_tabular_5_a_long_action_does_not_forget_its_reward() -> None:
    values = [[0.0] * 512, [0.0] * 512]
    kept = token_gae([0, 1], values, [0, 0], gamma=1, lam=1)
    assert {a for advantages in kept.advantage_KL for a in advantages} == {1.0}
    faded = token_gae([0, 1], values, [0, 0], gamma=0.99, lam=0.95, gamma_w=0.99, lam_w=0.95)
    # 511 borders between tokens inside each action, and one hand-off with gamma_k = 1
    assert faded.advantage_KL[0][0] == pytest.approx((0.99 * 0.95) ** 1022 * 0.95, rel=1e-9)
    assert faded.advantage_KL[0][0] == pytest.approx(5.6e-28, rel=0.01)


@settings(deadline=None)
@given(episodes(), st.floats(0, 1), st.floats(0, 1))
def test_tabular_6_constant_values_make_both_levels_agree(
    episode: Episode, gamma: float, lam: float
) -> None:
    constant = [[values[0]] * len(values) for values in episode.value_KL]
    rewards, steps, final = episode.reward, episode.steps, episode.final
    token = token_gae(rewards, constant, steps, gamma=gamma, lam=lam, final_value=final)
    action = action_gae(rewards, episode.value_K, steps, gamma=gamma, lam=lam, final_value=final)
    last = [advantages[-1] for advantages in token.advantage_KL]
    assert last == pytest.approx(action.advantage_K, abs=1e-9)
    assert [d[-1] for d in token.delta_KL] == pytest.approx(action.delta_K, abs=1e-9)


def test_tabular_7_a_truncated_end_is_bootstrapped() -> None:
    ends = [
        action_gae([0, 0], [0.5, 0.5], [0, 1], gamma=0.9, lam=1, final_value=v) for v in (0, 0.7)
    ]
    assert ends[0].delta_K[-1] == pytest.approx(-0.5)
    assert ends[1].delta_K[-1] == pytest.approx(0.9 * 0.7 - 0.5)
    assert ends[1].return_K == pytest.approx([0.9 * 0.9 * 0.7, 0.9 * 0.7])
    token = token_gae([0, 0], [[0.5], [0.3, 0.5]], [0, 1], gamma=0.9, lam=1, final_value=0.7)
    assert token.delta_KL[1] == pytest.approx([0.5 - 0.3, 0.9 * 0.7 - 0.5])
    assert token.return_KL[1] == pytest.approx([0.9 * 0.7, 0.9 * 0.7])


def plain_gae(
    reward: list[float], value: list[float], final: float, gamma: float, lam: float
) -> list[float]:
    """GAE of one agent (arXiv 1506.02438), Σ_l (gamma λ)^l δ_{t+l}."""
    ahead = [*value[1:], final]
    delta = [r + gamma * n - v for r, n, v in zip(reward, ahead, value, strict=True)]
    return [
        math.fsum((gamma * lam) ** (m - t) * delta[m] for m in range(t, len(delta)))
        for t in range(len(delta))
    ]


@settings(deadline=None)
@given(episodes(agents=("a",)), st.floats(0, 1), st.floats(0, 1))
def test_tabular_8_one_agent_has_the_advantages_of_plain_ppo(
    episode: Episode, gamma: float, lam: float
) -> None:
    steps = list(range(len(episode.steps)))
    rewards, values, final = episode.reward, episode.value_K, episode.final
    expected = plain_gae(rewards, values, final, gamma, lam)
    marft = action_gae(rewards, values, steps, gamma=gamma, lam=lam, final_value=final)
    assert marft.advantage_K == pytest.approx(expected, abs=1e-9)
    one_token_each = token_gae(
        rewards, [[v] for v in values], steps, gamma=gamma, lam=lam, final_value=final
    )
    assert [a for (a,) in one_token_each.advantage_KL] == marft.advantage_K
    alone = independent_gae(
        episode.agents, episode.team, episode.own, values, steps,
        gamma=gamma, lam=lam, final_value=final,
    )  # fmt: skip
    assert alone.advantage_K == pytest.approx(expected, abs=1e-9)
    nobody_before = compound_factors([None] * len(steps), [[] for _ in steps], steps, limit=2)
    assert nobody_before == [1.0] * len(steps)


@pytest.mark.parametrize(("ratio", "dependent"), [(1.5, 1.5), (5.0, 2.0), (0.8, 0.8), (0.1, 0.5)])
def test_tabular_9_the_compound_ratio_scales_what_depends_on_the_moved_agent(
    ratio: float, dependent: float
) -> None:
    advantage = 0.4
    moved, reader, stranger = math.log(ratio), None, None
    factors = compound_factors([moved, reader, stranger], [[], [0], []], [0, 0, 0], limit=2)
    assert [m * advantage for m in factors] == pytest.approx(
        [advantage, dependent * advantage, advantage]
    )


# -- beside the cases --------------------------------------------------------------------------


def test_the_return_is_advantage_plus_value() -> None:
    credit = action_gae([0.5, 1], [0.25, 0.5], [0, 1], gamma=0.5, lam=0.5)
    assert credit.return_K == pytest.approx(
        [a + v for a, v in zip(credit.advantage_K, [0.25, 0.5], strict=True)]
    )


def test_token_credit_by_hand() -> None:
    credit = token_gae(
        [1, 2], [[4, 8], [16]], [0, 1], gamma=0.5, lam=0.5, gamma_w=0.25, lam_w=0.5, final_value=6
    )
    assert credit.delta_KL == [[0.25 * 8 - 4, 1 + 0.5 * 16 - 8], [2 + 0.5 * 6 - 16]]
    last = 1 + 0.25 * -11
    assert credit.advantage_KL == [[-2 + 0.125 * last, last], [-11]]
    assert credit.return_KL == [[2 + 0.125 * last, 8 + last], [5]]


def test_no_action_gives_empty_credit() -> None:
    assert action_gae([], [], [], gamma=1, lam=1).advantage_K == []
    assert token_gae([], [], [], gamma=1, lam=1).advantage_KL == []


def test_lists_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry an action"):
        action_gae([0, 1], [0], [0, 0], gamma=1, lam=1)
    with pytest.raises(ValueError, match="one entry an action"):
        token_gae([0, 1], [[0]], [0, 0], gamma=1, lam=1)
    with pytest.raises(ValueError, match="needs a value"):
        token_gae([0, 1], [[0], []], [0, 0], gamma=1, lam=1)


@settings(deadline=None)
@given(episodes(), NUMBER)
def test_deltas_telescope_for_any_values(episode: Episode, start: float) -> None:
    values = [start, *episode.value_K[1:]]
    report = credit_report(
        episode.agents, episode.reward, values, episode.steps, gamma=1, final_value=episode.final
    )
    assert report.total == pytest.approx(
        math.fsum(episode.reward) + episode.final - start, abs=1e-9
    )
    assert math.fsum(report.by_agent.values()) == pytest.approx(report.total, abs=1e-9)


def test_discounts_are_one_inside_a_step() -> None:
    assert step_discounts([0, 0, 1, 3, 3], 0.9) == [1, 0.9, 0.9, 1, 0.9]
    assert step_discounts([], 0.9) == []


def test_normalisation_is_per_agent_by_default_choice() -> None:
    advantages, agents = [0.0, 2.0, 100.0, 300.0], ["a", "a", "b", "b"]
    assert normalise(advantages, agents, "agent") == pytest.approx([-1, 1, -1, 1])
    team = normalise(advantages, agents, "team")
    assert team[0] < 0 and team[1] < 0 < team[3]
    assert normalise(advantages, agents, "none") == advantages
    with pytest.raises(ValueError, match="agent, team, none"):
        normalise(advantages, agents, "batch")


def test_rows_without_spread_become_exact_zeros() -> None:
    assert normalise([0.7, 0.7, 0.7], ["a"] * 3, "agent") == [0, 0, 0]
    assert normalise([0.3], ["a"], "agent") == [0]
    assert normalise([], [], "agent") == []
