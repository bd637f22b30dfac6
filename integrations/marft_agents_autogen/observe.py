"""What an agent does besides calling its model: tools, code, human input, messages to others.

Invariant: an event of AutoGen is recorded once per episode, by its id, however many streams it
passes through; looking at it never changes it.
"""

from __future__ import annotations

from typing import Any

from autogen_agentchat.agents import CodeExecutorAgent, UserProxyAgent
from autogen_agentchat.base import Response
from autogen_agentchat.messages import (
    BaseAgentEvent,
    BaseChatMessage,
    CodeExecutionEvent,
    ToolCallExecutionEvent,
    ToolCallRequestEvent,
)

from marft_agents.recording import LiveEpisode
from marft_agents_autogen.seats import Seat


def observe(agent: Any, seat: Seat, item: Any) -> None:
    """Take note of one item of ``agent.on_messages_stream``."""
    episode = seat.episode()
    if episode is None:
        return
    if isinstance(item, Response):
        for inner in item.inner_messages or ():
            _event(seat, episode, inner)
        _response(agent, seat, episode, item.chat_message)
    elif isinstance(item, BaseAgentEvent):
        _event(seat, episode, item)


def _event(seat: Seat, episode: LiveEpisode, event: BaseAgentEvent | BaseChatMessage) -> None:
    if isinstance(event, ToolCallRequestEvent):
        seat.arguments |= {call.id: call.arguments for call in event.content}
    elif isinstance(event, ToolCallExecutionEvent) and episode.first_time(event.id):
        for result in event.content:
            episode.tool(
                result.name,
                agent=event.source,
                call_id=result.call_id,
                arguments=seat.arguments.pop(result.call_id, None),
                result=result.content,
                ok=not result.is_error,
                environment=result.name not in seat.own_tools,
            )
    elif isinstance(event, CodeExecutionEvent) and episode.first_time(event.id):
        episode.tool(
            "code_execution",
            agent=event.source,
            result=event.result.output,
            ok=event.result.exit_code == 0,
        )


def _response(agent: Any, seat: Seat, episode: LiveEpisode, message: BaseChatMessage) -> None:
    if not episode.first_time(message.id):
        return
    if isinstance(agent, UserProxyAgent):
        episode.human(agent.name, message.to_text())
    elif isinstance(agent, CodeExecutorAgent) and not seat.turns:
        episode.tool("code_execution", agent=agent.name, result=message.to_text())
    if seat.turns:
        turn_id = seat.turns[-1]
        episode.messages[message.id] = turn_id
        with episode.lock:
            episode.ledger.add(turn_id, seat.name, message.to_model_text())
