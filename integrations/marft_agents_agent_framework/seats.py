"""Who sits where: one ``Seat`` per client of an agent, one ``Speech`` per reply it gives.

Invariant: the episode of a call is the current one of the context, which Agent Framework carries
through its tasks; the agent of a call is the seat whose client was asked, wherever a copy of the
agent took that client (a handoff workflow runs copies of the app's agents).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from marft_agents.recording import (
    Call,
    EpisodeHandle,
    LiveEpisode,
    MarftRecorder,
    Patches,
    TurnKind,
)
from marft_agents.recording.safety import Safety
from marft_agents_agent_framework.following import settle

SPEECH: ContextVar[Speech | None] = ContextVar("marft_speech", default=None)


@dataclass(eq=False)
class Binding:
    """One ``wrap``: its options, and the way back."""

    recorder: MarftRecorder
    runtime: str
    end: str = "auto"
    on_end: Callable[[EpisodeHandle, Any], object] | None = None
    patches: Patches = field(default_factory=Patches)

    def release(self) -> None:
        settle()
        self.patches.undo()


@dataclass(frozen=True)
class Place:
    """A participant of a workflow, by the id of its executor."""

    group: Group
    executor: str


@dataclass(eq=False)
class Group:
    """A workflow, as far as somebody in it chooses who is next."""

    outer: list[Place] = field(default_factory=list[Place])
    """Where this workflow is a participant itself."""
    _chosen: weakref.WeakKeyDictionary[LiveEpisode, dict[str | None, str]] = field(
        default_factory=weakref.WeakKeyDictionary[LiveEpisode, "dict[str | None, str]"]
    )

    def choose(self, episode: LiveEpisode, turn_id: str, executor: str | None = None) -> None:
        """``turn_id`` decided that ``executor`` (``None``: whoever speaks next) is next."""
        self._chosen.setdefault(episode, {})[executor] = turn_id

    def take(self, episode: LiveEpisode, executor: str) -> str | None:
        """The turn that chose this participant, once."""
        chosen = self._chosen.get(episode, {})
        for key in (executor, None):
            if key in chosen:
                return chosen.pop(key)
        return take(self.outer, episode)


def take(places: Sequence[Place], episode: LiveEpisode) -> str | None:
    """The turn that chose a speaker with these places, once."""
    for place in places:
        found = place.group.take(episode, place.executor)
        if found:
            return found
    return None


@dataclass(eq=False)
class Seat:
    """What the recorder knows of one agent at one client."""

    recorder: MarftRecorder
    name: str
    kind: TurnKind = "act"
    places: list[Place] = field(default_factory=list[Place])
    leads: list[Group] = field(default_factory=list[Group])
    """Workflows whose next speaker this agent chooses."""
    agent_tools: set[str] = field(default_factory=set[str])
    """Names of tools that are agents or workflows, no environment."""
    handoffs: dict[str, str] = field(default_factory=dict[str, str])
    """Tool that hands off → executor that it hands off to."""
    met: weakref.WeakSet[LiveEpisode] = field(default_factory=weakref.WeakSet[LiveEpisode])
    """Episodes whose history was looked at."""

    def begin_speech(self) -> Speech | None:
        """The agent is asked for a reply; ``None`` where it is not recorded."""
        if self.recorder.core.closed:
            return None
        episode = self.recorder.current()
        if episode is None:
            self.recorder.core.safety.warn_once(
                ("no run", self.name),
                f"marft-agents: agent {self.name!r} called its model outside a recorded run and"
                " the call is not recorded; run what was wrapped (wrap the workflow, not only its"
                " agents), or use `with recorder.episode():`",
            )
            return None
        outer = SPEECH.get()
        if outer is not None and outer.episode is not episode:
            outer = None
        return Speech(self, episode, outer)


class Speech:
    """One reply of an agent: the model calls and tool executions that lead to it."""

    def __init__(self, seat: Seat, episode: LiveEpisode, outer: Speech | None) -> None:
        self.seat = seat
        self.episode = episode
        self.turns: list[str] = []
        self.safety: Safety = seat.recorder.core.safety
        self.name = seat.name
        self.parent: tuple[str | None, str | None] = (None, None)
        self.selected_by = take(seat.places, episode) if seat.kind == "act" else None
        if outer is not None and seat.kind == "summary":  # of the one who needs it, for its own use
            self.name, self.parent = outer.name, outer.parent
        elif outer is not None:
            self.parent = (outer.name, outer.turns[-1] if outer.turns else None)
        self._open: list[Call] = []

    @contextmanager
    def entered(self) -> Generator[None]:
        token = SPEECH.set(self)
        try:
            yield
        finally:
            with suppress(ValueError):  # closed from another context
                SPEECH.reset(token)

    def begin_call(self) -> Call:
        call = Call(
            self.episode,
            self.name,
            self.seat.kind,
            selected_by=self.selected_by,
            parent_agent=self.parent[0],
            parent_turn=self.parent[1],
        )
        self._open.append(call)
        self.episode.open_calls.add(call)
        return call

    def end_call(self, call: Call) -> None:
        """A call has become turns."""
        if call not in self._open:
            return
        self._open.remove(call)
        self.turns += call.turn_ids
        if self.seat.kind in ("select", "orchestrate") and call.turn_ids:
            for group in self.seat.leads:
                group.choose(self.episode, call.turn_ids[-1])

    def close(self, error: BaseException | None = None) -> None:
        """Calls that nobody finished go with the reply that they were for."""
        for call in list(self._open):
            call.finish(error)
            self.end_call(call)
