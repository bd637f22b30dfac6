"""Advantages on a common scale.

    Â'_b = (Â_b - mean_m) / (std_m + ε)      over the rows b of agent m

Per agent by default: one statistic shared by the team inflates the gradients of some agents
(Dr. MAS, arXiv 2602.08847). Rows without spread become exactly 0, never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NORMALISATIONS = ("agent", "team", "none")
_EPSILON = 1e-8


def standardise(x_B: Sequence[float]) -> list[float]:
    """Zero mean, unit (population) deviation; all zeros when the values do not differ."""
    if not x_B:
        return []
    mean = math.fsum(x_B) / len(x_B)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in x_B) / len(x_B))
    if std <= 1e-9 * max(1.0, abs(mean)):
        return [0.0] * len(x_B)
    return [(x - mean) / (std + _EPSILON) for x in x_B]


def normalise(advantage_B: Sequence[float], agent_B: Sequence[str], how: str) -> list[float]:
    """Advantages (B,) normalised per ``agent``, over the ``team``, or as they are (``none``)."""
    if how == "none":
        return list(advantage_B)
    if how == "team":
        return standardise(advantage_B)
    if how != "agent":
        raise ValueError(f"normalise is one of {', '.join(NORMALISATIONS)}, not {how!r}")
    out = [0.0] * len(advantage_B)
    for agent in dict.fromkeys(agent_B):
        rows = [b for b, owner in enumerate(agent_B) if owner == agent]
        for b, value in zip(rows, standardise([advantage_B[b] for b in rows]), strict=True):
            out[b] = value
    return out
