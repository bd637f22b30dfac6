"""Advantages chained through all agents' turns of one episode, per action or per token.

    gamma_k = 1 at a hand-off, gamma at an environment transition

MARFT-A, an action has one value V_k:

    δ_k = r_k + gamma_k V_{k+1} - V_k        Â_k = δ_k + gamma_k λ Â_{k+1}        R̂_k = Â_k + V_k

MARFT-T, token j = 1…L_k of action k has its own value V_{k,j}, that of the state before it:

    j < L_k: δ_{k,j} = gamma_w V_{k,j+1} - V_{k,j}        Â_{k,j} = δ_{k,j} + gamma_w λ_w Â_{k,j+1}
    j = L_k: δ_{k,j} = r_k + gamma_k V_{k+1,1} - V_{k,j}  Â_{k,j} = δ_{k,j} + gamma_k λ Â_{k+1,1}

No discount at a hand-off: inside one step the multi-agent advantage decomposition
A(s, a^{1:n}) = Σ_m A(s, a^{1:m-1}, a^m) holds only undiscounted. No discount between tokens by
default (gamma_w = λ_w = 1, arXiv 2405.15821): a long action would forget its reward. The recursion
runs over one episode and is never restarted at an agent's border. V_{K+1} is 0 after a terminated
end and the critic's value of the final transcript after a truncated one; the last boundary is an
environment transition.
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


@dataclass(frozen=True)
class TokenCredit:
    """What the tokens of one episode's actions earned; each list is (K,) of lists (L_k,)."""

    delta_KL: list[list[float]]
    advantage_KL: list[list[float]]
    return_KL: list[list[float]]
    """R̂_{k,j}, the critic's target before token j."""


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


def token_gae(
    rewards_K: Sequence[float],
    values_KL: Sequence[Sequence[float]],
    steps_K: Sequence[int],
    *,
    gamma: float,
    lam: float,
    gamma_w: float = 1.0,
    lam_w: float = 1.0,
    final_value: float = 0.0,
) -> TokenCredit:
    """Advantages of one episode's tokens; an action with one value counts as one token.

    ``values_KL[k][j]`` is V before token j of action k; ``final_value`` is V_{K+1,1}.
    """
    if not len(rewards_K) == len(values_KL) == len(steps_K):
        raise ValueError("rewards, values and steps must have one entry an action")
    if not all(len(values_L) for values_L in values_KL):
        raise ValueError("every action needs a value: one a token, or one in all")
    gamma_K = step_discounts(steps_K, gamma)
    delta_KL: list[list[float]] = [[] for _ in rewards_K]
    advantage_KL: list[list[float]] = [[] for _ in rewards_K]
    value_next, running = final_value, 0.0
    for k in reversed(range(len(rewards_K))):
        reward, discount, trace = rewards_K[k], gamma_K[k], gamma_K[k] * lam
        for value in reversed(values_KL[k]):
            delta = reward + discount * value_next - value
            running = delta + trace * running
            delta_KL[k].append(delta)
            advantage_KL[k].append(running)
            value_next = value
            reward, discount, trace = 0.0, gamma_w, gamma_w * lam_w
        delta_KL[k].reverse()
        advantage_KL[k].reverse()
    return_KL = [
        [a + v for a, v in zip(advantage_L, values_L, strict=True)]
        for advantage_L, values_L in zip(advantage_KL, values_KL, strict=True)
    ]
    return TokenCredit(delta_KL, advantage_KL, return_KL)
