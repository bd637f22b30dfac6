"""From chat messages to prompt ids, as vLLM does it.

Invariant: the messages reach the model's own chat template with every content as plain text, names,
tool calls (arguments as objects) and tool call ids kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from marft_agents.serving.local.protocol import ChatRequest, TokenizeRequest
from marft_agents.serving.local.refusal import Refusal
from marft_agents.serving.local.text import Tokenizer

_KEPT = ("name", "tool_call_id", "reasoning")
Message = dict[str, Any]


def render(
    tokenizer: Tokenizer, messages: Sequence[Message], request: ChatRequest | TokenizeRequest
) -> list[int]:
    """Prompt ids of a chat.

    Raises:
        Refusal: 400, for a model without a chat template or messages that it does not take.
    """
    if not tokenizer.chat_template:
        raise Refusal(400, "this model has no chat template; use /v1/completions")
    plain = [_plain(index, message) for index, message in enumerate(messages)]
    opening = request.add_generation_prompt and not request.continue_final_message
    try:
        text = tokenizer.apply_chat_template(
            plain,
            tools=request.tools or None,
            add_generation_prompt=opening,
            continue_final_message=request.continue_final_message,
            tokenize=False,
            **(request.chat_template_kwargs or {}),
        )
    except Exception as error:
        # The template is the model's code; whatever it raises is about these messages.
        raise Refusal(400, f"the chat template refused the messages: {error}") from error
    return encode(tokenizer, cast(str, text), special=False)


def encode(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    """Token ids of a text.

    Raises:
        Refusal: 400, for a text that is half of a character somewhere.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refusal(400, f"the text has a lone surrogate at character {error.start}") from error
    return list(tokenizer.encode(text, add_special_tokens=special))


def _plain(index: int, message: Message) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise Refusal(400, f"messages.{index}: role is {role!r}", param="messages")
    out: Message = {"role": role, "content": _text(index, message.get("content"))}
    out |= {key: message[key] for key in _KEPT if message.get(key) is not None}
    calls = message.get("tool_calls")
    if calls:
        out["tool_calls"] = [_call(index, call) for call in calls]
    return out


def _text(index: int, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refusal(400, f"messages.{index}: content is neither text nor parts", param="messages")
    texts: list[str] = []
    for part in cast("list[Any]", content):
        text: Any = part
        if isinstance(part, Mapping):
            fields = cast("Mapping[str, Any]", part)
            text = fields.get("text", fields.get("refusal"))
        if not isinstance(text, str):
            raise Refusal(400, f"messages.{index}: only text parts are served", param="messages")
        texts.append(text)
    return "\n".join(texts)


def _call(index: int, call: Any) -> Message:
    fields = cast("Mapping[str, Any]", call) if isinstance(call, Mapping) else {}
    function = fields.get("function")
    if not isinstance(function, Mapping):
        raise Refusal(400, f"messages.{index}: a tool call without a function", param="messages")
    named = cast("Mapping[str, Any]", function)
    arguments: Any = named.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    if not isinstance(arguments, dict):
        arguments = {}
    return {**fields, "function": {**named, "arguments": arguments}}
