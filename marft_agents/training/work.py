"""An update under way, and what it did."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from marft_agents.training.advantages import Credits
from marft_agents.training.batch import Batch
from marft_agents.training.effect import Effect, EffectMeter


@dataclass
class UpdateReport:
    """What one update did."""

    iteration: int
    objective: str
    rows: dict[str, int] = field(default_factory=dict[str, int])
    """Trained turns per adapter."""
    seen: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """Per adapter: episodes, turns and sampled tokens that it had, trained or skipped."""
    left_out: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """ppo: per adapter, turns that allow no ratio, by reason."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """``<adapter>/<name>``, means over the update's steps."""
    effects: dict[str, Effect] = field(default_factory=dict[str, Effect])
    stopped: dict[str, str] = field(default_factory=dict[str, str])
    """Adapter to why its passes ended early."""
    restored: str | None = None
    """Why a guard gave back the state before the update; nothing was learned then."""
    explained_variance: float | None = None


@dataclass
class Work:
    """An update under way: its batch and how far it has come."""

    batch: Batch
    credits: Credits | None
    report: UpdateReport
    mean_reward: float
    position: int = 0
    """Of the adapter being updated, in the batch's order."""
    step: int = 0
    """Steps taken with that adapter."""
    meters: dict[str, EffectMeter] = field(default_factory=dict[str, EffectMeter])
    sums: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    good: dict[str, tuple[Tensor, ...]] = field(default_factory=dict[str, tuple[Tensor, ...]])

    @property
    def adapter(self) -> str:
        return self.batch.adapters[self.position]
