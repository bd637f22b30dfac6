"""OpenAI Agents SDK: agents, handoffs, agents as tools and guardrail agents, recorded in place.

Invariant: only instances are changed, the app keeps its own objects, and the SDK is imported only
when one of its objects is to be wrapped. Its module is called ``agents``, as many a user's own is,
so the name alone never decides.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marft_agents.recording import KnownDistribution, MissingExtraError, installed_runtime

if TYPE_CHECKING:
    from marft_agents.recording import MarftRecorder

ROOT = "agents"
DISTRIBUTION = KnownDistribution("openai-agents", since="0.2.11", below="1")


def matches(obj: Any) -> bool:
    """Whether a class of the OpenAI Agents SDK is among the bases of ``obj``."""
    named = any(base.__module__.split(".")[0] == ROOT for base in type(obj).__mro__)
    return named and _is_the_sdk()


def _is_the_sdk() -> bool:
    """Whether the imported ``agents`` came with the distribution ``openai-agents``."""
    try:
        distribution = metadata.distribution(DISTRIBUTION.name)
    except metadata.PackageNotFoundError:
        return False
    found = getattr(sys.modules.get(ROOT), "__file__", None)
    if found is None:
        return False
    shipped = Path(str(distribution.locate_file(f"{ROOT}/__init__.py")))
    if shipped.exists():
        return shipped.resolve() == Path(found).resolve()
    # Installed as a link to its sources: the package says its distribution's version.
    said = getattr(sys.modules.get(f"{ROOT}.version"), "__version__", None)
    return said is not None and said == distribution.version


def wrap(obj: Any, recorder: MarftRecorder, **options: Any) -> Any:
    """Record an agent and every agent that it can hand off to; returns ``obj``.

    Options:
        end: ``"auto"`` says that a run which hit ``max_turns`` is ``truncated``; ``"terminated"``
            says that the limit is this app's designed end.
        on_end: called with (``EpisodeHandle``, result) when an automatic episode ends, e.g. to
            reward it. The result is the ``RunResult`` or ``RunResultStreaming``; of a run that
            ended by ``max_turns`` or a guardrail it is that exception.

    Raises:
        IntegrationError: an object of the SDK that is no agent, one that another recorder still
            records, or a version of the SDK that is not supported.
        MissingExtraError: the SDK cannot be imported.
    """
    runtime = installed_runtime("OpenAI Agents SDK", [DISTRIBUTION])
    try:
        from marft_agents_openai_agents.walk import wrap_root
    except ImportError as error:
        raise MissingExtraError(
            "openai-agents", needed_for="recording the OpenAI Agents SDK"
        ) from error
    wrap_root(obj, recorder, runtime, **options)
    return obj


__all__ = ["matches", "wrap"]
