"""Weights of advantage-weighted regression (Peng et al., arXiv 1910.00177).

    w_b = min(exp(Â_b / τ), w_max)

Small τ imitates only the best actions, large τ all of them. Never negative: a bad action is left
alone, not pushed away, which is what keeps learning from fixed logs stable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def awr_weights(
    advantage_B: Sequence[float], *, temperature: float, weight_max: float
) -> list[float]:
    """Weight (B,) per action; clipped before the exponential, so nothing overflows."""
    if temperature <= 0 or weight_max <= 0:
        raise ValueError("the temperature and the largest weight of AWR must be positive")
    ceiling = math.log(weight_max)
    return [math.exp(min(a / temperature, ceiling)) for a in advantage_B]
