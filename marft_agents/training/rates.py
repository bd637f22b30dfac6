"""Sizes of steps and passes, and the step size at each of them.

The stage on logs is iteration 0; rounds online count from 1. The schedule of the step size runs
over the steps offline and over the rounds online.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import get_scheduler

from marft_agents.errors import ConfigError
from marft_agents.training.batch import Batch
from marft_agents.training.config import MarftConfig


def block_size(config: MarftConfig) -> int:
    """Rows of one optimizer step, all processes together."""
    return (
        config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size
    )


def epochs_of(config: MarftConfig, batch: Batch) -> float:
    """Passes over an adapter's rows in one update."""
    return float(config.update_epochs) if batch.iteration > 0 else config.num_train_epochs


def check_rates(config: MarftConfig) -> None:
    """Refuse a schedule that no step could follow, before anything is loaded.

    Raises:
        ConfigError: as ``rate_factor`` does.
    """
    for rate in (config.learning_rate, config.online_learning_rate):
        rate_factor(config, 0, 1000, rate)


def rate_factor(config: MarftConfig, at: int, total: int, rate: float) -> float:
    """Factor of the step size ``rate`` at a step (or round) of ``total``, by ``lr_scheduler_type``.

    Raises:
        ConfigError: for a schedule that is no function of the step.
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
    kind, extra = config.lr_scheduler_type, cast("Any", config.lr_scheduler_kwargs or None)
    try:
        schedule: Any = get_scheduler(
            kind,
            optimizer,
            num_warmup_steps=config.get_warmup_steps(total),
            num_training_steps=total,
            scheduler_specific_kwargs=extra,
        )
        return float(schedule.lr_lambdas[0](at))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"lr_scheduler_type {getattr(kind, 'value', kind)} is refused:"
            f" {str(error).splitlines()[0]}"
        ) from error
