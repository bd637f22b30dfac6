"""Tool results, read from the prompts that bring them.

Invariant: a result is logged once, and only for a tool call that a turn of the same episode made;
what a client writes into its prompt for other reasons is no tool.
"""

from __future__ import annotations

from typing import Any, cast

from marft_agents.recording import LiveEpisode
from marft_agents.recording.linking import message_text
from marft_agents.schema import JsonDict


def note_tools(episode: LiveEpisode, agent: str, messages: Any) -> None:
    """Log tool results that this prompt brings, of tool calls that a turn of this episode made.

    A result that repeats what another turn said is an agent behind a tool, not the environment.
    """
    listed = cast("list[Any]", messages) if isinstance(messages, list) else []
    wire = [cast("JsonDict", message) for message in listed if isinstance(message, dict)]
    for message in wire:
        call_id = message.get("tool_call_id")
        if message.get("role") != "tool" or not isinstance(call_id, str):
            continue
        if not episode.ledger.link([{"tool_call_id": call_id}]):
            continue
        if not episode.first_time(f"tool {call_id}"):
            continue
        function = _function_of(wire, call_id)
        episode.tool(
            str(function.get("name") or message.get("name") or "unnamed"),
            agent=agent,
            call_id=call_id,
            arguments=function.get("arguments"),
            result=message_text(message),
            environment=not episode.ledger.link([{"content": message.get("content")}]),
        )


def _function_of(messages: list[JsonDict], call_id: str) -> JsonDict:
    for message in messages:
        calls = message.get("tool_calls")
        for call in cast("list[Any]", calls) if isinstance(calls, list) else ():
            if isinstance(call, dict) and cast("JsonDict", call).get("id") == call_id:
                function: Any = cast("JsonDict", call).get("function")
                return cast("JsonDict", function) if isinstance(function, dict) else {}
    return {}
