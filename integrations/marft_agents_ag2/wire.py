"""AG2's events in the form that they have on the wire of chat completions, nearly.

Invariant: nothing here raises for an event of an unknown kind; it is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from marft_agents.recording import Unseen


def unseen(events: Sequence[Any], context: Any, response: Any, *, cached: bool) -> Unseen:
    """A call without a recorded HTTP request, as far as AG2's objects tell."""
    system = [{"role": "system", "content": p} for p in getattr(context, "prompt", ()) or ()]
    messages = [*system, *(m for event in events for m in _messages(event))]
    calls = [_call(c) for c in _calls(response)]
    return Unseen(messages, getattr(response, "content", None), calls or None, cached=cached)


def request_text(event: Any) -> str | None:
    """The text that a turn begins with."""
    return _text(getattr(event, "parts", None)) or None


def result_text(result: Any) -> str:
    """What a tool answered."""
    inner = getattr(result, "result", result)
    parts = getattr(inner, "parts", None)
    return _text(parts) if parts is not None else str(inner)


def _text(parts: Any) -> str:
    texts = [getattr(p, "content", None) or getattr(p, "data", None) for p in parts or ()]
    return "\n".join(t if isinstance(t, str) else str(t) for t in texts if t is not None)


def _messages(event: Any) -> Iterator[dict[str, Any]]:
    kind = type(event).__name__
    if kind.endswith("ModelRequest"):
        yield {"role": "user", "content": _text(event.parts)}
    elif kind == "ModelMessage":
        yield {"role": "assistant", "content": event.content}
    elif kind == "ModelResponse":
        calls = [_call(c) for c in _calls(event)]
        said = {"role": "assistant", "content": event.content}
        yield said | ({"tool_calls": calls} if calls else {})
    elif kind == "ToolResultsEvent":
        for result in event.results:
            text = result_text(result)
            yield {"role": "tool", "tool_call_id": result.parent_id, "content": text}


def _calls(response: Any) -> Sequence[Any]:
    return getattr(getattr(response, "tool_calls", None), "calls", None) or ()


def _call(call: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
