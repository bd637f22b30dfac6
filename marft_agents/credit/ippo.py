"""Each agent alone, the baseline to compare with (IPPO, arXiv 2011.09533).

    agent m's chain: its own turns k_1 < k_2 < … < k_N, as if nobody else were there
    r_n = Σ own_{k_n} + Σ_{k_n ≤ k < k_{n+1}} team_k         (n = 1 also takes team_k of k < k_1)
    δ_n = r_n + gamma_n V_{n+1} - V_n      Â_n = δ_n + gamma_n λ Â_{n+1}      gamma_n as in gae.py

V is the agent's own critic on its own observations. The team's reward reaches every agent in full:
on the agent's latest turn at or before its arrival, or on its first turn when it came earlier than
that. How long a reward took to arrive is not discounted, only the way between own turns; own turns
of one environment step are a hand-off. Rewards of one agent count for nobody else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marft_agents.credit.gae import Credit, TokenCredit, action_gae, token_gae


@dataclass(frozen=True)
class OwnTurns:
    """One agent's turns of an episode as a chain; each list is (N,)."""

    index: list[int]
    """Place of each turn among the episode's K actions."""
    reward: list[float]
    steps: list[int]


def own_turns(
    agents_K: Sequence[str],
    team_reward_K: Sequence[float],
    own_reward_K: Sequence[float],
    steps_K: Sequence[int],
    agent: str,
) -> OwnTurns:
    """The chain of ``agent``; empty when it did not act."""
    if not len(agents_K) == len(team_reward_K) == len(own_reward_K) == len(steps_K):
        raise ValueError("agents, rewards and steps must have one entry an action")
    index = [k for k, owner in enumerate(agents_K) if owner == agent]
    if not index:
        return OwnTurns([], [], [])
    reward = [own_reward_K[k] for k in index]
    for k, value in enumerate(team_reward_K):
        reward[max(bisect_right(index, k) - 1, 0)] += value
    return OwnTurns(index, reward, [steps_K[k] for k in index])


def independent_gae(
    agents_K: Sequence[str],
    team_reward_K: Sequence[float],
    own_reward_K: Sequence[float],
    values_K: Sequence[float],
    steps_K: Sequence[int],
    *,
    gamma: float,
    lam: float,
    final_value: float | Mapping[str, float] = 0.0,
) -> Credit:
    """Credit of one episode's actions, each from its own agent's chain.

    ``values_K`` come from the critic of each action's agent; ``final_value`` is V after a truncated
    end, one for all agents or one for each (0 for those not named).
    """
    if len(values_K) != len(agents_K):
        raise ValueError("values must have one entry an action")
    out = Credit(*([0.0] * len(agents_K) for _ in range(3)))
    for agent in dict.fromkeys(agents_K):
        own = own_turns(agents_K, team_reward_K, own_reward_K, steps_K, agent)
        credit = action_gae(
            own.reward,
            [values_K[k] for k in own.index],
            own.steps,
            gamma=gamma,
            lam=lam,
            final_value=_final(final_value, agent),
        )
        for n, k in enumerate(own.index):
            out.delta_K[k] = credit.delta_K[n]
            out.advantage_K[k] = credit.advantage_K[n]
            out.return_K[k] = credit.return_K[n]
    return out


def independent_token_gae(
    agents_K: Sequence[str],
    team_reward_K: Sequence[float],
    own_reward_K: Sequence[float],
    values_KL: Sequence[Sequence[float]],
    steps_K: Sequence[int],
    *,
    gamma: float,
    lam: float,
    gamma_w: float = 1.0,
    lam_w: float = 1.0,
    final_value: float | Mapping[str, float] = 0.0,
) -> TokenCredit:
    """Credit of one episode's tokens, each from its own agent's chain; see ``token_gae``."""
    if len(values_KL) != len(agents_K):
        raise ValueError("values must have one entry an action")
    out = TokenCredit(*([[0.0]] * len(agents_K) for _ in range(3)))
    for agent in dict.fromkeys(agents_K):
        own = own_turns(agents_K, team_reward_K, own_reward_K, steps_K, agent)
        credit = token_gae(
            own.reward,
            [values_KL[k] for k in own.index],
            own.steps,
            gamma=gamma,
            lam=lam,
            gamma_w=gamma_w,
            lam_w=lam_w,
            final_value=_final(final_value, agent),
        )
        for n, k in enumerate(own.index):
            out.delta_KL[k] = credit.delta_KL[n]
            out.advantage_KL[k] = credit.advantage_KL[n]
            out.return_KL[k] = credit.return_KL[n]
    return out


def _final(final_value: float | Mapping[str, float], agent: str) -> float:
    return final_value.get(agent, 0.0) if isinstance(final_value, Mapping) else final_value
