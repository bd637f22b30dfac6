"""What an agent does besides calling its model: tools, code, human words.

Invariant: one event per execution and per human word, in the episode of the reply in which it
happens; looking at it never changes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, cast

from marft_agents.recording import Call as ModelCall
from marft_agents.recording import LiveEpisode, Unseen
from marft_agents_classic.seats import (
    SPEECH,
    TOOL,
    Seat,
    Speech,
    ToolUse,
    stage,
    text_of,
    tool_calls,
)

_EXECUTED = re.compile(r"exitcode: (-?\d+) \(execution (?:succeeded|failed)\)\nCode output: ?")
_TARGETS = ("_group_next_target", "_swarm_next_agent")
"""Where AutoGen's own tool executors keep whom a tool call handed over to."""


def _speech(seat: Seat, partner: Any = None) -> Speech | None:
    """The reply of this seat that goes on here."""
    if not seat.active:
        return None
    speech = SPEECH.get()
    if speech is not None and speech.seat is seat:
        return speech
    return seat.speech_with(partner) if speech is None else None


# -- tools ----------------------------------------------------------------------------------------


def _use(seat: Seat, call: Any, call_id: Any) -> tuple[ToolUse | None, str | None]:
    speech = _speech(seat)
    if speech is None:
        return None, None
    if call_id is None:
        call_id = _id_of(speech, call)
    turn = stage(speech.episode).calls.get(call_id) if call_id else None
    author = turn[1] if turn else getattr(speech.partner, "name", None)
    if turn is None and speech.messages and isinstance(speech.messages[-1], Mapping):
        author = speech.messages[-1].get("name") or author
        return ToolUse(speech, author, speech.cause()), call_id
    return ToolUse(speech, author, turn[0] if turn else None), call_id


def _id_of(speech: Speech, call: Any) -> str | None:
    """AutoGen 0.2 does not say which call it executes: the one that holds this function."""
    asked = tool_calls(speech.messages[-1]) if speech.messages else []
    same = [c for c in asked if c.get("function") is call] or [
        c for c in asked if c.get("function") == call
    ]
    return same[0].get("id") if same else None


def _used(seat: Seat, use: ToolUse, call_id: str | None, call: Any, outcome: Any) -> None:
    ok, answer = outcome
    content = answer.get("content") if isinstance(answer, Mapping) else answer
    use.speech.events += 1
    use.speech.episode.tool(
        str(call.get("name")),
        agent=use.agent or seat.name,
        call_id=call_id,
        arguments=call.get("arguments"),
        result=content,
        ok=bool(ok),
        environment=not _is_handoff(content),
    )


def _is_handoff(content: Any) -> bool:
    """Whether a tool's result only says who goes on."""
    names = {kind.__name__ for kind in type(content).__mro__}
    return bool(names & {"TransitionTarget", "ConversableAgent", "AfterWorkOption", "AfterWork"})


def _execute_function(agent: Any, seat: Seat, original: Any) -> Callable[..., Any]:
    def execute_function(func_call: Any, *args: Any, **kwargs: Any) -> Any:
        guard = seat.recorder.core.safety
        found = guard.attempt(
            "see a tool call", lambda: _use(seat, func_call, _given(args, kwargs))
        )
        use, call_id = found or (None, None)
        if use is None:
            return original(func_call, *args, **kwargs)
        token = TOOL.set(use)
        try:
            outcome = original(func_call, *args, **kwargs)
        finally:
            TOOL.reset(token)
        with guard.guard("record a tool"):
            _used(seat, use, call_id, func_call, outcome)
        return outcome

    return execute_function


def _a_execute_function(agent: Any, seat: Seat, original: Any) -> Callable[..., Any]:
    """The caller's reply is noted when the coroutine is made: it may run in another thread."""

    def a_execute_function(func_call: Any, *args: Any, **kwargs: Any) -> Any:
        guard = seat.recorder.core.safety
        found = guard.attempt(
            "see a tool call", lambda: _use(seat, func_call, _given(args, kwargs))
        )
        use, call_id = found or (None, None)
        coroutine = original(func_call, *args, **kwargs)
        return coroutine if use is None else _executing(coroutine, seat, use, call_id, func_call)

    return a_execute_function


async def _executing(
    coroutine: Any, seat: Seat, use: ToolUse, call_id: str | None, func_call: Any
) -> Any:
    inside = SPEECH.get() is use.speech
    with nullcontext() if inside else use.speech.entered():
        token = TOOL.set(use)
        try:
            outcome = await coroutine
        finally:
            TOOL.reset(token)
    with seat.recorder.core.safety.guard("record a tool"):
        _used(seat, use, call_id, func_call, outcome)
    return outcome


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``call_id`` of newer versions; older ones have ``verbose`` in its place."""
    value = kwargs.get("call_id", args[0] if args else None)
    return value if isinstance(value, str) else None


# -- code -----------------------------------------------------------------------------------------


def _execute_code_blocks(agent: Any, seat: Seat, original: Any) -> Callable[..., Any]:
    def execute_code_blocks(code_blocks: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = original(code_blocks, *args, **kwargs)
        speech = _speech(seat)
        if speech is not None:
            with seat.recorder.core.safety.guard("record code"):
                _ran(speech, code_blocks, outcome[0], outcome[1])
        return outcome

    return execute_code_blocks


def _ran(speech: Speech, blocks: Any, exit_code: Any, output: Any) -> None:
    speech.events += 1
    code = [
        {"language": b[0], "code": b[1]}
        if isinstance(b, tuple | list)
        else {"language": getattr(b, "language", None), "code": getattr(b, "code", None)}
        for b in blocks
    ]
    author = getattr(speech.partner, "name", None)
    if speech.messages and isinstance(speech.messages[-1], Mapping):
        author = speech.messages[-1].get("name") or author
    speech.episode.tool(
        "code_execution",
        agent=author or speech.seat.name,
        arguments=code,
        result=output,
        ok=exit_code == 0,
    )


def watch_executor(executor: Any, seat: Seat) -> None:
    """See what an executor object runs; one that takes no attribute is read off the reply."""
    original = getattr(executor, "execute_code_blocks", None)
    if original is None or getattr(original, "marft_watched", False):
        return

    def execute_code_blocks(code_blocks: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(code_blocks, *args, **kwargs)
        speech = SPEECH.get()
        if speech is not None and speech.seat.active:
            with speech.seat.recorder.core.safety.guard("record code"):
                _ran(speech, code_blocks, result.exit_code, result.output)
        return result

    watched: Any = execute_code_blocks
    watched.marft_watched = True
    try:
        seat.patches.set(executor, "execute_code_blocks", watched)
    except (AttributeError, TypeError, ValueError):
        return  # slots, or a model that takes no other field


# -- humans and replies ---------------------------------------------------------------------------


def _heard(seat: Seat, speech: Speech | None, words: Any) -> None:
    if not isinstance(words, str) or not words.strip():
        return  # a human who presses enter has said nothing
    episode = speech.episode if speech is not None else seat.recorder.current()
    if episode is not None:
        if speech is not None:
            speech.events += 1
        episode.human(seat.name, words)


def _get_human_input(agent: Any, seat: Seat, original: Any) -> Callable[..., Any]:
    def get_human_input(*args: Any, **kwargs: Any) -> Any:
        words = original(*args, **kwargs)
        speech = SPEECH.get()
        if seat.active and (speech is not None or seat.recorder.current() is not None):
            with seat.recorder.core.safety.guard("record a human's words"):
                _heard(seat, speech if speech and speech.seat is seat else None, words)
        return words

    return get_human_input


def _a_get_human_input(agent: Any, seat: Seat, original: Any) -> Callable[..., Any]:
    """AutoGen 0.2 asks the other method in a thread without context, which then stays silent."""

    async def a_get_human_input(*args: Any, **kwargs: Any) -> Any:
        words = await original(*args, **kwargs)
        if seat.active:
            speech = SPEECH.get()
            with seat.recorder.core.safety.guard("record a human's words"):
                _heard(seat, speech if speech and speech.seat is seat else None, words)
        return words

    return a_get_human_input


def reply(speech: Speech) -> None:
    """Take note of a finished reply."""
    said = speech.reply
    if not speech.turns and not speech.events:
        _unnoticed(speech, said)
    author = speech.agent
    if any(getattr(author, name, None) is not None for name in _TARGETS):
        manager, calls = speech.around(), stage(speech.episode).calls
        asked = tool_calls(speech.messages[-1]) if speech.messages else []
        turns = [calls[c["id"]][0] for c in asked if c.get("id") in calls]
        if manager is not None and turns:
            manager.handoff = turns[-1]


def _unnoticed(speech: Speech, said: Any) -> None:
    """A reply that no model, tool or patched method made."""
    match = _EXECUTED.match(said) if isinstance(said, str) else None
    if match is not None and getattr(speech.agent, "_code_executor", None) is not None:
        _ran(speech, (), int(match[1]), said[match.end() :])
    elif _is_human(speech.agent, said):
        _heard(speech.seat, speech, text_of(said))
    elif _is_assistant(speech.agent) and text_of(said):
        call = ModelCall(speech.episode, speech.seat.name)
        messages = [cast("dict[str, Any]", m) for m in speech.messages if isinstance(m, Mapping)]
        call.finish(unseen=Unseen(messages, text_of(said)))
        speech.turns += call.turn_ids


def _is_human(agent: Any, said: Any) -> bool:
    """Whether this is how AutoGen hands on what a human said to a method that was put in later."""
    asked = getattr(agent, "human_input_mode", "NEVER") != "NEVER"
    default = getattr(agent, "_default_auto_reply", None)
    return asked and isinstance(said, Mapping) and said.get("role") == "user" and said != default


def _is_assistant(agent: Any) -> bool:
    return any(kind.__name__ == "GPTAssistantAgent" for kind in type(agent).__mro__)


def say_assistant(seat: Seat) -> None:
    seat.recorder.core.safety.warn_once(
        ("uncaptured", "GPTAssistantAgent", seat.name),
        f"marft-agents: agent {seat.name!r} is a GPTAssistantAgent, whose replies come from the"
        " Assistants API; they are logged without tokens and cannot be trained on; use an"
        " AssistantAgent on a chat completions server",
    )


def rewritten(seat: Seat, episode: LiveEpisode, message: Any, sent: Any) -> None:
    """A hook changed a message on its way out."""
    text, turn_id = stage(episode).said.get(seat.name, ("", ""))
    if text and text == text_of(message) and text_of(sent) not in ("", text):
        with episode.lock:
            episode.ledger.add(turn_id, seat.name, text_of(sent))


METHODS: dict[str, Callable[[Any, Seat, Any], Callable[..., Any]]] = {
    "execute_function": _execute_function,
    "a_execute_function": _a_execute_function,
    "execute_code_blocks": _execute_code_blocks,
    "get_human_input": _get_human_input,
    "a_get_human_input": _a_get_human_input,
}
