"""What a run's methods are called, in output, manifests and model cards."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from marft_agents.training.config import MarftConfig

OBJECTIVES = {
    "awr": "advantage-weighted regression",
    "ppo": "clipped policy gradient (PPO)",
    "sft": "supervised training on the best episodes",
    "kto": "KTO",
    "dpo": "DPO",
}
_LEVELS = {"action": "MARFT-A (action level)", "token": "MARFT-T (token level)"}
_ESTIMATORS = {
    "single": "one policy for all agents",
    "ippo": "IPPO (every agent alone)",
    "group": "group-relative advantages",
}
_SCHEDULES = {
    "sequential": "one agent after another",
    "alternate": "one agent an iteration, in turn",
    "simultaneous": "all agents at once, not compounded",
}


def estimator_name(config: MarftConfig) -> str:
    """``MARFT-A (action level)``, or ``IPPO (every agent alone), token level``."""
    if config.estimator == "marft":
        return _LEVELS[config.level]
    return f"{_ESTIMATORS[config.estimator]}, {config.level} level"


def method_name(config: MarftConfig, objective: str) -> str:
    """Estimator and objective of one update."""
    return f"{estimator_name(config)}, {OBJECTIVES[objective]}"


def method_lines(config: MarftConfig, *, logs: bool, online: bool) -> Iterator[str]:
    """What is about to be done, for people; ``logs``: there is a stage on logs."""
    stages = [f"{OBJECTIVES[config.offline]} on the logs"] if logs else []
    if online:
        stages.append(
            f"{config.iterations} iterations online of {config.episodes_per_iteration} episodes by"
            f" {OBJECTIVES['ppo']}"
        )
    yield f"method: {estimator_name(config)}; {', then '.join(stages)}"
    methods = {"ppo"} if online else set[str]()
    methods |= {config.offline} if logs else set[str]()
    if "ppo" in methods:
        yield f"updates: {_updates(config)}"
    idle = idle_settings(config, methods)
    if idle:
        yield f"note: {', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect in this run"


_OF_METHOD = {
    "awr": ("awr_temperature", "awr_weight_max", "awr_skip_share"),
    "sft": ("sft_threshold",),
    "ppo": (
        "action_norm", "compound_clip", "epsilon", "epsilon_high", "entropy_coef", "beta",
        "kl_reference", "importance_sampling_mode", "importance_sampling_clip_max",
        "importance_sampling_clip_min", "target_kl", "entropy_floor", "order",
    ),
}  # fmt: skip
"""Settings that one method alone reads."""


def idle_settings(config: MarftConfig, methods: Collection[str]) -> list[str]:
    """Changed settings that nothing in a run by these methods reads."""
    idle = {n for method, names in _OF_METHOD.items() if method not in methods for n in names}
    if not {"kto", "dpo"} & set(methods):
        idle.add("preference_beta")
    if config.level == "action":
        idle |= {"gamma_w", "lam_w"}
    if config.estimator == "group" or set(methods) == {"sft"}:
        idle |= {f.name for f in dataclasses.fields(config) if f.name.startswith("critic")}
    defaults = {
        f.name: f.default
        for f in dataclasses.fields(config)
        if f.default is not dataclasses.MISSING
    }
    return sorted(n for n in idle if getattr(config, n) != defaults.get(n))


def _updates(config: MarftConfig) -> str:
    if config.schedule == "sequential" and config.estimator == "ippo":
        return _SCHEDULES["simultaneous"]
    if config.schedule != "sequential":
        return _SCHEDULES[config.schedule]
    order = "in a random order" if config.order == "random" else "those first whom others read"
    bound = f"compounded by {1 / config.compound_clip:g} to {config.compound_clip:g}"
    return f"{_SCHEDULES['sequential']} ({order}), {bound}"
