"""How much an action's advantage changes because earlier agents have moved (HAPPO, 2109.11251).

    Â'_k = M_k Â_k        M_k = clip( Π_{j ∈ P_k} π_new(a_j | o_j) / π_old(a_j | o_j), 1/c, c )

P_k are the actions that k read directly (D = 1), of its own environment step, whose agents are
updated already. Without them M_k is 1. When agents are updated one after another on one batch, the
later ones were recorded beside the earlier ones' old policies; M_k weighs their actions as the new
policies would have met them.

The ratio of an action is that of the update (rho_k of ``action_norm``: per token by default, so
that long replies do not all end at the bound). A turn that is in no update (not sampled by a
softmax, too old) counts as 1, for it has no ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def compound_factors(
    log_ratio_K: Sequence[float | None],
    depends_K: Sequence[Sequence[int]],
    steps_K: Sequence[int],
    *,
    limit: float,
) -> list[float]:
    """M_k (K,) of one episode.

    Args:
        log_ratio_K: log of the action's ratio; ``None`` while its agent is not updated.
        depends_K: indices of the earlier actions that each action read.
        steps_K: environment step of each action.
        limit: c, 1 or more.
    """
    if not len(log_ratio_K) == len(depends_K) == len(steps_K):
        raise ValueError("ratios, dependencies and steps must have one entry an action")
    if limit < 1:
        raise ValueError(f"the bound of the compound ratio is {limit!r}; it must be 1 or more")
    factors: list[float] = []
    for k, depends in enumerate(depends_K):
        if any(not 0 <= j < k for j in depends):
            raise ValueError(
                f"action {k} depends on {list(depends)}; only earlier ones can be read"
            )
        read = [log_ratio_K[j] for j in set(depends) if steps_K[j] == steps_K[k]]
        factors.append(_bounded([x for x in read if x is not None], limit))
    return factors


def _bounded(log_ratios: Sequence[float], limit: float) -> float:
    """clip(exp Σ, 1/c, c), decided before the exponential, so nothing overflows."""
    total = math.fsum(log_ratios)
    if math.isnan(total):
        raise ValueError("a log-ratio is not a number")
    if abs(total) >= math.log(limit):
        return limit if total > 0 else 1 / limit
    return math.exp(total)
