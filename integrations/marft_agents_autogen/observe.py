"""What an agent does besides calling its model: tools, code, human input, messages to others.

Invariant: an event of AutoGen is recorded once per episode, by its id, however many streams it
passes through; looking at it never changes it.
"""

from __future__ import annotations

import functools
from typing import Any

from autogen_agentchat.agents import CodeExecutorAgent, UserProxyAgent
from autogen_agentchat.base import Response
from autogen_agentchat.messages import (
    HandoffMessage,
    ToolCallExecutionEvent,
    ToolCallRequestEvent,
)

from marft_agents_autogen.compat import (
    CODE_EXECUTION,
    CODE_GENERATION,
    message_id,
    message_text,
    model_text,
)
from marft_agents_autogen.frames import Run, Speech
from marft_agents_autogen.holders import say_other_api

_TELLING: tuple[type[Any], ...] = (
    Response,
    ToolCallRequestEvent,
    ToolCallExecutionEvent,
    *CODE_GENERATION,
    *CODE_EXECUTION,
)


def is_telling(item: Any) -> bool:
    """Whether ``observe`` has anything to see in an item; pieces of a stream tell nothing."""
    return _tells(type(item))


@functools.lru_cache(maxsize=256)
def _tells(kind: type[Any]) -> bool:
    """Asked per class: AutoGen's messages are abstract classes, which are slow to ask."""
    return issubclass(kind, _TELLING)


@functools.lru_cache(maxsize=256)
def _kind(kind: type[Any]) -> type[Any] | None:
    """Which of the agents that act without a model it is; asked per class, as above."""
    return next((k for k in (UserProxyAgent, CodeExecutorAgent) if issubclass(kind, k)), None)


def observe(agent: Any, speech: Speech, item: Any) -> None:
    """Take note of one item of ``agent.on_messages_stream``."""
    if isinstance(item, Response):
        for inner in item.inner_messages or ():
            _event(speech, inner)
        _response(agent, speech, item.chat_message)
    else:
        _event(speech, item)


def _event(speech: Speech, event: Any) -> None:
    if isinstance(event, ToolCallRequestEvent):
        speech.arguments |= {call.id: call.arguments for call in event.content}
    elif isinstance(event, CODE_GENERATION):
        speech.code = _blocks(event.code_blocks) or speech.code
    elif isinstance(event, ToolCallExecutionEvent):
        if speech.episode.first_time(message_id(event)):
            for result in event.content:
                _tool(speech, event.source, result)
    elif isinstance(event, CODE_EXECUTION) and speech.episode.first_time(message_id(event)):
        _code(speech, event.source, event.result.output, event.result.exit_code == 0)


def _tool(speech: Speech, agent: str, result: Any) -> None:
    episode, runner = speech.episode, speech.seat.runners.get(result.name)
    answered = speech.inner.get(runner) if runner is not None else None
    if answered is not None and runner is not None:  # its answer, as the tool renders it
        with episode.lock:
            episode.ledger.add(answered, runner.label, result.content)
    episode.tool(
        result.name,
        agent=agent,
        call_id=result.call_id,
        arguments=speech.arguments.pop(result.call_id, None),
        result=result.content,
        ok=not result.is_error,
        environment=runner is None and result.name not in speech.seat.handoffs,
    )


def _code(speech: Speech, agent: str, output: str, ok: bool) -> None:
    speech.episode.tool("code_execution", agent=agent, arguments=speech.code, result=output, ok=ok)
    speech.code = speech.exit_code = None


def executed(speech: Speech, code_blocks: Any, result: Any) -> None:
    """An agent without a model has run the code that others wrote; its response says no more."""
    speech.code, speech.exit_code = _blocks(code_blocks), result.exit_code


def _blocks(code_blocks: Any) -> list[dict[str, str]]:
    return [{"language": block.language, "code": block.code} for block in code_blocks]


def _response(agent: Any, speech: Speech, message: Any) -> None:
    episode, name = speech.episode, message_id(message)
    if episode.first_time(name):
        kind = _kind(agent.__class__)
        if kind is UserProxyAgent:
            episode.human(agent.name, message_text(message))
        elif kind is CodeExecutorAgent and not speech.turns:
            _code(speech, agent.name, message_text(message), speech.exit_code == 0)
        turn_id = speech.turns[-1] if speech.turns else speech.last_turn
        if turn_id is None and speech.seat.role == "agent":
            _say_silent(agent, speech)
        if turn_id is not None:
            episode.messages[name] = turn_id
            with episode.lock:
                episode.ledger.add(turn_id, speech.seat.name, model_text(message))
    if isinstance(speech.outer, Run):
        handed_off = speech.outer.seat.role == "swarm" and isinstance(message, HandoffMessage)
        speech.outer.selection = episode.messages.get(name) if handed_off else None


def _say_silent(agent: Any, speech: Speech) -> None:
    """An agent whose model, if it has one, is out of sight."""
    kind, seat = type(agent), speech.seat
    root = kind.__module__.split(".")[0]
    if root == "autogen_ext":
        say_other_api(agent, seat)
    elif root != "autogen_agentchat" and not seat.own_sdk:
        speech.episode.core.safety.warn_once(
            ("no model call seen", kind),
            f"marft-agents: agent {seat.name!r} ({kind.__qualname__}) answered and no model call of"
            " it was seen; if it asks a model, keep the model client (or openai client) in an"
            " attribute of the agent, or use recorder.attach_client(client, agent=...)",
        )
