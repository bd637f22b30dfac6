"""ShareGPT: the chat that each answered model call ends, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

from marft_agents.log.exporting.rows import as_text, return_of
from marft_agents.schema import Episode, JsonDict, Turn

_FROM = {"system": "system", "developer": "system", "user": "human", "assistant": "gpt",
         "tool": "observation", "function": "observation"}  # fmt: skip


def write_sharegpt(episodes: Iterable[Episode], file: BinaryIO) -> int:
    """One line an answered turn; returns how many."""
    count = 0
    for episode in episodes:
        for turn in episode.turns:
            if turn.error is None and (turn.text or turn.tool_calls):
                line = json.dumps(_row(episode, turn), ensure_ascii=False, default=str)
                file.write(line.encode("utf-8", "backslashreplace") + b"\n")
                count += 1
    return count


def _row(episode: Episode, turn: Turn) -> JsonDict:
    said = {"role": "assistant", "content": turn.text, "tool_calls": turn.tool_calls}
    conversation = [piece for message in (*turn.messages, said) for piece in _pieces(message)]
    return {
        "id": turn.turn_id,
        "conversations": conversation,
        "agent": turn.agent,
        "kind": turn.kind,
        "episode_id": episode.episode_id,
        "reward": return_of(episode, turn),
    }


def _pieces(message: Mapping[str, Any]) -> list[JsonDict]:
    out: list[JsonDict] = []
    role, content = str(message.get("role")), message.get("content")
    name = {"name": message["name"]} if message.get("name") else {}
    calls = message.get("tool_calls")
    if content is not None or not calls:
        out.append({"from": _FROM.get(role, role), "value": as_text(content) or "", **name})
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            named = {"name": function.get("name"), "arguments": _arguments(function)}
            out.append({"from": "function_call", "value": json.dumps(named, default=str)})
    return out


def _arguments(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments")
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
