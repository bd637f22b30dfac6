"""Every recursion against explicit sums written another way, on random episodes."""

from __future__ import annotations

import math
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marft_agents.credit import (
    action_gae,
    compound_factors,
    independent_gae,
    independent_token_gae,
    token_gae,
)
from tests.credit.oracle import SHARE, Episode, episodes

close = settings(deadline=None, max_examples=150)


@close
@given(episodes(), SHARE, SHARE)
def test_action_level(episode: Episode, gamma: float, lam: float) -> None:
    got = action_gae(
        episode.reward,
        episode.value_K,
        episode.steps,
        gamma=gamma,
        lam=lam,
        final_value=episode.final,
    )
    expected = episode.actions(gamma, lam).advantages()
    one_step = episode.actions(gamma, 0).advantages()
    assert got.advantage_K == pytest.approx(expected, abs=1e-9)
    assert got.delta_K == pytest.approx(one_step, abs=1e-9)
    returns = [a + v for a, v in zip(expected, episode.value_K, strict=True)]
    assert got.return_K == pytest.approx(returns, abs=1e-9)


@close
@given(episodes(), SHARE, SHARE, SHARE, SHARE)
def test_token_level(
    episode: Episode, gamma: float, lam: float, gamma_w: float, lam_w: float
) -> None:
    got = token_gae(
        episode.reward,
        episode.value_KL,
        episode.steps,
        gamma=gamma,
        lam=lam,
        gamma_w=gamma_w,
        lam_w=lam_w,
        final_value=episode.final,
    )
    lengths = [len(values) for values in episode.value_KL]
    assert [len(a) for a in got.advantage_KL] == lengths == [len(d) for d in got.delta_KL]
    expected = episode.tokens(gamma, lam, gamma_w, lam_w)
    flat = list(chain.from_iterable(got.advantage_KL))
    assert flat == pytest.approx(expected.advantages(), abs=1e-9)
    one_step = episode.tokens(gamma, 0, gamma_w, 0).advantages()
    assert list(chain.from_iterable(got.delta_KL)) == pytest.approx(one_step, abs=1e-9)
    returns = [a + v for a, v in zip(flat, expected.value, strict=True)]
    assert list(chain.from_iterable(got.return_KL)) == pytest.approx(returns, abs=1e-9)


@close
@given(episodes(), SHARE, SHARE)
def test_each_agent_alone(episode: Episode, gamma: float, lam: float) -> None:
    got = independent_gae(
        episode.agents,
        episode.team,
        episode.own,
        episode.value_K,
        episode.steps,
        gamma=gamma,
        lam=lam,
        final_value=episode.final,
    )
    for agent in set(episode.agents):
        alone = episode.only(agent).actions(gamma, lam)
        mine = [k for k, owner in enumerate(episode.agents) if owner == agent]
        assert [got.advantage_K[k] for k in mine] == pytest.approx(alone.advantages(), abs=1e-9)
        returns = [a + v for a, v in zip(alone.advantages(), alone.value, strict=True)]
        assert [got.return_K[k] for k in mine] == pytest.approx(returns, abs=1e-9)
        one_step = episode.only(agent).actions(gamma, 0).advantages()
        assert [got.delta_K[k] for k in mine] == pytest.approx(one_step, abs=1e-9)


@close
@given(episodes(), SHARE, SHARE, SHARE, SHARE)
def test_each_agent_alone_by_tokens(
    episode: Episode, gamma: float, lam: float, gamma_w: float, lam_w: float
) -> None:
    got = independent_token_gae(
        episode.agents,
        episode.team,
        episode.own,
        episode.value_KL,
        episode.steps,
        gamma=gamma,
        lam=lam,
        gamma_w=gamma_w,
        lam_w=lam_w,
        final_value=dict.fromkeys(episode.agents, episode.final),
    )
    for agent in set(episode.agents):
        alone = episode.only(agent).tokens(gamma, lam, gamma_w, lam_w)
        mine = [k for k, owner in enumerate(episode.agents) if owner == agent]
        flat = [a for k in mine for a in got.advantage_KL[k]]
        assert flat == pytest.approx(alone.advantages(), abs=1e-9)
        returns = [a + v for a, v in zip(flat, alone.value, strict=True)]
        assert [r for k in mine for r in got.return_KL[k]] == pytest.approx(returns, abs=1e-9)
        one_step = episode.only(agent).tokens(gamma, 0, gamma_w, 0).advantages()
        assert [d for k in mine for d in got.delta_KL[k]] == pytest.approx(one_step, abs=1e-9)


@st.composite
def updates(
    draw: st.DrawFn,
) -> tuple[list[float | None], list[list[int]], list[int]]:
    size = draw(st.integers(1, 7))
    ratios = draw(st.lists(st.none() | st.floats(0.01, 100), min_size=size, max_size=size))
    reads = [draw(st.lists(st.integers(0, k - 1), max_size=4)) if k else [] for k in range(size)]
    steps = sorted(draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    return ratios, reads, steps


@close
@given(updates(), st.floats(1, 10))
def test_compound_factors(
    update: tuple[list[float | None], list[list[int]], list[int]], limit: float
) -> None:
    ratios, reads, steps = update
    logs = [None if r is None else math.log(r) for r in ratios]
    got = compound_factors(logs, reads, steps, limit=limit)
    for k, factor in enumerate(got):
        product = 1.0
        for j in range(k):
            ratio = ratios[j]
            if j in reads[k] and steps[j] == steps[k] and ratio is not None:
                product *= ratio
        assert factor == pytest.approx(min(max(product, 1 / limit), limit), rel=1e-9)
        assert 1 / limit <= factor <= limit
