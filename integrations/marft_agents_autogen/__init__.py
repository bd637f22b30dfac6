"""AutoGen AgentChat: teams, agents, nested teams and agent tools, recorded in place.

Invariant: only instances are changed, the app keeps its own objects, and AutoGen is imported only
when one of its objects is to be wrapped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from marft_agents.recording import (
    KnownDistribution,
    MissingExtraError,
    installed_runtime,
)

if TYPE_CHECKING:
    from marft_agents.recording import MarftRecorder

ROOTS = frozenset({"autogen_agentchat", "autogen_core", "autogen_ext"})
KNOWN = (KnownDistribution("autogen-agentchat", "0.4.9", "0.8"),)


def matches(obj: Any) -> bool:
    """Whether a class of AutoGen AgentChat is among the bases of ``obj``."""
    return any(base.__module__.split(".")[0] in ROOTS for base in type(obj).__mro__)


def wrap(obj: Any, recorder: MarftRecorder, **options: Any) -> Any:
    """Record a team or an agent, with everything inside it; returns ``obj``.

    Options:
        end: ``"auto"`` maps the stop reason (a message, turn, token or time limit is
            ``truncated``); ``"terminated"`` says that a limit is this team's designed end.
        on_end: called with (``EpisodeHandle``, ``TaskResult``) when an automatic episode ends, e.g.
            to reward it.

    Raises:
        IntegrationError: an AutoGen object that is neither team nor agent, one that another
            recorder still records, or a version of AutoGen that is not supported.
        MissingExtraError: AutoGen AgentChat cannot be imported.
    """
    runtime = installed_runtime("autogen-agentchat", KNOWN)
    try:
        from marft_agents_autogen.walk import wrap_root
    except ImportError as error:
        raise MissingExtraError("agentchat", needed_for="recording AutoGen AgentChat") from error
    wrap_root(obj, recorder, runtime, **options)
    return obj


__all__ = ["matches", "wrap"]
