"""Groups of episodes of one task, and the weights of the regression."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from marft_agents.credit import awr_weights, group_advantages

CASES = Path(__file__).parents[1] / "cases"


def test_case_16_flat_groups_give_exact_zeros_and_are_counted() -> None:
    case = json.loads((CASES / "16-flat-groups.json").read_text())
    returns = [g for group in case["groups"] for g in group]
    groups = [n for n, group in enumerate(case["groups"]) for _ in group]
    got = group_advantages(returns, groups)
    signs = [0 if not a else int(math.copysign(1, a)) for a in got.advantage_B]
    assert signs == [s for group in case["want_advantage_signs"] for s in group]
    assert got.flat == [0, 1, 2]


def test_case_15_an_unscored_episode_is_no_zero() -> None:
    got = group_advantages([1.0, None, 0.0], ["g1"] * 3)
    assert got.advantage_B[1] is None
    assert [got.advantage_B[0], got.advantage_B[2]] == pytest.approx([1, -1], abs=1e-6)


def test_weights_rise_with_the_advantage_and_stay_finite() -> None:
    weights = awr_weights([-1, 0, 1, 1e6, -1e6], temperature=0.5, weight_max=20)
    assert weights == pytest.approx([math.exp(-2), 1, math.exp(2), 20, 0])
    with pytest.raises(ValueError, match="positive"):
        awr_weights([0], temperature=0, weight_max=20)
