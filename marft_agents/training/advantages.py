"""From rewards and values to the advantage of every trainable turn, and its weight.

Invariant: the recursion runs over every action of an episode (external agents' included); only
trainable turns get a normalised advantage. An adapter whose turns do not differ in advantage is
left out: scaling its noise up to unit size would train on nothing.

Estimators: ``marft`` (the team's critic, one recursion through all agents), ``single`` (the same
numbers; one adapter plays every role), ``ippo`` (each agent alone, its own critic), ``group``
(episodes of one task compared with each other, no critic).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from marft_agents.credit import (
    Credit,
    action_gae,
    agent_group_advantages,
    agent_returns,
    awr_weights,
    independent_gae,
    independent_token_gae,
    normalise,
    token_gae,
)
from marft_agents.errors import NothingToLearn
from marft_agents.training.config import MarftConfig
from marft_agents.training.critic import EpisodeValues
from marft_agents.training.dataset import EpisodeView, TrainingSet

_NO_SPREAD = 1e-3


@dataclass(frozen=True)
class ActionCredit:
    """What one action earned; ``advantage_L`` has one number, or one a token."""

    episode_id: str
    turn_id: str
    agent: str
    value: float
    advantage_L: list[float]
    delta: float
    """δ_k (λ = 0): for gamma 1 they sum to the team's advantage over the episode."""


@dataclass(frozen=True)
class Credits:
    """Credit of every action, and advantage and weight of the rows that are trained."""

    actions: list[list[ActionCredit]]
    """Per episode, per action."""
    advantage: dict[int, list[float]]
    """Normalised advantage by row index: one number, or one a token."""
    flat: list[str]
    """Adapters whose turns do not differ in advantage."""
    flat_groups: int = 0
    """Tasks whose episodes earned the same (estimator ``group``)."""
    weight: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """Relative AWR weight by row index; zeros for a skipped row."""
    mean_weight: dict[str, float] = field(default_factory=dict[str, float])
    """Mean AWR weight over the rows that are not skipped, per adapter."""
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    """Light rows that are skipped, per adapter."""

    def mean(self, row: int) -> float:
        """Mean advantage of the row's tokens."""
        return math.fsum(self.advantage[row]) / len(self.advantage[row])


def assign_credit(
    data: TrainingSet,
    by_adapter: Mapping[str, Sequence[int]],
    values: Sequence[EpisodeValues] | None,
    config: MarftConfig,
) -> Credits:
    """Advantages of all rows of all adapters.

    ``values`` has one entry an episode; ``None`` for the estimator ``group``.

    Raises:
        NothingToLearn: when no adapter has turns that differ in advantage.
    """
    silent: set[tuple[int, str]] = set()
    flat_groups = 0
    if values is None:
        actions, flat_groups, silent = _group_actions(data)
    else:
        pairs = zip(data.episodes, values, strict=True)
        actions = [_actions(episode, v, config) for episode, v in pairs]
    raw: dict[int, list[float]] = {}
    for i in chain.from_iterable(by_adapter.values()):
        turn = data.rows[i]
        if (turn.episode, turn.agent) not in silent:
            raw[i] = actions[turn.episode][turn.k].advantage_L
    scale = _spread([e.total_reward for e in data.episodes]) or 1.0
    flat = [
        adapter
        for adapter, rows in by_adapter.items()
        if _spread([x for i in rows for x in raw.get(i, ())]) < _NO_SPREAD * scale
    ]
    kept = [
        i for adapter, rows in by_adapter.items() if adapter not in flat for i in rows if i in raw
    ]
    if not kept:
        raise NothingToLearn(_nothing(config, flat_groups))
    return Credits(actions, _normalised(data, raw, kept, config), flat, flat_groups)


def _nothing(config: MarftConfig, flat_groups: int) -> str:
    if config.estimator == "group":
        return (
            f"nothing to learn: estimator group compares episodes of one task, and none of the"
            f" {flat_groups} tasks has two scored episodes that earned differently; nothing was"
            " changed. Record each task several times, or use estimator: marft"
        )
    return (
        "nothing to learn: the advantages of all turns are the same, so no action was better"
        " than another; nothing was changed. Record more episodes, or tasks of mixed outcome"
    )


def _normalised(
    data: TrainingSet, raw: Mapping[int, list[float]], rows: Sequence[int], config: MarftConfig
) -> dict[int, list[float]]:
    """Per agent over its own trained turns (or tokens); a group's advantages already are."""
    if config.estimator == "group":
        return {i: list(raw[i]) for i in rows}
    flat = [x for i in rows for x in raw[i]]
    owners = [agent for i in rows for agent in [data.rows[i].agent] * len(raw[i])]
    scaled = iter(normalise(flat, owners, config.normalise))
    return {i: [next(scaled) for _ in raw[i]] for i in rows}


# -- one episode -------------------------------------------------------------------------------


def _actions(episode: EpisodeView, v: EpisodeValues, config: MarftConfig) -> list[ActionCredit]:
    """Credit of one episode's actions, and their δ_k at λ = 0."""
    if config.estimator == "ippo":
        delta_K = _alone(episode, v, config, lam=0.0).delta_K
    else:
        delta_K = action_gae(
            episode.reward_K,
            v.values_K,
            episode.steps_K,
            gamma=config.gamma,
            lam=0.0,
            final_value=v.final_value,
        ).delta_K
    advantages = _advantages(episode, v, config)
    return [
        ActionCredit(episode.episode_id, turn, agent, value, advantage_L, delta)
        for turn, agent, value, advantage_L, delta in zip(
            episode.turn_ids_K, episode.agents_K, v.values_K, advantages, delta_K, strict=True
        )
    ]


def _advantages(episode: EpisodeView, v: EpisodeValues, config: MarftConfig) -> list[list[float]]:
    if config.estimator == "ippo":
        return _independent(episode, v, config)
    if config.level == "token":
        if v.values_KL is None:
            raise ValueError("the token level needs a value before every token")
        return token_gae(
            episode.reward_K,
            v.values_KL,
            episode.steps_K,
            gamma=config.gamma,
            lam=config.lam,
            gamma_w=config.gamma_w,
            lam_w=config.lam_w,
            final_value=v.final_value,
        ).advantage_KL
    credit = action_gae(
        episode.reward_K,
        v.values_K,
        episode.steps_K,
        gamma=config.gamma,
        lam=config.lam,
        final_value=v.final_value,
    )
    return [[a] for a in credit.advantage_K]


def _independent(episode: EpisodeView, v: EpisodeValues, config: MarftConfig) -> list[list[float]]:
    if config.level == "action":
        return [[a] for a in _alone(episode, v, config, lam=config.lam).advantage_K]
    if v.values_KL is None:
        raise ValueError("the token level needs a value before every token")
    return independent_token_gae(
        episode.agents_K,
        episode.team_reward_K,
        episode.own_reward_K,
        v.values_KL,
        episode.steps_K,
        gamma=config.gamma,
        lam=config.lam,
        gamma_w=config.gamma_w,
        lam_w=config.lam_w,
        final_value=v.final_by_agent or v.final_value,
    ).advantage_KL


def _alone(episode: EpisodeView, v: EpisodeValues, config: MarftConfig, *, lam: float) -> Credit:
    return independent_gae(
        episode.agents_K,
        episode.team_reward_K,
        episode.own_reward_K,
        v.values_K,
        episode.steps_K,
        gamma=config.gamma,
        lam=lam,
        final_value=v.final_by_agent or v.final_value,
    )


def _group_actions(
    data: TrainingSet,
) -> tuple[list[list[ActionCredit]], int, set[tuple[int, str]]]:
    """Every action of an agent earns what the episode's return says in its task's group.

    Also: tasks that say nothing to anybody, and the episodes (by index) whose group says nothing to
    an agent: its turns there have no baseline, so they take no part, not even in a mean.
    """
    groups = [episode.task or f"\0{episode.episode_id}" for episode in data.episodes]
    result = agent_group_advantages(
        [agent_returns(e.agents_K, e.team_reward_K, e.own_reward_K) for e in data.episodes],
        groups,
    )
    actions = [
        [
            ActionCredit(e.episode_id, turn, agent, 0.0, [earned[agent]], reward)
            for turn, agent, reward in zip(e.turn_ids_K, e.agents_K, e.reward_K, strict=True)
        ]
        for e, earned in zip(data.episodes, result.advantage_B, strict=True)
        if earned is not None
    ]
    none = {agent: set(flat) for agent, flat in result.flat.items()}
    silent = {
        (n, agent)
        for n, (e, group) in enumerate(zip(data.episodes, groups, strict=True))
        for agent in e.agents_K
        if group in none[agent]
    }
    return actions, len(result.silent), silent


def _spread(values: Sequence[float]) -> float:
    if not values:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))


def reward_credits(data: TrainingSet, by_adapter: Mapping[str, Sequence[int]]) -> Credits:
    """No credit at all: every turn stands for what its episode earned (supervised training)."""
    earned = [episode.total_reward for episode in data.episodes]
    advantage = {
        i: [earned[data.rows[i].episode]] for i in chain.from_iterable(by_adapter.values())
    }
    return Credits([], advantage, [])


# -- advantage-weighted regression -------------------------------------------------------------


def add_awr_weights(
    credits: Credits, by_adapter: Mapping[str, Sequence[int]], config: MarftConfig
) -> None:
    """Weights of every adapter's rows, with mean 1 over those that are trained.

    The lightest turns are skipped as long as they hold a small share of all weight: on real logs
    most turns are light, so most of the time is saved, and rare bad tokens are not imitated because
    they happened to be sampled.
    """
    for adapter, all_rows in by_adapter.items():
        if adapter in credits.flat:
            continue
        rows = [i for i in all_rows if i in credits.advantage]
        weight = {
            i: awr_weights(
                credits.advantage[i],
                temperature=config.awr_temperature,
                weight_max=config.awr_weight_max,
            )
            for i in rows
        }
        light = _lightest({i: _mean(w) for i, w in weight.items()}, config.awr_skip_share)
        used = [_mean(weight[i]) for i in rows if i not in light]
        mean = _mean(used)
        credits.mean_weight[adapter] = mean
        credits.skipped[adapter] = len(light)
        for i in rows:
            credits.weight[i] = [0.0 if i in light else w / mean for w in weight[i]]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _lightest(weight: Mapping[int, float], share: float) -> set[int]:
    """Rows that together hold at most ``share`` of all weight, the lightest first."""
    budget = share * math.fsum(weight.values())
    light: set[int] = set()
    for row in sorted(weight, key=lambda i: (weight[i], i)):
        budget -= weight[row]
        if budget < 0:
            break
        light.add(row)
    return light


def credit_by_agent(credits: Credits) -> dict[str, tuple[int, float]]:
    """Actions and mean δ_k of every agent."""
    deltas: dict[str, list[float]] = {}
    for action in chain.from_iterable(credits.actions):
        deltas.setdefault(action.agent, []).append(action.delta)
    return {agent: (len(values), _mean(values)) for agent, values in sorted(deltas.items())}
