"""Critic-free advantages from several episodes of one task (GRPO's baseline, arXiv 2402.03300).

    Â_b = (G_b - mean G) / (std G + ε)      over the scored episodes of the group

Per agent, as in the paper's critic-free form: G of agent m is the team's reward and m's own ones,
and its group holds the episodes in which m acted.

    Â_{b,m} = (G_{b,m} - mean G_m) / (std G_m + ε)         G_{b,m} = Σ_k team_k + Σ_{k of m} own_k

A group needs two scored episodes that differ; otherwise it gives exact zeros and is counted as
flat, so it neither moves a weight nor dilutes an average. An unscored episode gets ``None``: it is
no zero, and the baseline ignores it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from marft_agents.credit.normalise import standardise


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantage per episode (B,); ``None`` for an unscored one."""

    advantage_B: list[float | None]
    flat: list[Hashable]
    """Groups without spread (all equal, or fewer than two scored)."""


@dataclass(frozen=True)
class AgentGroupAdvantages:
    """Advantage per episode (B,) and agent that acted in it; ``None`` for an unscored episode."""

    advantage_B: list[dict[str, float] | None]
    flat: dict[str, list[Hashable]]
    """Per agent, its groups without spread."""
    silent: list[Hashable]
    """Groups that say nothing to any agent: all their advantages are 0."""


def group_advantages(
    return_B: Sequence[float | None], group_B: Sequence[Hashable]
) -> GroupAdvantages:
    """Advantages of episodes from their returns and their groups."""
    advantage_B: list[float | None] = [None] * len(return_B)
    members: dict[Hashable, list[tuple[int, float]]] = {}
    for b, (g, group) in enumerate(zip(return_B, group_B, strict=True)):
        scored = members.setdefault(group, [])
        if g is not None:
            scored.append((b, g))
    flat: list[Hashable] = []
    for group, scored in members.items():
        values = standardise([g for _, g in scored])
        if not any(values):
            flat.append(group)
        for (b, _), value in zip(scored, values, strict=True):
            advantage_B[b] = value
    return GroupAdvantages(advantage_B, flat)


def agent_returns(
    agents_K: Sequence[str], team_reward_K: Sequence[float], own_reward_K: Sequence[float]
) -> dict[str, float]:
    """G of every agent that acted in an episode: all of the team's reward and its own ones."""
    if not len(agents_K) == len(team_reward_K) == len(own_reward_K):
        raise ValueError("agents and rewards must have one entry an action")
    own: dict[str, list[float]] = {agent: [] for agent in agents_K}
    for agent, value in zip(agents_K, own_reward_K, strict=True):
        own[agent].append(value)
    return {agent: math.fsum([*team_reward_K, *values]) for agent, values in own.items()}


def agent_group_advantages(
    return_B: Sequence[Mapping[str, float] | None], group_B: Sequence[Hashable]
) -> AgentGroupAdvantages:
    """Advantages per agent from ``agent_returns`` of the episodes and their groups."""
    if len(return_B) != len(group_B):
        raise ValueError("returns and groups must have one entry an episode")
    advantage_B = [None if g is None else dict[str, float]() for g in return_B]
    flat: dict[str, list[Hashable]] = {}
    loud: set[Hashable] = set()
    for agent in dict.fromkeys(agent for g in return_B for agent in g or ()):
        rows = [(b, g[agent]) for b, g in enumerate(return_B) if g is not None and agent in g]
        groups = [group_B[b] for b, _ in rows]
        result = group_advantages([g for _, g in rows], groups)
        flat[agent] = result.flat
        loud |= set(groups) - set(result.flat)
        for (b, _), value in zip(rows, result.advantage_B, strict=True):
            of_episode = advantage_B[b]
            if of_episode is not None and value is not None:
                of_episode[agent] = value
    silent = [group for group in dict.fromkeys(group_B) if group not in loud]
    return AgentGroupAdvantages(advantage_B, flat, silent)
