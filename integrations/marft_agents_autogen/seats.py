"""Who sits where: one ``Seat`` per recorded agent or team, one ``Binding`` per wrapped root.

Invariant: a seat says what is true of an agent or team at any time; what is true of one run or one
speech is in a ``Frame``, since one agent may be in several at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from marft_agents.recording import EpisodeHandle, LiveEpisode, MarftRecorder, Patches

if TYPE_CHECKING:
    from marft_agents_autogen.frames import Frame

SEAT = "_marft_seat"
Role = Literal["agent", "assistant", "society", "filter", "selector", "swarm", "team"]
Delivered = list[tuple[str, str]]


@dataclass(eq=False)
class Binding:
    """One ``wrap``: its options and the way back."""

    recorder: MarftRecorder
    runtime: str
    end: str = "auto"
    on_end: Callable[[EpisodeHandle, Any], object] | None = None
    patches: Patches = field(default_factory=Patches)
    undo: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    """What ``patches`` cannot take back: places in lists and dicts of the app."""

    def release(self) -> None:
        self.patches.undo()
        while self.undo:
            self.undo.pop()()


@dataclass(eq=False)
class Seat:
    """What the recorder knows of one agent or team."""

    recorder: MarftRecorder
    name: str
    """Whose turns the model calls made here are; for a team, its manager's."""
    role: Role
    label: str
    """The name under which others know it."""
    team_id: str | None = None
    root: Binding | None = None
    """Set when its runs are episodes of their own."""
    runners: dict[str, Seat] = field(default_factory=dict[str, "Seat"])
    """Agents and teams behind tools, by the tool's name."""
    handoffs: frozenset[str] = frozenset()
    own_sdk: bool = False
    """Whether the agent holds an openai SDK object without a model client around it."""
    captured: object = None
    """What ``capture_sdk`` found last."""
    open: list[Frame] = field(default_factory=list["Frame"])
    """What is going on here now."""
    delivered: weakref.WeakKeyDictionary[LiveEpisode, Delivered] = field(
        default_factory=weakref.WeakKeyDictionary[LiveEpisode, Delivered]
    )
    """(message id, text) of what the agent was handed, per episode."""

    @property
    def is_team(self) -> bool:
        return self.role in ("selector", "swarm", "team")

    @property
    def closed(self) -> bool:
        return self.recorder.core.closed


def seat_of(obj: Any) -> Seat | None:
    """The seat of a walked agent or team."""
    seat = getattr(obj, SEAT, None)
    return seat if isinstance(seat, Seat) else None


async def close_stream(stream: Any) -> None:
    """Close an async generator; other iterators of an agent's own making have no ``aclose``."""
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()
