"""Classic AutoGen (``import autogen``): chats, group chats and patterns, recorded in place.

Invariant: the app keeps its own objects; agents are changed as instances, the few methods that only
a class can lend are inert for everything that was not wrapped, and ``close`` takes all of it off.
AutoGen is imported only when one of its objects is to be wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from marft_agents.recording import MissingExtraError
from marft_agents_classic.packages import runtime

if TYPE_CHECKING:
    from marft_agents.recording import MarftRecorder

ROOT = "autogen"


def matches(obj: Any) -> bool:
    """Whether ``obj``, or each of the objects in a list, is of classic AutoGen."""
    items = list(_items(obj))
    return bool(items) and all(
        any(base.__module__.split(".")[0] == ROOT for base in type(item).__mro__) for item in items
    )


def _items(obj: Any) -> Iterator[Any]:
    yield from cast("list[Any]", obj) if isinstance(obj, list | tuple) else (obj,)


def wrap(obj: Any, recorder: MarftRecorder, **options: Any) -> Any:
    """Record an agent, a group chat, a pattern or a list of agents; returns ``obj``.

    Each outermost chat that one of these agents starts or is asked in is an episode.

    Options:
        end: ``"auto"``: a chat that ran into ``max_turns``, ``max_round`` or a limit of automatic
            replies is ``truncated``; ``"terminated"`` says that the limit is the designed end.
        on_end: called with (``EpisodeHandle``, ``ChatResult``) when an automatic episode ends, e.g.
            to reward it.

    Raises:
        IntegrationError: another kind of object, one that another recorder still records, or a
            broken installation of AutoGen.
        MissingExtraError: AutoGen cannot be imported.
    """
    version = runtime()
    try:
        from marft_agents_classic.walk import wrap_root
    except ImportError as error:
        raise MissingExtraError("classic", needed_for="recording classic AutoGen") from error
    wrap_root(list(_items(obj)), recorder, version, **options)
    return obj


__all__ = ["matches", "runtime", "wrap"]
