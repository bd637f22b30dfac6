"""Who speaks, in which episode, and because of whom.

Invariant: identity is a contextvar while an agent replies. AutoGen answers asynchronous chats in
threads that do not inherit it; there the agent and its partner name the reply that goes on. Nothing
here outlives the reply, so an agent that talks in one chat after the other, or with several
partners at once, is never filed under another episode.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

from marft_agents.recording import (
    Call,
    EpisodeHandle,
    LiveEpisode,
    MarftRecorder,
    Patches,
    TurnKind,
)

SEAT = "_marft_seat"
SPEECH: ContextVar[Speech | None] = ContextVar("marft_classic_speech", default=None)
TOOL: ContextVar[ToolUse | None] = ContextVar("marft_classic_tool", default=None)
KIND: ContextVar[tuple[TurnKind, str] | None] = ContextVar("marft_classic_kind", default=None)
"""Kind and agent of the calls made now, where they are not the speaker's own."""
_counter = itertools.count()


@dataclass(eq=False)
class Binding:
    """One ``wrap``: its options, and the way back."""

    recorder: MarftRecorder
    runtime: str
    end: str = "auto"
    on_end: Callable[[EpisodeHandle, Any], object] | None = None
    seats: weakref.WeakSet[Seat] = field(default_factory=lambda: weakref.WeakSet[Seat]())
    dismiss: Callable[[], object] | None = None
    """Says that this binding needs the patched classes no more."""

    def release(self) -> None:
        for seat in list(self.seats):
            seat.patches.undo()
        if self.dismiss is not None:
            self.dismiss()


@dataclass(eq=False)
class Seat:
    """What the recorder knows of one agent."""

    recorder: MarftRecorder
    name: str
    binding: Binding
    kind: TurnKind = "act"
    wrapped: bool = False
    """Whether the app wrapped it; others were met in a recorded chat."""
    manages: bool = False
    """Whether it lets the members of a group speak."""
    patches: Patches = field(default_factory=Patches)
    speaking: dict[int, Speech] = field(default_factory=dict[int, "Speech"])
    """Replies going on, by the partner's ``id``."""
    spoken: dict[int, Speech] = field(default_factory=dict[int, "Speech"])
    """The last finished reply, by the partner's ``id``."""

    @property
    def active(self) -> bool:
        return not self.recorder.core.closed

    def speech_with(self, partner: Any) -> Speech | None:
        """The reply that goes on here, seen from a thread without its context."""
        found = self.speaking.get(id(partner))
        if found is None and len(self.speaking) == 1:
            (found,) = self.speaking.values()
        return found


@dataclass(eq=False)
class ToolUse:
    """A tool call being executed inside a reply."""

    speech: Speech
    agent: str | None
    turn_id: str | None


@dataclass(eq=False)
class Speech:
    """One reply of one agent to one partner: ``generate_reply`` from beginning to end."""

    seat: Seat
    agent: Any
    episode: LiveEpisode
    partner: Any
    messages: list[Any]
    outer: Speech | None = None
    """The reply, of whichever recorder, inside which this one happens."""
    parent: tuple[str | None, str | None] = (None, None)
    selected_by: str | None = None
    pending: tuple[str, str] | None = None
    """Of a manager: (turn, text) of the selection whose speaker has not begun."""
    handoff: str | None = None
    """Of a manager: the turn that handed over to whoever speaks next."""
    turns: list[str] = field(default_factory=list[str])
    calls: set[Call] = field(default_factory=set[Call])
    events: int = 0
    """Tools, code and human words so far."""
    reply: Any = None
    at_limit: bool = False
    """Whether the agent had used up its automatic replies when this one was asked for."""
    terminated: bool | None = None
    """What the agent last said of whether a message ends the chat."""
    length: int = 0
    """Of a manager: messages of the group before this reply."""
    order: int = 0

    @contextmanager
    def entered(self) -> Generator[None]:
        """In here, in this context, this is the reply that goes on."""
        token = SPEECH.set(self)
        try:
            with ExitStack() as stack:
                if self.seat.recorder.current() is not self.episode:
                    stack.enter_context(self.episode.active())
                yield
        finally:
            SPEECH.reset(token)

    def cause(self) -> str | None:
        """The turn that this reply answers, where a turn it is."""
        if self.turns:
            return self.turns[-1]
        message = self.messages[-1] if self.messages else None
        if not isinstance(message, Mapping):
            return None
        known = stage(self.episode)
        for call in tool_calls(message):
            if call.get("id") in known.calls:
                return known.calls[call["id"]][0]
        author = message.get("name") or getattr(self.partner, "name", None)
        text, turn_id = known.said.get(str(author), ("", None))
        return turn_id if text and text == text_of(message) else None

    def around(self) -> Speech | None:
        """The reply of the same recorder inside which this one happens."""
        return own_speech(self.seat.recorder, self.outer)

    def finished(self) -> None:
        self.order = next(_counter)
        self.seat.spoken[id(self.partner)] = self
        self.partner = self.outer = None  # what is kept keeps nobody else
        self.messages = self.messages[-1:]


def own_speech(recorder: MarftRecorder, speech: Speech | None) -> Speech | None:
    """``speech``, or the nearest one around it, that ``recorder`` records."""
    while speech is not None and speech.seat.recorder is not recorder:
        speech = speech.outer
    return speech


@dataclass(eq=False)
class Stage:
    """What was said in one episode, as far as later replies refer to it."""

    calls: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """(turn, agent) behind each tool call id."""
    said: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """(text, turn) that each agent said last."""


_stages: weakref.WeakKeyDictionary[LiveEpisode, Stage] = weakref.WeakKeyDictionary()


def stage(episode: LiveEpisode) -> Stage:
    with episode.lock:
        return _stages.setdefault(episode, Stage())


def seat_of(obj: Any) -> Seat | None:
    """The seat of an agent, while its recorder is open."""
    seat = getattr(obj, "__dict__", {}).get(SEAT)
    return seat if isinstance(seat, Seat) and seat.active else None


def text_of(message: Any) -> str:
    """The text of a message in any of AutoGen's forms."""
    content = cast("Mapping[str, Any]", message).get("content") if _is_map(message) else message
    if isinstance(content, str):
        return content.strip()
    if isinstance(content, list):
        parts = [p.get("text") for p in cast("list[Any]", content) if _is_map(p)]
        return "\n".join(p for p in parts if isinstance(p, str)).strip()
    return ""


def tool_calls(message: Any) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls") if _is_map(message) else None
    return [c for c in calls if _is_map(c)] if isinstance(calls, list) else []


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)


def group_of(agent: Any) -> Any | None:
    """The group chat of a manager."""
    group = getattr(agent, "groupchat", None)
    return group if isinstance(getattr(group, "agents", None), list) else None
