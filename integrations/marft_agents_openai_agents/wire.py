"""The SDK's items in the form that they have on the wire of chat completions, nearly.

Invariant: nothing here raises for an item of an unknown kind; it stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel

from marft_agents.recording import Unseen, jsonable


def unseen(
    system: Any, items: Any, output: Sequence[Any] | None, *, cached: bool = False
) -> Unseen:
    """A call without a recorded HTTP request, as far as the SDK's objects tell."""
    messages = list(_messages(system, items))
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for item in map(_plain, output or ()):
        if item.get("type") == "message":
            texts.append(_text(item.get("content")))
        elif item.get("type") == "function_call":
            calls.append(_call(item))
    return Unseen(messages, "".join(texts) if texts else None, calls or None, cached=cached)


def last_words(task: Any) -> str | None:
    """The text that a run's input ends with, when it is a user's."""
    if isinstance(task, str):
        return task
    last: Any = cast("list[Any]", task)[-1] if isinstance(task, list) and task else None
    item = _plain(last)
    return _text(item.get("content")) if item.get("role") == "user" else None


def function_calls(output: Sequence[Any]) -> dict[str, tuple[str, Any]]:
    """Tool calls of a reply: call id → name, arguments."""
    plain = [_plain(item) for item in output]
    return {
        str(item["call_id"]): (str(item.get("name")), item.get("arguments"))
        for item in plain
        if item.get("type") == "function_call" and item.get("call_id")
    }


def _plain(item: Any) -> dict[str, Any]:
    if isinstance(item, BaseModel):
        return cast("dict[str, Any]", jsonable(item))
    return dict(cast("Mapping[str, Any]", item)) if isinstance(item, Mapping) else {}


def _messages(system: Any, items: Any) -> Iterator[dict[str, Any]]:
    if system:
        yield {"role": "system", "content": system}
    if isinstance(items, str):
        yield {"role": "user", "content": items}
        return
    for item in map(_plain, items or ()):
        kind = item.get("type")
        if item.get("role"):
            yield {"role": item["role"], "content": _text(item.get("content"))}
        elif kind == "function_call":
            yield {"role": "assistant", "content": None, "tool_calls": [_call(item)]}
        elif kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else _text(output)
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
        else:
            yield {"role": "unknown", "content": jsonable(item)}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [_plain(part).get("text") for part in cast("list[Any]", content)]
    return "".join(part for part in parts if isinstance(part, str))


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}
