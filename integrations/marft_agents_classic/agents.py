"""What is put onto one agent: how it replies, asks a human, uses tools and runs code.

Invariant: an agent is patched once, as an instance; every call goes through to what was there, with
the same arguments, result and exceptions. A patch does nothing once its recorder is closed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from marft_agents.recording import LiveEpisode
from marft_agents_classic import observe
from marft_agents_classic.seats import (
    KIND,
    SEAT,
    SPEECH,
    TOOL,
    Binding,
    Seat,
    Speech,
    group_of,
    own_speech,
    seat_of,
)

_SELECTION = ("checking_agent", "speaker_selection_agent")
"""AutoGen's names for the two agents that it makes for each selection of a speaker."""
Make = Callable[[Any, Seat, Any], Callable[..., Any]]


def adopt(agent: Any, binding: Binding, speech: Speech | None = None) -> Seat | None:
    """Give an agent a seat, unless it has one; ``None`` for what is no agent of this kind."""
    seat = seat_of(agent)
    if seat is not None:
        return seat
    if not hasattr(agent, "__dict__") or not callable(getattr(agent, "generate_reply", None)):
        return None
    seat = Seat(binding.recorder, str(agent.name), binding, manages=group_of(agent) is not None)
    manager = own_speech(binding.recorder, speech)
    if manager is not None and manager.seat.manages and agent.name in _SELECTION:
        seat.name, seat.kind = manager.seat.name, "select"
    binding.seats.add(seat)
    seat.patches.set(agent, SEAT, seat)
    for name, make in _METHODS.items():
        original = getattr(agent, name, None)
        if callable(original):
            patched = functools.wraps(original)(make(agent, seat, original))
            seat.patches.set(agent, name, patched)
    executor = getattr(agent, "_code_executor", None)
    if executor is not None:
        observe.watch_executor(executor, seat)
    if any(kind.__name__ == "GPTAssistantAgent" for kind in type(agent).__mro__):
        observe.say_assistant(seat)
    return seat


class Speaking:
    """``with`` around one reply of one agent."""

    def __init__(self, seat: Seat, agent: Any, messages: Any, partner: Any) -> None:
        self.speech: Speech | None = None
        if seat.active:
            self.speech = seat.recorder.core.safety.attempt(
                "see who speaks", lambda: _begin(seat, agent, messages, partner)
            )
        self._entered = self.speech.entered() if self.speech else None

    def __enter__(self) -> Self:
        if self._entered is not None:
            self._entered.__enter__()
        return self

    def said(self, reply: Any) -> Any:
        if self.speech is not None:
            self.speech.reply = reply
        return reply

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._entered is not None:
            self._entered.__exit__(None, None, None)
        if self.speech is not None:
            with self.speech.seat.recorder.core.safety.guard("see what was said"):
                _end(self.speech, error)


def _begin(seat: Seat, agent: Any, messages: Any, partner: Any) -> Speech | None:
    outer = SPEECH.get()
    around = own_speech(seat.recorder, outer)
    episode = seat.recorder.current() or (around.episode if around else None)
    if episode is None:
        return None
    if messages is None:
        messages = agent.chat_messages.get(partner, [])
    speech = Speech(seat, agent, episode, partner, list(messages), outer)
    speech.parent = _parent(speech, around)
    if around is not None and around.seat.manages and around.agent is partner:
        speech.selected_by = _selection(around, seat.name)
    speech.at_limit = _at_limit(agent, partner)
    group = group_of(agent)
    speech.length = len(group.messages) if group is not None else 0
    seat.speaking[id(partner)] = speech
    return speech


def _parent(speech: Speech, around: Speech | None) -> tuple[str | None, str | None]:
    """On whose behalf: nobody's at the top, where members speak to their manager too."""
    if around is None:
        return None, None
    if speech.seat.kind == "select" or (around.seat.manages and around.agent is speech.partner):
        return around.parent
    use = TOOL.get()
    if use is not None and use.speech is around:
        return use.agent or around.seat.name, use.turn_id
    return around.seat.name, around.cause()


def _selection(manager: Speech, name: str) -> str | None:
    """The turn that made ``name`` the speaker: a selection that names it, or a handoff."""
    pending, handoff = manager.pending, manager.handoff
    manager.pending = manager.handoff = None
    if pending is not None:
        turn_id, text = pending
        forms = (name, name.replace("_", " "), name.replace("_", r"\_"))
        return turn_id if any(form in text for form in forms) else None
    return handoff


def _at_limit(agent: Any, partner: Any) -> bool:
    counts: Any = getattr(agent, "_consecutive_auto_reply_counter", {})
    limits: Any = getattr(agent, "_max_consecutive_auto_reply_dict", {})
    default = getattr(agent, "_max_consecutive_auto_reply", None)
    limit = limits.get(partner, default)
    if not isinstance(limit, int) or limit <= 0:
        return False
    return counts.get(partner, 0) >= limit and agent.human_input_mode == "NEVER"


def _end(speech: Speech, error: BaseException | None) -> None:
    seat = speech.seat
    if seat.speaking.get(id(speech.partner)) is speech:
        del seat.speaking[id(speech.partner)]
    if error is not None:
        for call in list(speech.calls):  # left behind in a thread that nobody waits for
            call.finish(error)
    else:
        observe.reply(speech)
    speech.finished()
    if len(seat.spoken) > 1000:  # partners of a server's lifetime
        seat.spoken.pop(next(iter(seat.spoken)))


def _asked(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """``messages`` and ``sender`` of a request for a reply, however they were passed."""
    messages = kwargs.get("messages", args[0] if args else None)
    return messages, kwargs.get("sender", args[1] if len(args) > 1 else None)


def _generate_reply(agent: Any, seat: Seat, original: Any) -> Callable[..., Any]:
    def generate_reply(*args: Any, **kwargs: Any) -> Any:
        messages, sender = _asked(args, kwargs)
        with alone(seat, agent, messages) as run, Speaking(seat, agent, messages, sender) as here:
            run.result = here.said(original(*args, **kwargs))
            return run.result

    return generate_reply


def _a_generate_reply(agent: Any, seat: Seat, original: Any) -> Callable[..., Any]:
    async def a_generate_reply(*args: Any, **kwargs: Any) -> Any:
        messages, sender = _asked(args, kwargs)
        with alone(seat, agent, messages) as run, Speaking(seat, agent, messages, sender) as here:
            run.result = here.said(await original(*args, **kwargs))
            return run.result

    return a_generate_reply


def _generate_oai_reply(agent: Any, seat: Seat, original: Any) -> Callable[..., Any]:
    """Called by name from AutoGen's worker threads, and by apps that ask the model directly."""

    def generate_oai_reply(*args: Any, **kwargs: Any) -> Any:
        messages, sender = _asked(args, kwargs)
        here = SPEECH.get()
        speech = seat.speech_with(sender) if here is None and seat.active else None
        if speech is not None:
            with speech.entered():
                return original(*args, **kwargs)
        if here is not None and here.seat is seat:
            return original(*args, **kwargs)
        with alone(seat, agent, messages) as run, Speaking(seat, agent, messages, sender) as now:
            final, run.result = original(*args, **kwargs)
            return final, now.said(run.result)

    return generate_oai_reply


def alone(seat: Seat, agent: Any, messages: Any) -> Any:
    """An episode for a reply that the app asks for outside of any chat."""
    from marft_agents_classic.runs import Border

    inside = not seat.active or not seat.wrapped or seat.recorder.current() is not None
    last = messages[-1] if isinstance(messages, list) and messages else None
    return (None if inside else attempt(seat, lambda: Border((agent,), last, ()))) or Border()


def attempt(seat: Seat, make: Callable[[], Any]) -> Any:
    return seat.recorder.core.safety.attempt("see a chat begin", make)


def _is_termination_msg(agent: Any, seat: Seat, original: Any) -> Callable[..., Any]:
    def is_termination_msg(*args: Any, **kwargs: Any) -> Any:
        ends = original(*args, **kwargs)
        speech = SPEECH.get()
        if speech is not None and speech.seat is seat:
            speech.terminated = bool(ends)
        return ends

    return is_termination_msg


def _reflection(agent: Any, seat: Seat, original: Any) -> Callable[..., Any]:
    """A summary is asked for by one agent and written by the client of another."""

    def _reflection_with_llm(*args: Any, **kwargs: Any) -> Any:
        writer: Any = kwargs.get("llm_agent", args[2] if len(args) > 2 else None)
        if getattr(writer, "client", None) is None:
            writer = agent
        token = KIND.set(("summary", str(writer.name)))
        try:
            return original(*args, **kwargs)
        finally:
            KIND.reset(token)

    return _reflection_with_llm


def _guarded(agent: Any, seat: Seat, original: Any) -> Callable[..., Any]:
    def run_guardrails(*args: Any, **kwargs: Any) -> Any:
        token = KIND.set(("guard", seat.name))
        try:
            return original(*args, **kwargs)
        finally:
            KIND.reset(token)

    return run_guardrails


def _before_send(agent: Any, seat: Seat, original: Any) -> Callable[..., Any]:
    """Hooks may put another text on the wire; later prompts are linked to that one too."""

    def _process_message_before_send(message: Any, *args: Any, **kwargs: Any) -> Any:
        sent = original(message, *args, **kwargs)
        episode: LiveEpisode | None = seat.recorder.current()
        if episode is not None and sent is not message:
            with seat.recorder.core.safety.guard("see what is sent"):
                observe.rewritten(seat, episode, message, sent)
        return sent

    return _process_message_before_send


def _send(agent: Any, seat: Seat, original: Any) -> Callable[..., Any]:
    def send(*args: Any, **kwargs: Any) -> Any:
        with _exchange(seat, agent, args, kwargs):
            return original(*args, **kwargs)

    return send


def _a_send(agent: Any, seat: Seat, original: Any) -> Callable[..., Any]:
    async def a_send(*args: Any, **kwargs: Any) -> Any:
        with _exchange(seat, agent, args, kwargs):
            return await original(*args, **kwargs)

    return a_send


def _exchange(seat: Seat, agent: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An episode for a message that the app sends outside of any chat and wants answered."""
    from marft_agents_classic.runs import Border, Exchange

    names = ("message", "recipient", "request_reply")
    message, recipient, request_reply = (
        kwargs.get(name, args[i] if len(args) > i else None) for i, name in enumerate(names)
    )
    asks: Any = getattr(recipient, "reply_at_receive", {})
    answered = asks.get(agent) if request_reply is None else request_reply
    if not seat.active or not answered or seat.recorder.current() is not None:
        return Border()
    return attempt(seat, lambda: Exchange(agent, recipient, message)) or Border()


_METHODS: dict[str, Make] = {
    "generate_reply": _generate_reply,
    "a_generate_reply": _a_generate_reply,
    "generate_oai_reply": _generate_oai_reply,
    "send": _send,
    "a_send": _a_send,
    "_is_termination_msg": _is_termination_msg,
    "_reflection_with_llm": _reflection,
    "_process_message_before_send": _before_send,
    "run_input_guardrails": _guarded,
    "run_output_guardrails": _guarded,
    **observe.METHODS,
}

__all__ = ["adopt"]
