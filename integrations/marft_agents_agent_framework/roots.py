"""``wrap``: what is found in the object is recorded, and its runs are episodes.

Invariant: a refused object is left as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, cast

from agent_framework import Workflow

from marft_agents.recording import (
    EpisodeHandle,
    IntegrationError,
    KnownDistribution,
    MarftRecorder,
    installed_runtime,
)
from marft_agents_agent_framework.parts import class_names, is_agent
from marft_agents_agent_framework.runs import patch_run
from marft_agents_agent_framework.seats import Binding
from marft_agents_agent_framework.walk import Role, Walk

KNOWN = (KnownDistribution("agent-framework-core", "1.9", "2"),)


def wrap_root(
    obj: Any,
    recorder: MarftRecorder,
    *,
    end: Literal["auto", "terminated"] = "auto",
    on_end: Callable[[EpisodeHandle, Any], object] | None = None,
) -> None:
    """Record ``obj``; of a builder, what it builds."""
    binding = Binding(recorder, installed_runtime("agent-framework", KNOWN), end, on_end)
    functional = "FunctionalWorkflow" in class_names(obj)
    runs = isinstance(obj, Workflow) or is_agent(obj) or functional
    if not runs and not callable(getattr(obj, "build", None)):
        kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
        raise IntegrationError(
            f"cannot record an object of type {kind}; of Agent Framework, pass a workflow, an agent"
            " or a builder (GroupChatBuilder, SequentialBuilder, HandoffBuilder, …)"
        )
    before = getattr(getattr(obj, "run" if runs else "build"), "marft_binding", None)
    if isinstance(before, Binding) and before.recorder is recorder:
        return
    try:
        _patch_runs(obj, binding) if runs else _patch_build(obj, binding)
    except Exception:
        binding.release()
        raise
    recorder.keep(binding)


def _patch_runs(obj: Any, binding: Binding) -> None:
    def walk(root: Any) -> None:
        Walk(binding).visit(root, Role(str(getattr(root, "name", None) or "agent")))

    walk(obj)
    patch_run(obj, binding, walk)


def _patch_build(builder: Any, binding: Binding) -> None:
    original = builder.build

    def build(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        recorder = binding.recorder
        if not recorder.core.closed:
            wrap_root(made, recorder, end=cast("Any", binding.end), on_end=binding.on_end)
        return made

    patched: Any = functools.wraps(original)(build)
    patched.marft_binding = binding
    binding.patches.set(builder, "build", patched)
