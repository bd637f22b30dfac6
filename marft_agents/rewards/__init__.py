"""Where rewards come from, when the application did not give them."""

from __future__ import annotations

from marft_agents.rewards.function import RewardFunction, load_function, load_reward_function
from marft_agents.rewards.scoring import ScoreTally, score_episodes

__all__ = [
    "RewardFunction",
    "ScoreTally",
    "load_function",
    "load_reward_function",
    "score_episodes",
]
