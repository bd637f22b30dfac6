"""Action-level advantages, chained through all agents' turns of one episode (MARFT-A).

    gamma_k = 1 at a hand-off, gamma at an environment transition
    δ_k = r_k + gamma_k V_{k+1} - V_k        Â_k = δ_k + gamma_k λ Â_{k+1}        R̂_k = Â_k + V_k

No discount at a hand-off: inside one step the multi-agent advantage decomposition
A(s, a^{1:n}) = Σ_m A(s, a^{1:m-1}, a^m) holds only undiscounted. The recursion runs over one
episode and is never restarted at an agent's border. V_{K+1} is 0 after a terminated end and the
critic's value of the final transcript after a truncated one; the last boundary is an environment
transition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Credit:
    """What the actions of one episode earned; each list is (K,)."""

    delta_K: list[float]
    advantage_K: list[float]
    return_K: list[float]
    """R̂_k, the critic's target."""


def step_discounts(steps_K: Sequence[int], gamma: float) -> list[float]:
    """gamma_k (K,) from the environment step of each action."""
    hand_off = [later <= earlier for earlier, later in pairwise(steps_K)]
    return [1.0 if same else gamma for same in hand_off] + [gamma] * min(len(steps_K), 1)


def action_gae(
    rewards_K: Sequence[float],
    values_K: Sequence[float],
    steps_K: Sequence[int],
    *,
    gamma: float,
    lam: float,
    final_value: float = 0.0,
) -> Credit:
    """Advantages of one episode; ``final_value`` is V_{K+1} (leave it 0 for a terminated end)."""
    if not len(rewards_K) == len(values_K) == len(steps_K):
        raise ValueError("rewards, values and steps must have one entry an action")
    gamma_K = step_discounts(steps_K, gamma)
    next_K = [*values_K[1:], final_value]
    delta_K = [
        r + g * v_next - v
        for r, g, v_next, v in zip(rewards_K, gamma_K, next_K, values_K, strict=False)
    ]
    advantage_K = [0.0] * len(delta_K)
    running = 0.0
    for k in reversed(range(len(delta_K))):
        running = delta_K[k] + gamma_K[k] * lam * running
        advantage_K[k] = running
    return_K = [a + v for a, v in zip(advantage_K, values_K, strict=True)]
    return Credit(delta_K, advantage_K, return_K)
