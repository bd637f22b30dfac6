"""Token ids for turns that were recorded as text only; for supervised training, on request.

Invariants: ids that were recorded are never made again. A prompt is what the model's own chat
template makes of the messages as they were sent, nothing added (no speaker names, no empty text as
``None``); a reply is its text and the token that ends a turn, which a reply cut by a length limit
does not get. A turn that cannot be rendered so is left out with the reason.

These ids may differ from the sampled ones, and the server may have used another template: good
enough to imitate a reply, useless for any ratio of probabilities. The definitions of the tools on
offer are not in the log, so they are not in these prompts. The caller says so aloud.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

from marft_agents.schema import Turn

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a content part to the field with its text."""
_MARKER = "marft-reply"
NO_OBJECT = "tool-call arguments that are no JSON object, rendered as recorded"
NO_TOOLS = "turn with tools, whose definitions the log does not hold and its prompt lacks"


class CannotRender(ValueError):
    """Why a turn's text gives no ids."""


class Tokenizer(Protocol):
    """What is asked of a transformers tokenizer."""

    eos_token_id: Any
    all_special_ids: Any

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Any) -> Any: ...


@dataclass(frozen=True)
class Rendered:
    """Prompt ids (P,), reply ids (L,), and what was odd about the text."""

    prompt_ids: list[int]
    token_ids: list[int]
    from_text: bool
    """False when both were recorded."""
    odd: list[str]


def renderer(model_dir: Path) -> TextRenderer:
    """A renderer with the tokenizer and chat template in a model's folder.

    Raises:
        ConfigError: when the folder has no tokenizer.
    """
    from marft_agents.training.adapters import load_tokenizer

    return TextRenderer(load_tokenizer(model_dir))


class TextRenderer:
    """Turns to token ids, by one tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def render(self, turn: Turn) -> Rendered:
        """The ids of a turn: those recorded, and in place of those missing what its text gives.

        Raises:
            CannotRender: with the reason.
        """
        if turn.prompt_token_ids and turn.token_ids:
            return Rendered(turn.prompt_token_ids, turn.token_ids, False, [])
        if not turn.messages:
            raise CannotRender("no token ids and no messages")
        odd: list[str] = []
        messages = [_message(message, odd) for message in turn.messages]
        if turn.tool_calls or any(message.get("tool_calls") for message in messages):
            odd.append(NO_TOOLS)
        prompt = self._template(messages, add_generation_prompt=True)
        if turn.token_ids:
            return Rendered(self._encode(prompt), turn.token_ids, True, odd)
        if turn.tool_calls:
            said = {"role": "assistant", "content": turn.text, "tool_calls": turn.tool_calls}
            reply = self._tool_call(prompt, messages, _message(said, odd))
        elif turn.text:
            reply = turn.text
        else:
            raise CannotRender("no token ids and no text")
        prompt_ids, reply_ids = self._split(prompt, reply)
        if turn.finish_reason != "length":
            reply_ids.append(self._end_of_turn)
        return Rendered(turn.prompt_token_ids or prompt_ids, reply_ids, True, odd)

    def _template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        try:
            return self._tokenizer.apply_chat_template(list(messages), tokenize=False, **kwargs)
        except Exception as error:  # a template is a foreign program
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise CannotRender(f"the chat template refuses its messages: {first[:80]}") from error

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _split(self, prompt: str, reply: str) -> tuple[list[int], list[int]]:
        """Ids of both; the reply's as they follow the prompt, where the border is a token's."""
        prompt_ids, together = self._encode(prompt), self._encode(prompt + reply)
        if together[: len(prompt_ids)] == prompt_ids and len(together) > len(prompt_ids):
            return prompt_ids, together[len(prompt_ids) :]
        return prompt_ids, self._encode(reply)

    def _tool_call(
        self, prompt: str, messages: Sequence[Mapping[str, Any]], said: Mapping[str, Any]
    ) -> str:
        """What the template writes for a reply with tool calls, up to the end of the turn."""
        full = self._template([*messages, said])
        if not full.startswith(prompt):
            raise CannotRender("tool calls that the chat template writes before the reply's place")
        reply = full[len(prompt) :].split(self._tokenizer.decode([self._end_of_turn]), 1)[0]
        names = [str(call["function"].get("name")) for call in said["tool_calls"]]
        if not all(name in reply for name in names):
            raise CannotRender("tool calls that the chat template leaves out")
        return reply.rstrip("\n")

    @cached_property
    def _end_of_turn(self) -> int:
        """The special token that the template puts after a reply; else the end of text."""
        try:
            full = self._template(
                [{"role": "user", "content": "hi"}, {"role": "assistant", "content": _MARKER}]
            )
        except CannotRender:
            return self._tokenizer.eos_token_id
        after = self._encode(full.rpartition(_MARKER)[2])
        special = after and after[0] in self._tokenizer.all_special_ids
        return after[0] if special else self._tokenizer.eos_token_id


def _message(message: Mapping[str, Any], odd: list[str]) -> dict[str, Any]:
    """A wire message as templates want it: text content, tool calls with objects as arguments."""
    out = {**message, "content": _content(message.get("content"))}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        out["tool_calls"] = [_call(call, odd) for call in cast("list[Any]", calls)]
    return out


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = cast("list[Any]", content) if isinstance(content, list) else [content]
    return "\n".join(map(_part, parts))


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
    kind = str(fields.get("type", type(part).__name__))
    text = fields.get(_TEXT_PARTS.get(kind, ""))
    if not isinstance(text, str):
        raise CannotRender(f"a message holds a part of type {kind!r}, which is no text")
    return text


def _call(call: Any, odd: list[str]) -> dict[str, Any]:
    fields = dict(cast("Mapping[str, Any]", call)) if isinstance(call, Mapping) else {}
    function = fields.get("function")
    if not isinstance(function, Mapping):
        raise CannotRender("a tool call without a function")
    known = dict(cast("Mapping[str, Any]", function))
    known["arguments"] = _arguments(known.get("arguments"), odd)
    return {**fields, "function": known}


def _arguments(arguments: Any, odd: list[str]) -> Any:
    """Arguments as an object, decoded at most once; whatever is none is kept as it is."""
    if arguments is None or arguments == "":
        return {}
    decoded = arguments
    if isinstance(arguments, str):
        try:
            decoded = json.loads(arguments)
        except ValueError:
            decoded = None
    if isinstance(decoded, dict):
        return cast("dict[str, Any]", decoded)
    odd.append(NO_OBJECT)
    return arguments


class _Row(Protocol):
    @property
    def agent(self) -> str: ...
    @property
    def from_text(self) -> bool: ...


def text_lines(rows: Iterable[_Row]) -> list[str]:
    """The warning that is due when some rows' ids were made from text; empty otherwise."""
    agents = [row.agent for row in rows if row.from_text]
    if not agents:
        return []
    return [
        f"WARNING: {len(agents)} turns have no recorded ids ({', '.join(sorted(set(agents)))});"
        " their text is encoded again for sft, by the base's own chat template, and may differ"
        " from what was sampled. Record with token ids for anything else"
    ]
