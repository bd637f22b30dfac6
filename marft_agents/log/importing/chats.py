"""Chats of one assistant: OpenAI's fine-tuning lines, and ShareGPT's.

Each record is one episode with a turn for every reply, given everything before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from marft_agents.log.importing.draft import Draft, Unreadable, add_chat
from marft_agents.log.importing.lines import rows
from marft_agents.schema import JsonDict

Made = Draft | tuple[int, str]
"""An episode, or the line that gave none and why."""

_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant",
    "chatgpt": "assistant", "assistant": "assistant", "model": "assistant", "bot": "assistant",
    "function_call": "assistant", "tool_call": "assistant", "observation": "tool", "tool": "tool",
    "function_response": "tool",
}  # fmt: skip


def openai_chats(path: Path, prefix: str, begin: datetime) -> Iterator[Made]:
    """``{"messages": [...]}`` a line, as OpenAI's fine-tuning takes them."""
    yield from _chats(path, prefix, begin, "import openai", _openai)


def sharegpt_chats(path: Path, prefix: str, begin: datetime) -> Iterator[Made]:
    """``{"conversations": [{"from": ..., "value": ...}]}``, a line each or in one list."""
    yield from _chats(path, prefix, begin, "import sharegpt", _sharegpt)


def _chats(
    path: Path,
    prefix: str,
    begin: datetime,
    runtime: str,
    messages_of: Callable[[JsonDict], list[JsonDict]],
) -> Iterator[Made]:
    for line, value, wrong in rows(path):
        if value is None:
            yield line, wrong
            continue
        draft = Draft(f"{prefix}-{line}", runtime, begin)
        agent = value.get("agent")
        try:
            add_chat(draft, messages_of(value), agent=agent if isinstance(agent, str) else None)
        except Unreadable as error:
            yield line, str(error)
            continue
        draft.metadata = _extras(value)
        yield draft


def _extras(value: JsonDict) -> JsonDict:
    """What else stands in the record; definitions of tools among it."""
    return {k: v for k, v in value.items() if k not in ("messages", "conversations", "agent")}


def _objects(value: JsonDict, key: str) -> list[JsonDict]:
    found = value.get(key)
    if not isinstance(found, list):
        if "preferred_output" in value:
            raise Unreadable("a pair of preferences; only chats are imported")
        raise Unreadable(f"no list {key!r}")
    items = cast("list[Any]", found)
    if not all(isinstance(item, dict) for item in items):
        raise Unreadable(f"{key!r} holds something that is no message")
    return cast("list[JsonDict]", items)


def _openai(value: JsonDict) -> list[JsonDict]:
    return _objects(value, "messages")


def _sharegpt(value: JsonDict) -> list[JsonDict]:
    messages: list[JsonDict] = []
    system = value.get("system")
    if isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
    for said in _objects(value, "conversations"):
        speaker = said.get("from", said.get("role"))
        role = _ROLES.get(str(speaker).lower())
        if role is None:
            raise Unreadable(f"unknown speaker {speaker!r}")
        content: Any = said.get("value", said.get("content"))
        if str(speaker).lower() in ("function_call", "tool_call"):
            messages.append({"role": role, "content": None, "tool_calls": [_call(content)]})
        else:
            name = {"name": said["name"]} if isinstance(said.get("name"), str) else {}
            messages.append({"role": role, "content": content, **name})
    return messages


def _call(content: Any) -> JsonDict:
    """A tool call, written as JSON with name and arguments."""
    try:
        call = json.loads(content) if isinstance(content, str) else content
    except ValueError:
        call = None
    if not isinstance(call, dict) or "name" not in call:
        raise Unreadable("a function call that is no JSON object with a name")
    fields = cast("JsonDict", call)
    arguments = fields.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"type": "function", "function": {"name": fields["name"], "arguments": text}}
