"""Values pulled towards the mean return, as far as they did not predict returns.

    V ← m + c (V - v)      m, v: mean return, mean value; c in [0, 1] fits the returns best, over
                           values from critics that had not seen them

A critic that learned nothing (c = 0) becomes the mean return, a baseline without noise. The m, v
and c of an episode come from the other episodes; every action weighs the same, its places share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marft_agents.training.chains import Chain, rewards_to_go


@dataclass(frozen=True)
class Shrunk:
    """Values of all rows of each chain; and how good they are, over all episodes."""

    values: list[list[float]]
    shrinkage: float
    """The c of all episodes together; 0: a constant baseline."""
    left: float
    """Weighted squares of the returns that the values leave unexplained, and of the returns."""
    total: float

    @property
    def explained_variance(self) -> float:
        """Share of the returns' variance that the values explain."""
        return 1 - self.left / self.total if self.total > 0 else 0.0


def shrink(chains: Sequence[Chain], values: Sequence[Sequence[float]]) -> Shrunk:
    """Shrink out-of-fold values (one list a chain, one value a row)."""
    if not chains:
        return Shrunk([], 0.0, 0.0, 0.0)
    double = torch.float64
    named = [x for c, r in zip(chains, values, strict=True) for x in r[: c.places]]
    v = torch.tensor(named, dtype=double)
    g = torch.tensor([x for c in chains for x in rewards_to_go(c.links)], dtype=double)
    w = torch.tensor([x for c in chains for x in c.weight_P()], dtype=double)
    e = torch.tensor([c.episode for c in chains for _ in range(c.places)])
    size = int(e.max()) + 1

    def sums(x: Tensor) -> Tensor:
        return torch.zeros(size, dtype=double).index_add(0, e, x)

    moments = torch.stack([sums(w), sums(w * g), sums(w * v), sums(w * v * g), sums(w * v * v)])
    total = moments.sum(1)
    base, factor = _best(total)
    base_E, factor_E = _best(total[:, None] - moments)
    alone = total[0] - moments[0] <= 1e-9 * total[0]
    bases: list[float] = torch.where(alone, 0.0, base_E).tolist()
    factors: list[float] = torch.where(alone, 1.0, factor_E).tolist()
    out = [
        [bases[c.episode] + factors[c.episode] * x for x in r]
        for c, r in zip(chains, values, strict=True)
    ]
    mean = total[1] / total[0]
    guess = base + factor * v
    left = float((w * (g - guess) ** 2).sum())
    return Shrunk(out, float(factor), left, float((w * (g - mean) ** 2).sum()))


def _best(moments: Tensor) -> tuple[Tensor, Tensor]:
    """m - c v and c from the sums of w, wg, wv, wvg and wv²."""
    w, wg, wv, wvg, wvv = moments
    m, v = wg / w.clamp_min(1e-12), wv / w.clamp_min(1e-12)
    square = wvv - v * wv
    c = torch.where(square > 1e-9 * wvv, (wvg - v * wg) / square.clamp_min(1e-300), 0.0)
    c = c.clamp(0, 1)
    return m - c * v, c
