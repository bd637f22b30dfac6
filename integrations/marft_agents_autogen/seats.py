"""Who sits where: one ``Seat`` per recorded agent or team, one ``Binding`` per wrapped root.

Invariant: the episode of a call is that of the run it serves, found through the binding: a runtime
that the user started elsewhere runs handlers in a foreign context, so the context alone decides
only where no run of this tree is going on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autogen_agentchat.messages import BaseChatMessage

from marft_agents.recording import (
    Call,
    EpisodeHandle,
    LiveEpisode,
    MarftRecorder,
    Patches,
    TurnKind,
)

SEAT = "_marft_seat"


@dataclass(eq=False)
class Binding:
    """One ``wrap``: its options, the runs going on, and the way back."""

    recorder: MarftRecorder
    end: str = "auto"
    on_end: Callable[[EpisodeHandle, Any], object] | None = None
    running: list[LiveEpisode] = field(default_factory=list[LiveEpisode])
    patches: Patches = field(default_factory=Patches)

    def release(self) -> None:
        self.patches.undo()


@dataclass(eq=False)
class Seat:
    """What the recorder knows of one agent or team."""

    recorder: MarftRecorder
    name: str
    bindings: list[Binding] = field(default_factory=list[Binding])
    teams: list[Seat] = field(default_factory=list["Seat"])
    """Teams that this one is a participant of."""
    own_tools: frozenset[str] = frozenset()
    """Names of tools that are no environment: agents behind tools, handoffs."""
    is_root: bool = False
    pending_selection: str | None = None
    """For a team: the selection turn whose speaker has not begun."""
    selected_by: str | None = None
    delivered: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(framework message id, text) handed to this agent in ``episode_id``."""
    turns: list[str] = field(default_factory=list[str])
    """Turns since the agent last began to speak."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of tool calls under way, by call id."""
    episode_id: str | None = None
    handed: list[str] = field(default_factory=list[str])
    """Ids of the messages that the agent was handed last."""

    def episode(self) -> LiveEpisode | None:
        """The episode that something done here now belongs to."""
        here = self.recorder.current()
        running = [e for b in self.bindings for e in b.running if not e.closed]
        if here is not None and (here in running or not running):
            return here
        return running[-1] if running else None

    def begin_speaking(self, messages: Sequence[BaseChatMessage]) -> None:
        """The agent is handed ``messages`` and will now act.

        One speech may come through two doors (``on_messages`` calls ``on_messages_stream`` or the
        other way round): the second one, with the same messages and no turn yet, is no new one.
        """
        episode = self.episode()
        if episode is None:
            return
        handed = [m.id for m in messages]
        selection = self._take_selection()
        again = selection is None and handed == self.handed and not self.turns
        if again and self.episode_id == episode.id:
            return
        if self.episode_id != episode.id:
            self.episode_id = episode.id
            self.delivered.clear()
        self.handed, self.turns, self.selected_by = handed, [], selection
        self.delivered += [(m.id, m.to_model_text()) for m in messages]

    def _take_selection(self) -> str | None:
        """The selection that made this agent, or the team around it, the speaker."""
        for team in self.teams:
            found, team.pending_selection = team.pending_selection, None
            found = found or team._take_selection()
            if found:
                return found
        return None

    def begin_call(self, kind: TurnKind) -> Call | None:
        """A model call starts; ``None`` outside any episode."""
        episode = self.episode()
        if episode is None:
            self.recorder.core.safety.warn_once(
                ("no run", self.name),
                f"marft-agents: agent {self.name!r} called its model outside a recorded run and"
                " the call is not recorded; run the wrapped team, or use `with"
                " recorder.episode():`",
            )
            return None
        delivered: list[tuple[str, str]] = []
        if self.episode_id == episode.id:
            known = episode.messages
            delivered = [(text, known[i]) for i, text in self.delivered if i in known]
        selected_by = self.selected_by if kind == "act" else None
        return Call(episode, self.name, kind, selected_by=selected_by, delivered=delivered)

    def end_call(self, call: Call) -> None:
        """A call has become turns."""
        self.turns += call.turn_ids
        if call.kind == "select" and call.turn_ids:
            self.pending_selection = call.turn_ids[-1]


def seat_of(obj: Any) -> Seat | None:
    """The seat of a walked agent or team."""
    seat = getattr(obj, SEAT, None)
    return seat if isinstance(seat, Seat) else None


async def close_stream(stream: Any) -> None:
    """Close an async generator; other iterators of an agent's own making have no ``aclose``."""
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()
