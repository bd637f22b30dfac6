"""AG2 1.x: agents, agents behind tools, subtasks and the agent network, recorded in place.

Invariant: only instances are changed, through AG2's own middleware and listeners where it has them,
and AG2 is imported only when one of its objects is to be wrapped. ``ag2`` below 1 is the classic
runtime with the import package ``autogen``; its objects are not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from marft_agents.recording import KnownDistribution, MissingExtraError, installed_runtime

if TYPE_CHECKING:
    from marft_agents.recording import MarftRecorder

ROOT = "ag2"
DISTRIBUTION = KnownDistribution("ag2", since="1", below="2")


def matches(obj: Any) -> bool:
    """Whether a class of AG2 1.x is among the bases of ``obj``."""
    return any(base.__module__.split(".")[0] == ROOT for base in type(obj).__mro__)


def wrap(obj: Any, recorder: MarftRecorder, **options: Any) -> Any:
    """Record an agent and the agents behind its tools, or a hub and its agents; returns ``obj``.

    A turn of a wrapped agent (``ask``, ``run``, ``reply.ask``) is an episode; on a hub it is a
    channel.

    Options:
        end: ``"auto"`` says that a channel which hit ``max_turns`` or its time to live is
            ``truncated``; ``"terminated"`` says that the limit is this app's designed end.
        on_end: called with (``EpisodeHandle``, result) when an automatic episode ends, e.g. to
            reward it. The result is the turn's last ``ModelResponse``, or the channel's metadata.

    Raises:
        IntegrationError: an object of AG2 that is none of these, one that another recorder still
            records, or a version of AG2 that is not supported.
        MissingExtraError: AG2 cannot be imported.
    """
    runtime = installed_runtime("AG2", [DISTRIBUTION])
    try:
        from marft_agents_ag2.walk import wrap_root
    except ImportError as error:
        raise MissingExtraError("ag2", needed_for="recording AG2") from error
    wrap_root(obj, recorder, runtime, **options)
    return obj


__all__ = ["matches", "wrap"]
