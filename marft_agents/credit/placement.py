"""r_k: on which action each reward of an episode falls.

The team's reward falls on the last action, an agent's own reward on that agent's last action, a
turn's reward on that turn. A turn that is no action (a reflection, a failed attempt) hands its
reward to the last action before it, or to the first one. All of them add up in r_k. A reward that
belongs to nobody present (an agent that never acted, an unknown turn) is reported, never dropped
in silence and never moved to somebody else.
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
    """Rewards of one agent or one turn; ``reward_K = team_K + own_K``."""
    unplaced: list[str]


def _anchors(order: Sequence[Turn]) -> dict[str, int]:
    """Index into the actions for every turn id."""
    seen, anchor = 0, dict[str, int]()
    for turn in order:
        seen += is_action(turn)
        anchor[turn.turn_id] = max(seen - 1, 0)
    return anchor


def place_rewards(episode: Episode, order: Sequence[Turn]) -> PlacedRewards:
    """Rewards of a scored episode on its actions, given its turns in dependency order."""
    actions = [t for t in order if is_action(t)]
    team_K, own_K = [0.0] * len(actions), [0.0] * len(actions)
    unplaced: list[str] = []
    if not actions:
        return PlacedRewards([], [], [], ["every reward: the episode has no action"])
    if episode.team_reward is not None:
        team_K[-1] += episode.team_reward
    last = {t.agent: k for k, t in enumerate(actions)}
    for agent, value in episode.agent_rewards.items():
        if agent in last:
            own_K[last[agent]] += value
        else:
            unplaced.append(f"agent {agent!r} did not act")
    anchor = _anchors(order)
    for turn_id, value in episode.turn_rewards.items():
        if turn_id in anchor:
            own_K[anchor[turn_id]] += value
        else:
            unplaced.append(f"turn {turn_id!r} is not in the episode")
    return PlacedRewards(
        [t + o for t, o in zip(team_K, own_K, strict=True)], team_K, own_K, unplaced
    )
