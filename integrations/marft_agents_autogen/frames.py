"""What is going on: runs of teams and agents, speeches of agents, one inside the other.

Invariant: the innermost frame of a piece of code is that of the message handler it runs in, or a
frame entered inside that handler. A runtime that the user started elsewhere runs handlers in a
foreign context, so the context alone decides only where AutoGen names no team that is running.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any

from autogen_core import MessageHandlerContext

from marft_agents.recording import LiveEpisode, Speaker
from marft_agents_autogen.compat import message_id, model_text
from marft_agents_autogen.seats import Seat

_PLACE: ContextVar[_Place | None] = ContextVar("marft_autogen_place", default=None)
_RUNNING: dict[str, Run] = {}
"""Runs going on, by the id of their team."""

Parent = tuple[str | None, str | None]


@dataclass(eq=False, slots=True)
class _Place:
    """A frame as contexts hold it; contexts outlive runs, in connections that are kept open."""

    frame: Frame | None
    below: _Place | None


class _Entered:
    """A frame as the current one. A class, since all that an app waits for passes a few."""

    __slots__ = ("_episode", "_frame", "_place", "_speaking", "_token")

    def __init__(self, frame: Frame, place: _Place) -> None:
        self._frame = frame
        self._place = place
        self._episode = frame.episode.where_it_is_not()
        self._speaking: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        self._token: Token[_Place | None] = _PLACE.set(self._place)
        self._episode.__enter__()
        if self._frame.seat.own_sdk:
            self._speaking = self._frame.speaker().current()
            self._speaking.__enter__()

    def __exit__(self, *_: object) -> None:
        if self._speaking is not None:
            self._speaking.__exit__(None, None, None)
            self._speaking = None
        self._episode.__exit__(None, None, None)
        try:
            _PLACE.reset(self._token)
        except ValueError:
            """A generator that nobody read to its end is closed elsewhere."""


class Frame:
    """A run or a speech; ``below`` is what it happens inside of, whoever records that."""

    def __init__(self, seat: Seat, episode: LiveEpisode, below: Frame | None) -> None:
        self.seat = seat
        self.episode = episode
        self.below = below
        self.outer = first(below, seat)
        self._place = _Place(self, _PLACE.get())
        self.closed = False
        self.last_turn: str | None = None
        """The latest turn made here or further inside."""
        self.inner: dict[Seat, str] = {}
        """The latest turn made in each thing that went on directly inside."""
        seat.open.append(self)

    @property
    def open(self) -> bool:
        return not (self.closed or self.episode.closed)

    @property
    def team_run(self) -> Run | None:
        return self.below.team_run if self.below else None

    def entered(self) -> AbstractContextManager[None]:
        """Code inside belongs here; never to be held across a ``yield`` to code of the app.

        May be entered again when it was left, so one does for a whole stream.
        """
        return _Entered(self, self._place)

    def speaker(self) -> Speaker:
        """Whose a call is that no model client announces."""
        return Speaker(self.seat.recorder.core, self.seat.name, None, *self.parent())

    def close(self) -> None:
        self.closed = True
        self._place.frame = None
        self.seat.open.remove(self)

    def made(self, turn_id: str, child: Frame | None = None) -> None:
        """A turn was made here or, in ``child``, further inside."""
        self.last_turn = turn_id
        if child is not None:
            self.inner[child.seat] = turn_id
        if self.outer is not None:
            self.outer.made(turn_id, self)

    def parent(self) -> Parent:
        """Agent inside whose turn calls made here run, and the turn that started it."""
        raise NotImplementedError

    def as_parent(self) -> Parent:
        """The same for what is nested here."""
        return self.parent()

    def passes_on(self) -> str | None:
        """The selection that what begins here owes its beginning to."""
        return None


class Run(Frame):
    """One run of a team, or of an agent by its own ``run``."""

    def __init__(self, seat: Seat, episode: LiveEpisode, below: Frame | None) -> None:
        super().__init__(seat, episode, below)
        self.selection: str | None = None
        """Turn that chose who speaks next, until that one has spoken."""
        self.managed: str | None = None
        """Latest turn of the team's manager."""
        self._inherited = self.outer.passes_on() if self.outer else None
        if seat.team_id is not None:
            _RUNNING[seat.team_id] = self

    @property
    def team_run(self) -> Run | None:
        return self if self.seat.team_id is not None else super().team_run

    def close(self) -> None:
        super().close()
        if self.seat.team_id is not None and _RUNNING.get(self.seat.team_id) is self:
            del _RUNNING[self.seat.team_id]
        if isinstance(self.outer, Run):
            self.outer.selection = None

    def parent(self) -> Parent:
        if self.outer is None:
            return None, None
        if isinstance(self.outer, Run) and self.seat.is_team:
            return self.seat.label, None
        return self.outer.as_parent()

    def passes_on(self) -> str | None:
        return self.selection or self.take_inherited()

    def take_inherited(self) -> str | None:
        """The selection that began this nested run, for the first who acts in it."""
        found, self._inherited = self._inherited, None
        return found

    def chose(self, turn_id: str) -> None:
        self.managed = self.selection = turn_id


class Speech(Frame):
    """An agent was handed messages and acts until its response."""

    def __init__(
        self, seat: Seat, episode: LiveEpisode, below: Frame | None, handed: Sequence[Any]
    ) -> None:
        super().__init__(seat, episode, below)
        self.handed = [message_id(m) for m in handed]
        self.turns: list[str] = []
        self.asking: str | None = None
        """The latest turn, while it is one that calls tools."""
        self.arguments: dict[str, Any] = {}
        """Arguments of tool calls under way, by call id."""
        self.code: Any = None
        self.exit_code: int | None = None
        self.selected_by = self.outer.passes_on() if self.outer else None
        self._name_instruction(handed)
        known = seat.delivered.setdefault(episode, [])
        known += [(i, model_text(m)) for i, m in zip(self.handed, handed, strict=True)]

    def was_handed(self, messages: Sequence[Any]) -> bool:
        """Whether it began with these messages."""
        return self.handed == [message_id(m) for m in messages]

    def _name_instruction(self, handed: Sequence[Any]) -> None:
        """The manager's own newest message (an instruction) came with its newest turn."""
        run = self.outer
        if not isinstance(run, Run) or run.managed is None or run.seat.role == "selector":
            return
        for message in reversed(handed):
            if message.source == run.seat.name:
                self.episode.messages.setdefault(message_id(message), run.managed)
                return

    def delivered(self) -> list[tuple[str, str]]:
        """(text, turn id) of the messages handed over so far that a turn made."""
        known = self.episode.messages
        handed = self.seat.delivered.get(self.episode, [])
        return [(text, known[i]) for i, text in handed if i in known]

    @property
    def read_by_team(self) -> bool:
        """Whether what the agent yields goes to AutoGen's own code, which only passes it on."""
        if not isinstance(self.outer, Run) or self.outer.seat.team_id is None:
            return False
        try:
            handler = MessageHandlerContext.agent_id()
        except Exception:  # outside any message handler
            return False
        mine = handler.type.startswith(self.seat.name)
        return mine and handler.key == self.outer.seat.team_id

    def parent(self) -> Parent:
        return self.outer.as_parent() if self.outer else (None, None)

    def speaker(self) -> Speaker:
        return replace(super().speaker(), selected_by=self.selected_by)

    def as_parent(self) -> Parent:
        if self.seat.role == "filter":
            return self.parent()
        return self.seat.name, self.asking

    def passes_on(self) -> str | None:
        return None if self.turns else self.selected_by


def innermost() -> Frame | None:
    """The frame of the code running now, whoever records it; asked once a step, as it costs."""
    place = _PLACE.get()
    while place is not None and place.frame is None:
        place = place.below
    frame = place.frame if place else None
    try:
        key = MessageHandlerContext.agent_id().key
    except Exception:  # outside any message handler
        return frame
    run = _RUNNING.get(key)
    return run if run is not None and (frame is None or frame.team_run is not run) else frame


def first(frame: Frame | None, seat: Seat) -> Frame | None:
    """``frame`` or the nearest one around it that is open and of the same recorder."""
    while frame is not None:
        if frame.open and frame.seat.recorder is seat.recorder:
            return frame
        frame = frame.below
    return None


def here(seat: Seat) -> Frame | None:
    """The innermost frame of the seat's recorder."""
    return first(innermost(), seat)


def own_frame(seat: Seat, place: Frame | None) -> Frame | None:
    """The frame of ``seat`` that the code running now belongs to; ``place``: what is ``here``.

    A thread that did not take the context along belongs to what the seat began last, unless that
    could be another episode's.
    """
    frame = place
    while frame is not None:
        if frame.seat is seat:
            return frame
        frame = frame.outer
    if place is not None:
        return None
    found = [f for f in seat.open if f.open]
    return found[-1] if len({f.episode for f in found}) == 1 else None


def episode_in(frame: Frame | None, seat: Seat) -> LiveEpisode | None:
    """The episode that something beginning in ``frame``, which is ``here``, is part of.

    An episode that the app opened inside a run beats the run's.
    """
    current = seat.recorder.current()
    if frame is None:
        return current
    inside = current is not None and current.parent_id == frame.episode.id
    return current if inside else frame.episode


def begin_speech(seat: Seat, messages: Sequence[Any]) -> tuple[Speech | None, bool]:
    """The speech that begins with ``messages``, and whether it is a new one.

    One speech may come through two doors (``on_messages`` calls ``on_messages_stream`` or the other
    way round): the second door, with the same messages, opens no new one.
    """
    below = innermost()
    frame = first(below, seat)
    if isinstance(frame, Speech) and frame.seat is seat and frame.was_handed(messages):
        return frame, False
    episode = episode_in(frame, seat)
    return (None, False) if episode is None else (Speech(seat, episode, below, messages), True)
