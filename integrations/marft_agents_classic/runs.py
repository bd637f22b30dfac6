"""Where an episode begins and ends.

Invariant: a chat that involves a wrapped agent joins the episode it happens in, or is one. How it
ended is read off the agents' last replies; nothing of the app is asked a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self, cast

from marft_agents.recording import (
    EndReason,
    LiveEpisode,
    MarftRecorder,
    describe_error,
    end_run,
)
from marft_agents_classic.agents import adopt
from marft_agents_classic.seats import (
    SPEECH,
    Binding,
    Seat,
    Speech,
    group_of,
    seat_of,
    text_of,
)

Outcome = tuple[EndReason, str | None]
STAMP = "_marft_episodes"
SEQUENCE: ContextVar[Chats | None] = ContextVar("marft_classic_sequence", default=None)


class Run:
    """One outermost or inner run of agents, for one recorder."""

    def __init__(self, binding: Binding, task: Any, stamped: Iterable[LiveEpisode]) -> None:
        self._binding = binding
        recorder = binding.recorder
        episode = recorder.current() or next(
            (e for e in stamped if e.core is recorder.core and not e.closed), None
        )
        self.inner = SPEECH.get() is not None
        self._own = episode is None
        self.episode = episode or recorder.open_episode(task, binding.runtime)

    def close(self, outcome: Outcome, result: Any, error: BaseException | None) -> None:
        """The run is over; one inside a reply says nothing of how the episode ends."""
        if error is not None:
            outcome = ("failed", describe_error(error))
        elif self._binding.end == "terminated" and outcome[0] == "truncated":
            outcome = ("terminated", outcome[1])
        if not self._own:
            sequence = SEQUENCE.get()
            if self.inner:
                return
            if sequence is not None:
                sequence.last = outcome
            else:
                self.episode.report(*outcome)
            return
        end_run(self.episode, *outcome, self._binding.on_end if error is None else None, result)


class Border:
    """``with`` around a run of ``agents``: an episode of each recorder that knows one of them."""

    result: Any = None

    def __init__(
        self, agents: Iterable[Any] = (), task: Any = None, stamped: Iterable[LiveEpisode] = ()
    ) -> None:
        self._task, self._stamped = task_of(task), list(stamped)
        self._members = list(_members(agents))
        self._bindings = _bindings(self._members)
        self._runs: list[Run] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for binding in self._bindings:
            safety = binding.recorder.core.safety
            run = safety.attempt("begin a chat", lambda b=binding: self._begin(b))
            if run is not None:
                self._runs.append(run)
                if binding.recorder.current() is not run.episode:
                    self._stack.enter_context(run.episode.active())
        return self

    def _begin(self, binding: Binding) -> Run:
        speech = SPEECH.get()
        for agent in self._members:
            adopt(agent, binding, speech)
        return Run(binding, self._task, self._stamped)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        for run in self._runs:
            with run.episode.core.safety.guard("end a chat"):
                run.close(self.outcome(run.episode), self.result, error)

    def outcome(self, episode: LiveEpisode) -> Outcome:
        """How the run ended, unless it failed."""
        return "terminated", None


class Chat(Border):
    """A chat between two agents, one of whom may manage a group."""

    def __init__(self, sender: Any, recipient: Any, options: Mapping[str, Any], stamped: Any):
        super().__init__((recipient, sender), options.get("message"), stamped)
        self._pair = (sender, recipient)
        self._limit = options.get("max_turns")
        self._keeps = not options.get("clear_history", True)
        self._before = 0

    def _begin(self, binding: Binding) -> Run:
        run = super()._begin(binding)
        self._before = self._sent() if self._keeps else 0
        for seat, partner in self._seats():
            seat.spoken.pop(id(partner), None)
        return run

    def _seats(self) -> Iterator[tuple[Seat, Any]]:
        sender, recipient = self._pair
        for agent, partner in ((sender, recipient), (recipient, sender)):
            seat = seat_of(agent)
            if seat is not None:
                yield seat, partner

    def _sent(self) -> int:
        """Messages of the sender in this conversation, so far."""
        sender, recipient = self._pair
        kept: Any = getattr(sender, "_oai_messages", {})
        messages = kept.get(recipient, ()) if isinstance(kept, Mapping) else ()
        return sum(m.get("role") != "user" for m in messages)

    def outcome(self, episode: LiveEpisode) -> Outcome:
        last = _last(self._seats(), episode)
        if last is not None and last.reply is None:
            return ending(last)
        limit = self._limit
        if isinstance(limit, int) and self._sent() - self._before >= limit:
            if last is not None and text_of(last.reply).endswith("TERMINATE"):
                return "terminated", "TERMINATE"
            return "truncated", f"max_turns ({limit}) reached"
        return "terminated", None


class Chats(Border):
    """A sequence of chats; the last one says how it ended."""

    last: Outcome = ("terminated", None)

    def __enter__(self) -> Self:
        super().__enter__()
        token = SEQUENCE.set(self)
        self._stack.callback(SEQUENCE.reset, token)
        return self

    def outcome(self, episode: LiveEpisode) -> Outcome:
        return self.last


class Exchange(Border):
    """A message sent outside of any chat, with the replies that it calls forth."""

    def __init__(self, sender: Any, recipient: Any, message: Any) -> None:
        super().__init__((recipient, sender), message)
        self._pair = (sender, recipient)

    def outcome(self, episode: LiveEpisode) -> Outcome:
        sender, recipient = self._pair
        pairs = ((sender, recipient), (recipient, sender))
        found = ((seat, b) for a, b in pairs if (seat := seat_of(a)) is not None)
        last = _last(found, episode)
        return ending(last) if last is not None else ("terminated", None)


def _last(seats: Iterable[tuple[Seat, Any]], episode: LiveEpisode) -> Speech | None:
    spoken = [s.spoken.get(id(partner)) for s, partner in seats]
    found = [s for s in spoken if s is not None and s.episode is episode]
    return max(found, key=lambda s: s.order, default=None)


def ending(speech: Speech) -> Outcome:
    """How a chat ended whose last reply this is."""
    group = group_of(speech.agent)
    if group is not None:
        rounds = len(group.messages) - speech.length
        if rounds >= group.max_round and speech.terminated is not True:
            return "truncated", f"max_round ({group.max_round}) reached"
        return "terminated", "TERMINATE" if speech.terminated else None
    message = speech.messages[-1] if speech.messages else None
    over = speech.terminated is True or text_of(message).endswith("TERMINATE")
    if speech.at_limit and not over and speech.reply is None:
        return "truncated", "max_consecutive_auto_reply reached"
    return "terminated", "TERMINATE" if over else None


def _members(agents: Iterable[Any], seen: set[int] | None = None) -> Iterator[Any]:
    """Agents, and the members of the groups that they manage."""
    seen = set() if seen is None else seen
    for agent in agents:
        if agent is None or id(agent) in seen:
            continue
        seen.add(id(agent))
        yield agent
        group = group_of(agent)
        if group is not None:
            yield from _members(cast("list[Any]", group.agents), seen)


def _bindings(members: list[Any]) -> list[Binding]:
    """One per recorder that has a say: its wrapped agents take part, or it records already."""
    found: dict[MarftRecorder, Binding] = {}
    speech = SPEECH.get()
    while speech is not None:
        if speech.seat.active:
            found.setdefault(speech.seat.recorder, speech.seat.binding)
        speech = speech.outer
    for agent in members:
        seat = seat_of(agent)
        if seat is not None and (seat.wrapped or seat.recorder.current() is not None):
            found.setdefault(seat.recorder, seat.binding)
    return list(found.values())


def task_of(message: Any) -> Any:
    """What a chat begins with, where it is text and not a function that makes it."""
    if isinstance(message, list):
        return [task_of(item) for item in cast("list[Any]", message)]
    if isinstance(message, Mapping):
        return cast("Mapping[str, Any]", message).get("content")
    return message if isinstance(message, str) else None
