"""From rewards and values to one weight per trainable turn.

Invariant: the recursion runs over every action of an episode (external agents' included); only
trainable turns get a normalised advantage and a weight. An adapter whose turns do not differ in
advantage is left out: scaling its noise up to unit size would train on nothing. The lightest turns
are skipped as long as they hold a small share of all weight: on real logs most turns are light, so
most of the time is saved, and rare bad tokens are not imitated because they happened to be sampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from marft_agents.credit import action_gae, awr_weights, normalise
from marft_agents.errors import NothingToLearn
from marft_agents.training.config import MarftConfig
from marft_agents.training.critic import EpisodeValues
from marft_agents.training.plan import AdapterPlan, Plan

_NO_SPREAD = 1e-3


@dataclass(frozen=True)
class ActionCredit:
    """What one action earned."""

    episode_id: str
    turn_id: str
    agent: str
    value: float
    advantage: float
    delta: float
    """δ_k (λ = 0): for gamma 1 they sum to the team's advantage over the episode."""


@dataclass(frozen=True)
class Credits:
    """Credit of every action, and advantage and weight of the rows that are trained."""

    actions: list[list[ActionCredit]]
    """Per episode, per action."""
    advantage: dict[int, float]
    """Normalised advantage by row index."""
    weight: dict[int, float]
    """AWR weight by row index; 0 for a skipped row."""
    mean_weight: dict[str, float]
    """Mean over the rows that are not skipped, per adapter."""
    flat: list[str]
    """Adapters whose turns do not differ in advantage."""
    skipped: dict[str, int]
    """Light rows that are skipped, per adapter."""


def action_credits(
    plan: Plan, values: Sequence[EpisodeValues], *, gamma: float, lam: float
) -> list[list[ActionCredit]]:
    """GAE over every episode of the plan."""
    out: list[list[ActionCredit]] = []
    for episode, v in zip(plan.data.episodes, values, strict=True):
        credit = action_gae(
            episode.reward_K,
            v.values_K,
            episode.steps_K,
            gamma=gamma,
            lam=lam,
            final_value=v.final_value,
        )
        out.append(
            [
                ActionCredit(episode.episode_id, turn, agent, value, advantage, delta)
                for turn, agent, value, advantage, delta in zip(
                    episode.turn_ids_K,
                    episode.agents_K,
                    v.values_K,
                    credit.advantage_K,
                    credit.delta_K,
                    strict=True,
                )
            ]
        )
    return out


def assign_credit(plan: Plan, values: Sequence[EpisodeValues], config: MarftConfig) -> Credits:
    """Advantages and weights of all rows of the plan.

    Raises:
        NothingToLearn: when no adapter has turns that differ in advantage.
    """
    actions = action_credits(plan, values, gamma=config.gamma, lam=config.lam)
    raw = {i: _advantage(plan, actions, i) for a in plan.adapters for i in a.rows}
    reward_scale = _spread([e.total_reward for e in plan.data.episodes]) or 1.0
    flat = [
        a.adapter
        for a in plan.adapters
        if _spread([raw[i] for i in a.rows]) < _NO_SPREAD * reward_scale
    ]
    kept = [a for a in plan.adapters if a.adapter not in flat]
    if not kept:
        raise NothingToLearn(
            "nothing to learn: the advantages of all turns are the same, so no action was better"
            " than another; nothing was changed. Record more episodes, or tasks of mixed outcome"
        )
    rows = [i for a in kept for i in a.rows]
    scaled = normalise([raw[i] for i in rows], [plan.data.rows[i].agent for i in rows],
                       config.normalise)  # fmt: skip
    advantage = dict(zip(rows, scaled, strict=True))
    weight: dict[int, float] = {}
    for adapter in kept:
        weight |= _weights(adapter, advantage, config)
    used = {a.adapter: [weight[i] for i in a.rows if weight[i] > 0] for a in kept}
    return Credits(
        actions,
        advantage,
        weight,
        {name: math.fsum(values) / len(values) for name, values in used.items()},
        flat,
        {a.adapter: len(a.rows) - len(used[a.adapter]) for a in kept},
    )


def _advantage(plan: Plan, actions: Sequence[Sequence[ActionCredit]], row: int) -> float:
    turn = plan.data.rows[row]
    return actions[turn.episode][turn.k].advantage


def _spread(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))


def _weights(
    adapter: AdapterPlan, advantage: dict[int, float], config: MarftConfig
) -> dict[int, float]:
    """Weight by row index, the lightest ones set to 0."""
    values = awr_weights(
        [advantage[i] for i in adapter.rows],
        temperature=config.awr_temperature,
        weight_max=config.awr_weight_max,
    )
    weight = dict(zip(adapter.rows, values, strict=True))
    budget = config.awr_skip_share * math.fsum(values)
    for row in sorted(adapter.rows, key=lambda i: (weight[i], i)):
        budget -= weight[row]
        if budget < 0:
            break
        weight[row] = 0.0
    return weight
