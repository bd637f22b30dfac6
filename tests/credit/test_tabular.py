"""The estimator against numbers worked out by hand, and against a second way to compute it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marft_agents.credit import action_gae, credit_report, normalise
from marft_agents.credit.gae import step_discounts


def test_tabular_1_no_discount_at_the_hand_off() -> None:
    credit = action_gae([0, 1], [0, 0], [0, 0], gamma=0.9, lam=1)
    assert credit.advantage_K == [1, 1]


def test_tabular_2_discount_only_where_the_environment_answered() -> None:
    credit = action_gae([0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1], gamma=0.9, lam=1)
    assert credit.advantage_K == pytest.approx([0.9, 0.9, 1, 1])


def test_tabular_3_nothing_leaks_across_episodes_and_the_hand_off_is_kept() -> None:
    batch = [action_gae(r, [0, 0], [0, 0], gamma=0.9, lam=1) for r in ([0, 0], [0, 1])]
    assert [c.advantage_K for c in batch] == [[0, 0], [1, 1]]


def test_tabular_4_deltas_telescope() -> None:
    report = credit_report(["a", "b", "a"], [0, 0, 1], [0.2, 0.5, 0.4], [0, 0, 0], gamma=1)
    assert report.delta_K == pytest.approx([0.3, -0.1, 0.6])
    assert report.total == pytest.approx(1 - 0.2)
    assert report.by_agent == pytest.approx({"a": 0.9, "b": -0.1})


def test_tabular_7_a_truncated_end_is_bootstrapped() -> None:
    ends = [
        action_gae([0, 0], [0.5, 0.5], [0, 1], gamma=0.9, lam=1, final_value=v) for v in (0, 0.7)
    ]
    assert ends[0].delta_K[-1] == pytest.approx(-0.5)
    assert ends[1].delta_K[-1] == pytest.approx(0.9 * 0.7 - 0.5)
    assert ends[1].return_K == pytest.approx([0.9 * 0.9 * 0.7, 0.9 * 0.7])


def test_the_return_is_advantage_plus_value() -> None:
    credit = action_gae([0.5, 1], [0.25, 0.5], [0, 1], gamma=0.5, lam=0.5)
    assert credit.return_K == pytest.approx(
        [a + v for a, v in zip(credit.advantage_K, [0.25, 0.5], strict=True)]
    )


def test_no_action_gives_empty_credit() -> None:
    assert action_gae([], [], [], gamma=1, lam=1).advantage_K == []


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry an action"):
        action_gae([0, 1], [0], [0, 0], gamma=1, lam=1)


FINITE = st.floats(-5, 5, allow_nan=False)


@st.composite
def episodes(draw: st.DrawFn) -> tuple[list[float], list[float], list[int], float]:
    size = draw(st.integers(1, 9))
    numbers = st.lists(FINITE, min_size=size, max_size=size)
    jumps = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    steps = [sum(jumps[: k + 1]) for k in range(size)]
    return draw(numbers), draw(numbers), steps, draw(FINITE)


def double_sum(
    episode: tuple[list[float], list[float], list[int], float], gamma: float, lam: float
) -> list[float]:
    """Â_k = Σ_{l ≥ k} (Π_{k ≤ j < l} gamma_j λ) δ_l, written out instead of recursively."""
    rewards, values, steps, final = episode
    size = len(rewards)

    def g(j: int) -> float:
        return gamma if j + 1 == size or steps[j + 1] > steps[j] else 1.0

    def delta(j: int) -> float:
        return rewards[j] + g(j) * (final if j + 1 == size else values[j + 1]) - values[j]

    return [
        math.fsum(math.prod(g(j) * lam for j in range(k, m)) * delta(m) for m in range(k, size))
        for k in range(size)
    ]


@settings(deadline=None)
@given(episodes(), st.floats(0, 1), st.floats(0, 1))
def test_recursion_equals_the_explicit_double_sum(
    episode: tuple[list[float], list[float], list[int], float], gamma: float, lam: float
) -> None:
    rewards, values, steps, final = episode
    got = action_gae(rewards, values, steps, gamma=gamma, lam=lam, final_value=final)
    assert got.advantage_K == pytest.approx(double_sum(episode, gamma, lam), abs=1e-9)


@settings(deadline=None)
@given(episodes(), FINITE)
def test_deltas_telescope_for_any_values(
    episode: tuple[list[float], list[float], list[int], float], start: float
) -> None:
    rewards, values, steps, final = episode
    values = [start, *values[1:]]
    agents = ["a" if k % 2 else "b" for k in range(len(rewards))]
    report = credit_report(agents, rewards, values, steps, gamma=1, final_value=final)
    assert report.total == pytest.approx(math.fsum(rewards) + final - start, abs=1e-9)
    assert math.fsum(report.by_agent.values()) == pytest.approx(report.total, abs=1e-9)


@settings(deadline=None)
@given(episodes(), episodes())
def test_one_agent_without_hand_offs_is_plain_gae(
    first: tuple[list[float], list[float], list[int], float],
    second: tuple[list[float], list[float], list[int], float],
) -> None:
    """Tabular case 8, and an episode's credit does not depend on its neighbour."""
    for rewards, values, _, final in (first, second):
        steps = list(range(len(rewards)))
        got = action_gae(rewards, values, steps, gamma=0.9, lam=0.8, final_value=final)
        expected, running = [0.0] * len(rewards), 0.0
        for k in range(len(rewards) - 1, -1, -1):
            ahead = final if k + 1 == len(rewards) else values[k + 1]
            running = rewards[k] + 0.9 * ahead - values[k] + 0.9 * 0.8 * running
            expected[k] = running
        assert got.advantage_K == pytest.approx(expected, abs=1e-9)


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
