"""Whose movement counts for whom."""

from __future__ import annotations

import math

import pytest

from marft_agents.credit import compound_factors

UP, DOWN = math.log(1.25), math.log(0.8)


def test_ratios_of_several_moved_agents_multiply() -> None:
    assert compound_factors([UP, UP, None], [[], [], [0, 1]], [0, 0, 0], limit=2)[
        2
    ] == pytest.approx(1.5625)
    assert compound_factors([UP, DOWN, None], [[], [], [0, 1]], [0, 0, 0], limit=2)[
        2
    ] == pytest.approx(1)


def test_only_direct_reads_of_the_same_step_by_updated_agents_count() -> None:
    chain = compound_factors([UP, None, None], [[], [0], [1]], [0, 0, 0], limit=2)
    assert chain == pytest.approx([1, 1.25, 1]), "what k did not read itself is no part of it"
    earlier_step = compound_factors([UP, None], [[], [0]], [0, 1], limit=2)
    assert earlier_step == [1, 1]
    not_updated = compound_factors([None, None], [[], [0]], [0, 0], limit=2)
    assert not_updated == [1, 1]


def test_an_action_read_twice_counts_once() -> None:
    assert compound_factors([UP, None], [[], [0, 0]], [0, 0], limit=2)[1] == pytest.approx(1.25)


def test_the_bounds_are_exact_and_nothing_overflows() -> None:
    for moved, expected in ((1e6, 3.0), (-1e6, 1 / 3), (math.inf, 3.0), (-math.inf, 1 / 3)):
        assert compound_factors([moved, None], [[], [0]], [0, 0], limit=3)[1] == expected
    assert compound_factors([0.5, None], [[], [0]], [0, 0], limit=1)[1] == 1


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="one entry an action"):
        compound_factors([None], [[], []], [0, 0], limit=2)
    with pytest.raises(ValueError, match="1 or more"):
        compound_factors([None], [[]], [0], limit=0.5)
    with pytest.raises(ValueError, match="only earlier ones"):
        compound_factors([None, None], [[1], []], [0, 0], limit=2)
    with pytest.raises(ValueError, match="not a number"):
        compound_factors([math.nan, None], [[], [0]], [0, 0], limit=2)
