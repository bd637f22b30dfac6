"""Success rates with intervals, and the paired difference between two teams."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from marft_agents.errors import ConfigError

Z_95 = 1.959963984540054


@dataclass(frozen=True)
class Proportion:
    """``rate`` in [0, 1] of ``n`` tasks with its 95 % Wilson score interval [``low``, ``high``]."""

    rate: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.rate:.0%} [{self.low:.0%}, {self.high:.0%}]"


@dataclass(frozen=True)
class Comparison:
    """After minus before on the same tasks: mean difference and its 95 % bootstrap interval."""

    before: float
    after: float
    difference: float
    low: float
    high: float
    n: int

    @property
    def better(self) -> bool:
        """Whether the whole interval lies above zero."""
        return self.low > 0

    @property
    def worse(self) -> bool:
        """Whether the whole interval lies below zero."""
        return self.high < 0


def proportion(outcomes: Sequence[bool]) -> Proportion:
    """Share of true ``outcomes`` with Wilson's interval.

    Raises:
        ConfigError: when there is nothing to count.
    """
    n = len(outcomes)
    if n == 0:
        raise ConfigError("no outcome to evaluate: the list of held-out tasks is empty")
    rate = sum(outcomes) / n
    centre = (rate + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 / (1 + Z_95**2 / n) * math.sqrt(rate * (1 - rate) / n + Z_95**2 / (4 * n * n))
    # At a rate of exactly 0 or 1 the formula meets the border; rounding must not cross the rate.
    low, high = min(rate, centre - half), max(rate, centre + half)
    return Proportion(rate, max(0.0, low), min(1.0, high), n)


def compare(
    before: Sequence[float], after: Sequence[float], *, resamples: int = 10_000, seed: int = 0
) -> Comparison:
    """Percentile bootstrap over tasks of ``mean(after - before)``; same task, same position.

    Raises:
        ConfigError: when the lists differ in length or are empty.
    """
    if len(before) != len(after) or not before:
        raise ConfigError(
            f"a paired comparison needs the same tasks twice, got {len(before)} before and"
            f" {len(after)} after"
        )
    n = len(before)
    differences = [b - a for a, b in zip(before, after, strict=True)]
    rng = random.Random(seed)
    means = sorted(math.fsum(rng.choices(differences, k=n)) / n for _ in range(resamples))
    low = means[int(0.025 * (resamples - 1))]
    high = means[math.ceil(0.975 * (resamples - 1))]
    mean = math.fsum(differences) / n
    return Comparison(math.fsum(before) / n, math.fsum(after) / n, mean, low, high, n)
