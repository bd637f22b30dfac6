"""From recorded episodes to better adapters.

Invariant: importing this package loads no training library; the names below load theirs when they
are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from marft_agents.errors import MissingExtraError

if TYPE_CHECKING:
    from marft_agents.training.config import MarftConfig
    from marft_agents.training.online import OnlineSource
    from marft_agents.training.plan import ServerLimits
    from marft_agents.training.results import FinetuneResult
    from marft_agents.training.run import finetune
    from marft_agents.training.stages import Online
    from marft_agents.training.tasks import Task, read_tasks
    from marft_agents.training.trainer import MarftTrainer

__all__ = [
    "FinetuneResult",
    "MarftConfig",
    "MarftTrainer",
    "Online",
    "OnlineSource",
    "ServerLimits",
    "Task",
    "finetune",
    "read_tasks",
]

_HOMES = {
    "FinetuneResult": "results",
    "MarftConfig": "config",
    "MarftTrainer": "trainer",
    "Online": "stages",
    "OnlineSource": "online",
    "ServerLimits": "plan",
    "Task": "tasks",
    "finetune": "run",
    "read_tasks": "tasks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("marft_agents"):
            raise
        raise MissingExtraError("train", needed_for=f"{name} ({error.name})") from error
    return getattr(module, name)
