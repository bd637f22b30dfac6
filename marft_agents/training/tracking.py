"""Trackers (``report_to``): trackio, tensorboard, wandb and whatever else transformers knows.

Invariant: a tracker that cannot be used is refused before a model is loaded. Nothing is sent
anywhere unless a tracker was asked for.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.integrations import integration_utils

from marft_agents.errors import ConfigError
from marft_agents.training.config import MarftConfig

FOLDER = ".tracking"
"""In the registry's folder: files of trackers that write to the disk."""
_PACKAGES = {"azure_ml": "azureml-mlflow", "clearml": "clearml", "comet_ml": "comet-ml"}
"""Packages that are not called as their tracker."""


def trackers(config: MarftConfig) -> list[str]:
    """Names in ``report_to``."""
    names: Any = config.report_to
    return [names] if isinstance(names, str) else list(names or [])


def check_trackers(config: MarftConfig) -> None:
    """Try to make every tracker.

    Raises:
        ConfigError: it is unknown, or its package is not installed.
    """
    known: dict[str, Any] = integration_utils.INTEGRATION_TO_CALLBACK
    for name in trackers(config):
        if name not in known:
            raise ConfigError(
                f"report_to: no tracker is called {name!r}; use trackio, tensorboard or wandb"
                f" (known too: {', '.join(sorted({*known} - {'trackio', 'tensorboard', 'wandb'}))})"
            )
        try:
            known[name]()
        except (RuntimeError, ImportError, AttributeError) as error:
            raise ConfigError(
                f"report_to: {name} is not installed: pip install {_PACKAGES.get(name, name)}"
            ) from error


def tracked(config: MarftConfig, root: Path) -> MarftConfig:
    """The configuration of a run whose trackers write below ``root``.

    Also names the project to wandb, which reads it from the environment, unless the user did.
    """
    if not trackers(config):
        return config
    made = copy.copy(config)
    made.output_dir = str(root / FOLDER)
    os.environ.setdefault("WANDB_PROJECT", config.project)
    return made


def tracking_lines(config: MarftConfig) -> Iterator[str]:
    """Where to look."""
    for name in trackers(config):
        if name == "tensorboard":
            where = os.environ.get("TENSORBOARD_LOGGING_DIR", f"{config.output_dir}/runs")
            yield f"tracking: tensorboard --logdir {where}"
        elif name == "trackio":
            yield f"tracking: trackio show --project {config.project}"
        else:
            yield f"tracking: {name}, project {os.environ.get('WANDB_PROJECT', config.project)}"
