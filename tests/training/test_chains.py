"""The recursion of a critic's chain, against that of credit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marft_agents.credit import action_gae, token_gae
from marft_agents.training.chains import (
    Chain,
    Discounts,
    Links,
    fill_in,
    lambda_returns,
    leave_out,
    make_links,
    rewards_to_go,
    thin,
)
from marft_agents.training.features import Text

DISCOUNTS = Discounts(0.9, 0.8, 0.7, 0.6)
NUMBER = st.floats(-2, 2)


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[float], list[int], list[list[float]], float]:
    """Rewards, steps and values of some actions, and V after the end."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    steps = sorted(draw(st.integers(0, 2)) for _ in lengths)
    rewards = [draw(NUMBER) for _ in lengths]
    values = [[draw(NUMBER) for _ in range(n)] for n in lengths]
    return rewards, steps, values, draw(NUMBER)


def flat(nested: Sequence[Sequence[float]]) -> list[float]:
    return [x for inner in nested for x in inner]


@given(chains())
def test_targets_are_the_returns_of_the_token_recursion(
    case: tuple[list[float], list[int], list[list[float]], float],
) -> None:
    rewards, steps, values, final = case
    credit = token_gae(
        rewards, values, steps, gamma=0.9, lam=0.8, gamma_w=0.7, lam_w=0.6, final_value=final
    )
    links = make_links(rewards, steps, [len(v) for v in values], DISCOUNTS)
    assert lambda_returns(links, flat(values), final) == pytest.approx(flat(credit.return_KL))


@given(chains(), st.data())
def test_a_place_left_out_is_worth_what_follows_it(
    case: tuple[list[float], list[int], list[list[float]], float], data: st.DataObject
) -> None:
    rewards, steps, values, final = case
    links = make_links(rewards, steps, [len(v) for v in values], DISCOUNTS)
    places = range(len(links.reward_P))
    kept = sorted(data.draw(st.sets(st.sampled_from(places), min_size=1)))
    known = {p: flat(values)[p] for p in kept}
    filled = fill_in(links, known, final)
    full = lambda_returns(links, filled, final)
    part = lambda_returns(leave_out(links, kept), [known[p] for p in kept], final)
    assert part == pytest.approx([full[p] for p in kept])
    assert [filled[p] for p in kept] == [known[p] for p in kept]


def test_where_lambda_w_is_1_thinning_changes_no_target() -> None:
    links = make_links([0.5, 2.0], [0, 1], [6, 3], Discounts(0.9, 0.8))
    values = [0.1 * p for p in range(9)]
    full = lambda_returns(links, values, 0.3)
    chain = Chain(0, [Text(range(20), range(12))], links, [0] * 6 + [1] * 3, True, True)
    thinned, rows = thin(chain, 2)
    assert rows == [0, 3, 6, 7, 9, 10, 11]
    assert list(thinned.texts[0].places) == rows and thinned.rows == 7
    assert thinned.action_P == [0, 0, 1, 1] and thinned.starts() == [0, 2]
    part = lambda_returns(thinned.links, [values[p] for p in rows[:4]], 0.3)
    assert part == pytest.approx([full[p] for p in rows[:4]])
    assert thin(chain, 6)[0] is chain


def test_thinning_keeps_the_texts_that_still_have_places() -> None:
    links = make_links([0.0, 1.0], [0, 1], [4, 1], DISCOUNTS)
    texts = [Text([1, 2, 3], [0, 2]), Text([4, 5, 6], [1, 2]), Text([7], [0])]
    thinned, rows = thin(Chain(0, texts, links, [0, 0, 0, 0, 1]), 1)
    assert rows == [0, 4] and [list(t.ids) for t in thinned.texts] == [[1, 2, 3], [7]]
    assert [list(t.places) for t in thinned.texts] == [[0], [0]]


def test_every_action_weighs_the_same() -> None:
    links = Links([0.0] * 4, [1.0] * 4, [1.0] * 4)
    chain = Chain(0, [Text([1, 2, 3, 4], range(4))], links, [0, 0, 0, 1])
    assert chain.weight_P() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0])
    assert chain.starts() == [0, 3]


def test_rewards_to_go_discount_at_environment_transitions() -> None:
    links = make_links([0.0, 0.0, 1.0], [0, 1, 2], [1, 1, 1], Discounts(0.5, 0.3))
    assert rewards_to_go(links) == [0.25, 0.5, 1.0]
    hand_off = make_links([0.0, 1.0], [0, 0], [1, 1], Discounts(0.5, 0.3))
    assert rewards_to_go(hand_off) == [1.0, 1.0]
    zeros = action_gae([0.0, 1.0], [0.0, 0.0], [0, 0], gamma=0.5, lam=1).return_K
    assert rewards_to_go(hand_off) == zeros
