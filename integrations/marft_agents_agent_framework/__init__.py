"""Microsoft Agent Framework: agents, workflows and orchestrations, recorded in place.

Invariant: only instances are changed, the app keeps its own objects, and Agent Framework is
imported only when one of its objects is to be wrapped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from marft_agents.recording import MissingExtraError

if TYPE_CHECKING:
    from marft_agents.recording import MarftRecorder

ROOT = "agent_framework"


def matches(obj: Any) -> bool:
    """Whether a class of Agent Framework is among the bases of ``obj``."""
    roots = (base.__module__.split(".")[0] for base in type(obj).__mro__)
    return any(root == ROOT or root.startswith(f"{ROOT}_") for root in roots)


def wrap(obj: Any, recorder: MarftRecorder, **options: Any) -> Any:
    """Record a workflow, an agent or a builder, with everything inside it; returns ``obj``.

    A builder records every workflow that it builds from now on.

    Options:
        end: ``"auto"``: a run that stopped at a limit of rounds, resets or supersteps is
            ``truncated``; ``"terminated"`` says that a limit is this workflow's designed end.
        on_end: called with (``EpisodeHandle``, result of the run) when an automatic episode ends,
            e.g. to reward it.

    Raises:
        IntegrationError: an object that is none of these, one that another recorder still
            records, or a version of Agent Framework that was not tried.
        MissingExtraError: Agent Framework cannot be imported.
    """
    try:
        from marft_agents_agent_framework.roots import wrap_root
    except ImportError as error:
        raise MissingExtraError(
            "agent-framework", needed_for="recording Microsoft Agent Framework"
        ) from error
    wrap_root(obj, recorder, **options)
    return obj


__all__ = ["matches", "wrap"]
