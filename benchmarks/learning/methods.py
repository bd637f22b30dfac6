"""What is compared, and how much of everything each method gets.

Invariant: a method is settings of the product, nothing else. All of them see the same tasks in the
same order, play as many episodes and take as many optimizer steps per turn; what differs is whose
turns share an adapter, where advantages come from and who is updated when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marft_agents.training import MarftConfig

SHARED = "everyone"
"""Adapter of the single-agent method, which plays every role."""


@dataclass(frozen=True)
class Method:
    """A way to learn: its settings beside the common ones."""

    name: str
    label: str
    settings: Mapping[str, Any]
    shared: bool = False
    learning_rate: float = 1e-3
    """The best of those tried on other seeds than the reported ones."""

    def adapters(self, names: Sequence[str]) -> dict[str, str]:
        """Adapter per agent."""
        return {name: SHARED if self.shared else name for name in names}


_TOGETHER = {"level": "action", "schedule": "simultaneous"}
_IN_TURN = {"estimator": "marft", "schedule": "sequential"}
METHODS = (
    Method("single", "single-agent PPO", {**_TOGETHER, "estimator": "single"}, shared=True),
    Method("ippo", "IPPO", {**_TOGETHER, "estimator": "ippo"}),
    Method("group", "group, no critic", {**_TOGETHER, "estimator": "group"}),
    Method("marft-a-95", "MARFT-A, λ 0.95", {**_IN_TURN, "level": "action", "lam": 0.95}),
    Method("marft-a", "MARFT-A", {**_IN_TURN, "level": "action"}),
    Method("marft-t", "MARFT-T", {**_IN_TURN, "level": "token"}),
)
BY_NAME = {method.name: method for method in METHODS}


@dataclass(frozen=True)
class Plan:
    """How long a run is; the same for every method.

    ``logged`` episodes of the untrained team are learned from first (offline), if any; they count
    as episodes like the others.
    """

    iterations: int = 14
    episodes: int = 128
    """Per iteration."""
    group_size: int = 4
    """Episodes of one task in an iteration; the estimator ``group`` compares them."""
    block: int = 32
    """Turns of one optimizer step."""
    epochs: int = 2
    """Passes over an iteration's turns, and over the logged ones."""
    held_out: int = 200
    """Tasks played after each iteration."""
    final_tasks: int = 1000
    """Held-out tasks played before the first and after the last iteration."""
    logged: int = 0

    @property
    def total(self) -> int:
        """Episodes of a run."""
        return self.logged + self.iterations * self.episodes


QUICK = Plan(iterations=2, episodes=16, block=8, held_out=20, final_tasks=40)
_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COMMON: dict[str, Any] = {
    "lam": 0.5,
    "lora_target_modules": _MODULES,
    "pack_tokens": 1536,
    "critic_epochs": 20,
    "critic_update_epochs": 10,
    "critic_folds": 3,
    "effect_turns": 1,
    "logging_steps": 1000,
    "report_to": "none",
    "use_cpu": True,
    # every method takes every step: nothing ends passes early, and nothing is taken back
    "target_kl": 1e6,
    "entropy_floor": 0.0,
    "value_limit": 1e6,
}
"""Settings of every method, where it has none of its own."""


def make_config(method: Method, plan: Plan, seed: int, rate: float, scratch: Path) -> MarftConfig:
    """The product's configuration of one run."""
    settings: dict[str, Any] = {
        **COMMON,
        "seed": seed,
        "output_dir": str(scratch),
        "per_device_train_batch_size": plan.block,
        "num_train_epochs": float(plan.epochs),
        "update_epochs": plan.epochs,
        "learning_rate": rate,
        "online_learning_rate": rate,
        "group_size": plan.group_size,
        **method.settings,
    }
    return MarftConfig(**settings)
