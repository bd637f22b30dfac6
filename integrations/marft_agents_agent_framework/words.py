"""Agent Framework's messages in plain forms: for the log, and as they are on the wire, nearly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from agent_framework import Content, Message

from marft_agents.recording import Unseen


def plain(value: Any) -> Any:
    """A task: messages become ``{"role", "content"}``, everything else stays."""
    if isinstance(value, Message):
        return {"role": str(value.role), "content": value.text}
    if isinstance(value, list | tuple):
        items: Sequence[Any] = cast("Sequence[Any]", value)
        return [plain(item) for item in items]
    return value


def spoken(value: Any) -> str:
    """What a human answered, as text."""
    if isinstance(value, str):
        return value
    if isinstance(value, Message):
        return value.text
    if isinstance(value, Content):
        return _answer(value)
    if isinstance(value, list | tuple):
        items: Sequence[Any] = cast("Sequence[Any]", value)
        return "\n".join(spoken(item) for item in items)
    for name in ("messages", "review"):  # what the orchestrations make of an answer
        messages: Any = getattr(value, name, None)
        if isinstance(messages, list):
            return spoken(messages)
    return str(value)


def _answer(content: Content) -> str:
    if content.type == "function_approval_response":
        name = getattr(content.function_call, "name", None)
        return f"{'approved' if content.approved else 'rejected'} {name or 'a call'}"
    return str(content.text if content.text is not None else content.result)


def contents(messages: Any, kind: str) -> Iterable[Any]:
    """The contents of one type in ``messages``, in order."""
    many: Sequence[Any] = cast("Sequence[Any]", messages) if isinstance(messages, list) else ()
    for message in many or ((messages,) if isinstance(messages, Message) else ()):
        for content in getattr(message, "contents", None) or ():
            if getattr(content, "type", None) == kind:
                yield content


def unseen(messages: Sequence[Any], response: Any, *, cached: bool = False) -> Unseen:
    """A call without a request that could be seen, as far as the framework's objects tell."""
    said: Sequence[Any] = getattr(response, "messages", None) or ()
    calls = [_wire_call(c) for c in contents(list(said), "function_call")]
    text = getattr(response, "text", None) or (None if calls else "")
    wire = [w for m in messages for w in _wire(m)]
    return Unseen(wire, text if response is not None else None, calls or None, cached=cached)


def _wire_call(content: Any) -> dict[str, Any]:
    arguments = content.arguments
    function = {"name": content.name, "arguments": arguments if arguments is not None else ""}
    return {"id": content.call_id, "type": "function", "function": function}


def _wire(message: Any) -> Iterable[dict[str, Any]]:
    for result in contents([message], "function_result"):
        yield {"role": "tool", "tool_call_id": result.call_id, "content": str(result.result)}
    calls = [_wire_call(c) for c in contents([message], "function_call")]
    text = getattr(message, "text", "") or ""
    if not (text or calls):
        return
    wire: dict[str, Any] = {"role": str(message.role), "content": text}
    if message.author_name:
        wire["name"] = message.author_name
    yield wire | ({"tool_calls": calls} if calls else {})
