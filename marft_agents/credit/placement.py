"""r_k: on which action each reward of an episode falls.

    r_k = team_k + own_k

The team's reward falls on the last action, an agent's own reward on that agent's last action. A
reward of a turn falls on that turn, and is the team's unless it names an agent. A turn that is no
action (a reflection, a failed attempt) hands the team's reward to the last action before it, an
agent's own one to the agent's last action before it, or else to the first one. All of them add up
in r_k. A reward that belongs to nobody present (an agent that never acted, an unknown turn) is
reported, never dropped in silence and never moved to somebody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marft_agents.credit.order import is_action
from marft_agents.schema import Episode, Turn


@dataclass(frozen=True)
class PlacedRewards:
    """r_k (K,), the team's and the agents' own parts of it, and the rewards without an action."""

    reward_K: list[float]
    team_K: list[float]
    own_K: list[float]
    """Rewards that name an agent, each on an action of that agent."""
    unplaced: list[str]


def _anchors(order: Sequence[Turn], agent: str | None) -> dict[str, int]:
    """Index into the actions for every turn id: the last action (of ``agent``) up to it.

    Empty when the agent has no action.
    """
    actions = [t for t in order if is_action(t)]
    mine = [k for k, t in enumerate(actions) if agent is None or t.agent == agent]
    if not mine:
        return {}
    place = {actions[k].turn_id: k for k in mine}
    at, anchor = mine[0], dict[str, int]()
    for turn in order:
        at = place.get(turn.turn_id, at)
        anchor[turn.turn_id] = at
    return anchor


def _turn_rewards(episode: Episode, agent: str | None) -> dict[str, float]:
    """Reward per turn id, of the team (``None``) or of one agent."""
    given = [r for r in episode.rewards if r.agent == agent and r.turn_id is not None]
    if not given:
        return {}
    return episode.model_copy(update={"rewards": given}).turn_rewards


def _place_turn_rewards(
    episode: Episode, order: Sequence[Turn], agent: str | None, out_K: list[float]
) -> list[str]:
    """Add the turns' rewards of the team or of one agent; returns what found no place."""
    rewards = _turn_rewards(episode, agent)
    if not rewards:
        return []
    anchor, known = _anchors(order, agent), {t.turn_id for t in order}
    unplaced: list[str] = []
    for turn_id, value in rewards.items():
        if turn_id not in known:
            unplaced.append(f"turn {turn_id!r} is not in the episode")
        elif turn_id not in anchor:
            unplaced.append(f"agent {agent!r} did not act")
        else:
            out_K[anchor[turn_id]] += value
    return unplaced


def place_rewards(episode: Episode, order: Sequence[Turn]) -> PlacedRewards:
    """Rewards of a scored episode on its actions, given its turns in dependency order."""
    actions = [t for t in order if is_action(t)]
    if not actions:
        return PlacedRewards([], [], [], ["every reward: the episode has no action"])
    team_K, own_K = [0.0] * len(actions), [0.0] * len(actions)
    unplaced: list[str] = []
    if episode.team_reward is not None:
        team_K[-1] += episode.team_reward
    last = {t.agent: k for k, t in enumerate(actions)}
    for agent, value in episode.agent_rewards.items():
        if agent in last:
            own_K[last[agent]] += value
        else:
            unplaced.append(f"agent {agent!r} did not act")
    unplaced += _place_turn_rewards(episode, order, None, team_K)
    for agent in sorted({r.agent for r in episode.rewards if r.agent is not None and r.turn_id}):
        unplaced += _place_turn_rewards(episode, order, agent, own_K)
    reward_K = [team + own for team, own in zip(team_K, own_K, strict=True)]
    return PlacedRewards(reward_K, team_K, own_K, unplaced)
