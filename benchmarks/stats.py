"""Means over seeds with an interval, and when a curve first reaches a mark.

Invariant: a mean is never given without its interval. Seeds are few, so the interval is Student's:
mean ± t · s / √n. Methods are compared seed by seed, on the same tasks in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Two-sided 95 % points of Student's t for 1, 2, … degrees of freedom."""


@dataclass(frozen=True)
class Mean:
    """``mean`` of ``n`` values, 95 % interval from ``low`` to ``high``; one value has none."""

    mean: float
    low: float
    high: float
    n: int


def mean_of(values: Sequence[float]) -> Mean:
    """Mean and Student's interval of at least one value."""
    n = len(values)
    if n == 0:
        raise ValueError("no value to average")
    mean = math.fsum(values) / n
    if n == 1:
        return Mean(mean, -math.inf, math.inf, 1)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = _T_95[min(n - 1, len(_T_95)) - 1] * spread / math.sqrt(n)
    return Mean(mean, mean - half, mean + half, n)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies, 95 %, whatever the values' distribution; of at least one value.

    Between the k-th values from either end; k is as large as the binomial of n fair coins allows.
    Under 6 values no such interval reaches 95 %, and it is from the least to the most.
    """
    ordered, n = sorted(values), len(values)
    below, k = 0.0, 0
    while k < n // 2:
        below += math.comb(n, k) / 2**n
        if 2 * below > 0.05:
            break
        k += 1
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]


def difference_of(these: Sequence[float], those: Sequence[float]) -> Mean:
    """Mean of ``these`` minus ``those``, value by value."""
    return mean_of([a - b for a, b in zip(these, those, strict=True)])


def first_reach(at: Sequence[int], curve: Sequence[float], mark: float) -> int | None:
    """Where the curve reaches the mark and has it on average from there on; ``None`` if never."""
    for i, value in enumerate(curve):
        rest = curve[i:]
        if value >= mark and math.fsum(rest) / len(rest) >= mark:
            return at[i]
    return None


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
