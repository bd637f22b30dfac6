"""Critic-free advantages from several episodes of one task (GRPO's baseline, arXiv 2402.03300).

    Â_b = (G_b - mean G) / (std G + ε)      over the scored episodes of the group

A group needs two scored episodes that differ; otherwise it gives exact zeros and is counted as
flat, so it neither moves a weight nor dilutes an average. An unscored episode gets ``None``: it is
no zero, and the baseline ignores it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from marft_agents.credit.normalise import standardise


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantage per episode (B,); ``None`` for an unscored one."""

    advantage_B: list[float | None]
    flat: list[Hashable]
    """Groups without spread (all equal, or fewer than two scored)."""


def group_advantages(
    return_B: Sequence[float | None], group_B: Sequence[Hashable]
) -> GroupAdvantages:
    """Advantages of episodes from their returns and their groups."""
    advantage_B: list[float | None] = [None] * len(return_B)
    flat: list[Hashable] = []
    for group in dict.fromkeys(group_B):
        scored = [
            (b, g)
            for b, (g, owner) in enumerate(zip(return_B, group_B, strict=True))
            if owner == group and g is not None
        ]
        values = standardise([g for _, g in scored])
        if not any(values):
            flat.append(group)
        for (b, _), value in zip(scored, values, strict=True):
            advantage_B[b] = value
    return GroupAdvantages(advantage_B, flat)
