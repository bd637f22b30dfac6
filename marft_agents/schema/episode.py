"""The events of one episode together, and what follows from them.

Invariant: an episode is derived from its events; a missing reward is never 0.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from marft_agents.schema.events import (
    EpisodeEnded,
    EpisodeStarted,
    HumanEvent,
    JsonDict,
    Record,
    RewardEvent,
    ToolEvent,
    Turn,
)


class Episode(Record):
    """All events of one episode, folded."""

    episode_id: str
    started: EpisodeStarted | None = None
    turns: list[Turn] = Field(default_factory=list[Turn])
    tools: list[ToolEvent] = Field(default_factory=list[ToolEvent])
    humans: list[HumanEvent] = Field(default_factory=list[HumanEvent])
    rewards: list[RewardEvent] = Field(default_factory=list[RewardEvent])
    ended: EpisodeEnded | None = None
    sources: list[str] = Field(default_factory=list[str])
    """Files that the events came from."""

    @property
    def task(self) -> Any:
        return self.started.task if self.started else None

    @property
    def metadata(self) -> JsonDict:
        return self.started.metadata if self.started else {}

    def _latest(self) -> list[RewardEvent]:
        latest: dict[tuple[str | None, str | None, str], RewardEvent] = {}
        for reward in sorted(self.rewards, key=lambda r: r.time):
            latest[reward.agent, reward.turn_id, reward.source] = reward
        return [r for r in latest.values() if r.value is not None]

    @property
    def team_reward(self) -> float | None:
        """Sum of the team's rewards that belong to no turn; ``None`` when nobody scored it."""
        values = [r.value for r in self._latest() if r.agent is None and r.turn_id is None]
        return math.fsum(v for v in values if v is not None) if values else None

    @property
    def agent_rewards(self) -> dict[str, float]:
        """Extra reward per agent, for the agents that were given one."""
        out: dict[str, float] = {}
        for r in self._latest():
            if r.agent is not None and r.turn_id is None and r.value is not None:
                out[r.agent] = out.get(r.agent, 0.0) + r.value
        return out

    @property
    def turn_rewards(self) -> dict[str, float]:
        """Reward per turn id, for the turns that were given one."""
        out: dict[str, float] = {}
        for r in self._latest():
            if r.turn_id is not None and r.value is not None:
                out[r.turn_id] = out.get(r.turn_id, 0.0) + r.value
        return out

    @property
    def refused_rewards(self) -> list[RewardEvent]:
        return [r for r in self.rewards if r.refused is not None]

    @property
    def scored(self) -> bool:
        """Whether any finite reward was given. A missing reward is never 0."""
        return bool(self._latest())

    @property
    def untrainable_reason(self) -> str | None:
        """Why the whole episode is left out of training; ``None`` when it can be used.

        An episode that failed and was scored all the same counts as over: its earlier turns are
        what led there.
        """
        if not self.turns:
            return "no model call was recorded"
        if self.refused_rewards:
            return f"refused reward ({self.refused_rewards[-1].refused})"
        if not self.scored and self.ended is not None and self.ended.reason == "failed":
            return f"no reward, the episode failed ({self.ended.detail or 'no detail'})"
        if not self.scored:
            return "no reward"
        if self.ended is None:
            return "the episode never ended (still running, or the app was killed)"
        return None
