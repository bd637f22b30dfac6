"""What a run's methods are called, in output, manifests and model cards."""

from __future__ import annotations

from collections.abc import Iterator

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
    gradient = online or (logs and config.offline == "ppo")
    if gradient:
        yield f"updates: {_updates(config)}"
    elif config.beta:
        yield f"note: beta {config.beta:g} has no effect on {OBJECTIVES[config.offline]}"


def _updates(config: MarftConfig) -> str:
    if config.schedule == "sequential" and config.estimator == "ippo":
        return _SCHEDULES["simultaneous"]
    if config.schedule != "sequential":
        return _SCHEDULES[config.schedule]
    order = "in a random order" if config.order == "random" else "those first whom others read"
    bound = f"compounded by {1 / config.compound_clip:g} to {config.compound_clip:g}"
    return f"{_SCHEDULES['sequential']} ({order}), {bound}"
