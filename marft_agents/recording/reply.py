"""What one chat completion answered, streamed or not, in one shape.

Invariant: ids and log-probabilities are the server's, in its order; nothing is added, repaired or
derived from text. A stream that stopped before every choice had a finish reason is not complete,
and neither is a reply whose ids do not add up to the reported usage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from marft_agents.schema import JsonDict


@dataclass(slots=True)
class Choice:
    """One of the ``n`` answers; ``token_ids`` (L,) and ``logprobs`` (L,) as received."""

    index: int = 0
    text: str | None = None
    tool_calls: list[JsonDict] | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None

    def read_tokens(self, raw: Mapping[str, Any]) -> None:
        """Append the ids and log-probabilities that ``raw`` (a choice or a delta) carries."""
        ids = raw.get("token_ids")
        if isinstance(ids, list):
            self.token_ids = [*(self.token_ids or ()), *(int(i) for i in cast("list[Any]", ids))]
        content = _mapping(raw.get("logprobs")).get("content")
        if isinstance(content, list):
            values = [_logprob(item) for item in cast("list[Any]", content)]
            self.logprobs = [*(self.logprobs or ()), *values]
        if isinstance(raw.get("finish_reason"), str):
            self.finish_reason = raw["finish_reason"]


@dataclass(slots=True)
class Reply:
    """A chat completion; ``streamed`` ones are filled chunk by chunk."""

    streamed: bool = False
    expected: int = 1
    response_id: str | None = None
    first_model: str | None = None
    last_model: str | None = None
    prompt_token_ids: list[int] | None = None
    completion_tokens: int | None = None
    choices: dict[int, Choice] = field(default_factory=dict[int, Choice])
    error: str | None = None

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice(index))

    def read_common(self, body: Mapping[str, Any]) -> None:
        """Read what completions and chunks have in common."""
        if isinstance(body.get("id"), str) and body["id"]:
            self.response_id = body["id"]
        if isinstance(body.get("model"), str) and body["model"]:
            self.last_model = body["model"]
            self.first_model = self.first_model or self.last_model
        prompt = body.get("prompt_token_ids")
        if isinstance(prompt, list):
            self.prompt_token_ids = [int(i) for i in cast("list[Any]", prompt)]
        tokens = _mapping(body.get("usage")).get("completion_tokens")
        if isinstance(tokens, int):
            self.completion_tokens = tokens
        if body.get("error"):
            self.error = error_text(body)

    @property
    def finished(self) -> bool:
        """Whether every choice asked for has its finish reason."""
        done = sum(c.finish_reason is not None for c in self.choices.values())
        return done >= self.expected

    def complete(self, choice: Choice) -> bool:
        """Whether all of this choice's tokens arrived."""
        ids = sum(len(c.token_ids or ()) for c in self.choices.values())
        counted = self.completion_tokens
        adds_up = not ids or counted is None or counted == ids
        return adds_up and (choice.finish_reason is not None or not self.streamed)


def completion(body: Mapping[str, Any], expected: int = 1) -> Reply:
    """A reply that came in one piece."""
    reply = Reply(expected=expected)
    reply.read_common(body)
    for position, raw in enumerate(_mappings(body.get("choices"))):
        choice = reply.choice(_index(raw, position))
        choice.read_tokens(raw)
        message = _mapping(raw.get("message"))
        content = message.get("content")
        choice.text = content if isinstance(content, str) else None
        choice.tool_calls = [dict(c) for c in _mappings(message.get("tool_calls"))] or None
    return reply


class StreamReader:
    """Server-sent events, fed as bytes in any cut, folded into ``reply``."""

    def __init__(self, expected: int = 1) -> None:
        self.reply = Reply(streamed=True, expected=expected)
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        *lines, self._tail = (self._tail + data).split(b"\n")
        for line in lines:
            self._line(line.rstrip(b"\r"))

    def end(self) -> None:
        """The body is over: read an event that has no blank line after it."""
        if self._tail:
            self._line(self._tail.rstrip(b"\r"))
            self._tail = b""
        self._dispatch()

    def _line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line:
            self._dispatch()

    def _dispatch(self) -> None:
        event, self._data = b"\n".join(self._data).strip(), []
        if not event or event == b"[DONE]":
            return
        try:
            chunk = json.loads(event)
        except ValueError:
            return  # cut in the middle of an event: what came before still counts
        if isinstance(chunk, dict):
            self._chunk(cast("JsonDict", chunk))

    def _chunk(self, chunk: JsonDict) -> None:
        self.reply.read_common(chunk)
        for position, raw in enumerate(_mappings(chunk.get("choices"))):
            choice = self.reply.choice(_index(raw, position))
            choice.read_tokens(raw)
            delta = _mapping(raw.get("delta"))
            content = delta.get("content")
            if isinstance(content, str) and (content or not choice.tool_calls):
                choice.text = (choice.text or "") + content
            for call in _mappings(delta.get("tool_calls")):
                _merge_call(choice, call)


def _merge_call(choice: Choice, delta: Mapping[str, Any]) -> None:
    choice.text = choice.text or None  # streams open with an empty text where replies have none
    calls = choice.tool_calls = choice.tool_calls if choice.tool_calls is not None else []
    index = _index(delta, max(len(calls) - 1, 0))
    while len(calls) <= index:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[index]
    if isinstance(delta.get("id"), str):
        call["id"] = delta["id"] or call["id"]
    function = _mapping(delta.get("function"))
    for name in ("name", "arguments"):
        if isinstance(function.get(name), str):
            call["function"][name] += function[name]


def error_text(body: Any) -> str:
    """The message of an error body in any of the usual shapes."""
    error = _mapping(body).get("error", body)
    message = _mapping(error).get("message") or _mapping(body).get("detail") or error
    return str(message)


def _logprob(item: Any) -> float:
    value = _mapping(item).get("logprob")
    return float(value) if isinstance(value, int | float) else float("nan")


def _index(raw: Mapping[str, Any], default: int) -> int:
    index = raw.get("index")
    return index if isinstance(index, int) and 0 <= index < 1024 else default


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list):
        return []
    return [cast("Mapping[str, Any]", v) for v in cast("list[Any]", value) if isinstance(v, dict)]
