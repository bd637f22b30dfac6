"""Who earned what, in numbers that add up.

    δ_k = r_k + gamma_k V_{k+1} - V_k                    (λ = 0)
    Σ_k δ_k = Σ_k r_k + V_{K+1} - V_1                    (gamma = 1)

δ_k is what action k changed in the team's prospects. With gamma = 1 they telescope to the team's
advantage: what was earned above what was expected at the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from marft_agents.credit.gae import action_gae


@dataclass(frozen=True)
class CreditReport:
    """Credit per action (K,), per agent, and of the team."""

    delta_K: list[float]
    by_agent: dict[str, float]
    total: float


def credit_report(
    agents_K: Sequence[str],
    rewards_K: Sequence[float],
    values_K: Sequence[float],
    steps_K: Sequence[int],
    *,
    gamma: float,
    final_value: float = 0.0,
) -> CreditReport:
    """Credit of one episode's actions and its sum per agent."""
    delta_K = action_gae(
        rewards_K, values_K, steps_K, gamma=gamma, lam=0.0, final_value=final_value
    ).delta_K
    by_agent: dict[str, float] = {}
    for agent, delta in zip(agents_K, delta_K, strict=True):
        by_agent[agent] = by_agent.get(agent, 0.0) + delta
    return CreditReport(delta_K, by_agent, math.fsum(delta_K))
