"""What ends an update before it does harm.

Invariant: a guard either does nothing, ends an agent's passes, or gives back the last good state;
it never lets a run go on from a state that it called bad. What it saw is said in numbers. After
``max_guard_trips`` restores the run stops, and the versions published before stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from marft_agents.errors import TrainingError
from marft_agents.training.config import MarftConfig


class Tripped(Exception):
    """An update went wrong; its state is to be given back."""


@dataclass
class Guards:
    """Limits of a run and how often they were met."""

    config: MarftConfig
    trips: int = 0
    clip_scale: float = 1.0
    """Halved at every trip."""
    first_entropy: dict[str, float] = field(default_factory=dict[str, float])
    """Per adapter, of its first update."""
    first_reward: float | None = None

    def see_rewards(self, mean: float) -> None:
        """Note what the episodes of an update earned."""
        self.first_reward = mean if self.first_reward is None else self.first_reward

    def ends_passes(self, means: Mapping[str, float]) -> str | None:
        """Why an agent's passes end here: it moved far enough from where this update began."""
        kl = means.get("kl", 0.0)
        if kl > self.config.target_kl:
            return f"KL to the start of the update {kl:.3f} > target_kl {self.config.target_kl:g}"
        return None

    def check_entropy(self, adapter: str, entropy: float | None, reward: float) -> None:
        """A policy that is sure of itself and earns less than it did at first has collapsed.

        Raises:
            Tripped: when it has.
        """
        if entropy is None:
            return
        first = self.first_entropy.setdefault(adapter, entropy)
        floor = self.config.entropy_floor * first
        if entropy < floor and self.first_reward is not None and reward < self.first_reward:
            share = self.config.entropy_floor
            raise Tripped(
                f"{adapter}: entropy {entropy:.4f} is below {floor:.4f} ({share:g} of the first"
                f" update's) and the mean reward {reward:.3f} below the first"
                f" {self.first_reward:.3f}: the policy has collapsed"
            )

    def check_values(self, largest: float, returns: float) -> None:
        """Values far outside of what was ever earned.

        Args:
            largest: largest |V| of the update's episodes.
            returns: most that rewards of one of them add up to, signs aside.

        Raises:
            Tripped: when they are, or are not finite.
        """
        limit = self.config.value_limit * max(returns, 1e-6)
        if not math.isfinite(largest) or largest > limit:
            raise Tripped(
                f"the critic's largest value {largest:g} is beyond {limit:g}"
                f" ({self.config.value_limit:g} times the largest return): it has exploded"
            )

    def trip(self, why: str) -> str:
        """Count a restore; returns what to say.

        Raises:
            TrainingError: after too many of them.
        """
        self.trips += 1
        self.clip_scale /= 2
        if self.trips > self.config.max_guard_trips:
            raise TrainingError(
                f"{why}. The last good state was restored {self.trips - 1} times before (limit"
                f" {self.config.max_guard_trips}), so the run stops; what was published stays"
            )
        return (
            f"WARNING: {why}. The state before this update is restored and the clip range halved"
            f" (restore {self.trips} of at most {self.config.max_guard_trips})"
        )

    def state(self) -> dict[str, Any]:
        return {
            "trips": self.trips,
            "clip_scale": self.clip_scale,
            "first_entropy": self.first_entropy,
            "first_reward": self.first_reward,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name in self.state():
            setattr(self, name, state[name])
