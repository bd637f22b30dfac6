"""What top-level episodes take where the app says nothing about them.

Invariant: defaults fill gaps and never overrule: the app's task and the app's metadata keys win.
They are a contextvar, so tasks and threads that inherit the context are inside and others are not;
an episode inside another one has none of its own.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from marft_agents.recording.clean import jsonable
from marft_agents.recording.core import Core
from marft_agents.schema import JsonDict


@dataclass(eq=False)
class _Defaults:
    core: Core
    task: Any
    metadata: JsonDict
    episode_ids: list[str] = field(default_factory=list[str])


_DEFAULTS: ContextVar[tuple[_Defaults, ...]] = ContextVar("marft_defaults", default=())


@contextmanager
def episode_defaults(
    core: Core, task: Any, metadata: Mapping[str, Any] | None
) -> Generator[list[str]]:
    """Defaults of ``core`` for this context; yields the ids of the episodes that took them."""
    entry = _Defaults(core, jsonable(task), jsonable(dict(metadata or {})))
    token = _DEFAULTS.set((*_DEFAULTS.get(), entry))
    try:
        yield entry.episode_ids
    finally:
        with suppress(ValueError):  # left in another context
            _DEFAULTS.reset(token)


def filled(core: Core, episode_id: str, task: Any, metadata: JsonDict) -> tuple[Any, JsonDict]:
    """Task and metadata of an episode that starts now; inner defaults win over outer ones."""
    for entry in reversed(_DEFAULTS.get()):
        if entry.core is core:
            task = entry.task if task is None else task
            metadata = {**entry.metadata, **metadata}
            entry.episode_ids.append(episode_id)
    return task, metadata
