"""What one chat completion answered, streamed or not, in one shape.

Invariant: ids and log-probabilities are the server's, in its order; nothing is added, repaired or
derived from text. A reply whose ids do not add up to the usage that the server reports, text that
came without its ids, a reply that the server broke off, and a stream that stopped before every
choice had a finish reason are not complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from marft_agents.recording.jsontext import mapping, mappings
from marft_agents.schema import JsonDict

_BROKEN_OFF = frozenset({"abort", "error"})
"""Finish reasons of replies that the engine gave up."""


@dataclass(slots=True)
class Choice:
    """One of the ``n`` answers; ``token_ids`` (L,) and ``logprobs`` (L,) as received."""

    index: int = 0
    text: str | None = None
    reasoning: str | None = None
    tool_calls: list[JsonDict] | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    counted: int | None = field(default=None, compare=False)
    """Tokens of this choice, as a stream with running usage reports them."""
    gap: bool = field(default=False, compare=False)
    """Whether some of its text came without ids."""
    places: dict[int, JsonDict] = field(default_factory=dict[int, JsonDict], compare=False)
    """Tool calls of a stream, by the index that the server gives them."""

    def read_tokens(self, raw: Mapping[str, Any]) -> bool:
        """Append the ids and log-probabilities that ``raw`` (a choice or a delta) carries.

        Returns whether it carries ids.
        """
        content = mapping(raw.get("logprobs")).get("content")
        if isinstance(content, list):
            self.logprobs = self.logprobs if self.logprobs is not None else []
            self.logprobs.extend(_logprobs(cast("list[Any]", content)))
        reason = raw.get("finish_reason")
        if isinstance(reason, str):
            self.finish_reason = reason
        ids = token_ids(raw.get("token_ids"))
        if ids is None:
            return False
        self.token_ids = self.token_ids if self.token_ids is not None else []
        self.token_ids.extend(ids)
        return True


@dataclass(slots=True)
class Reply:
    """A chat completion; ``streamed`` ones are filled chunk by chunk."""

    streamed: bool = False
    expected: int = 1
    response_id: str | None = None
    first_model: str | None = None
    last_model: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_tokens: int | None = None
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
        self.prompt_token_ids = token_ids(body.get("prompt_token_ids")) or self.prompt_token_ids
        if body.get("error"):
            self.error = error_text(body)

    def read_usage(self, body: Mapping[str, Any]) -> None:
        """Read the token counts of the whole reply."""
        usage = mapping(body.get("usage"))
        self.completion_tokens = _count(usage, "completion_tokens", self.completion_tokens)
        self.prompt_tokens = _count(usage, "prompt_tokens", self.prompt_tokens)

    @property
    def finished(self) -> bool:
        """Whether every choice asked for has its finish reason."""
        waiting = self.expected
        for choice in self.choices.values():
            waiting -= choice.finish_reason is not None
        return waiting <= 0

    def complete(self, choice: Choice) -> bool:
        """Whether all of this choice's tokens arrived."""
        reason = choice.finish_reason
        if reason in _BROKEN_OFF or (reason is None and self.streamed):
            return False
        return self._adds_up() and not (choice.token_ids and not _whole(choice))

    def _adds_up(self) -> bool:
        ids = sum(len(c.token_ids or ()) for c in self.choices.values())
        if ids and self.completion_tokens not in (None, ids):
            return False
        prompt = len(self.prompt_token_ids or ())
        return not prompt or self.prompt_tokens in (None, prompt)


def _whole(choice: Choice) -> bool:
    return not choice.gap and choice.counted in (None, len(choice.token_ids or ()))


def completion(body: Mapping[str, Any], expected: int = 1) -> Reply:
    """A reply that came in one piece."""
    reply = Reply(expected=expected)
    reply.read_common(body)
    reply.read_usage(body)
    for position, raw in enumerate(mappings(body.get("choices"))):
        choice = reply.choice(index_of(raw, position))
        choice.read_tokens(raw)
        message = mapping(raw.get("message"))
        choice.text = said(message)
        choice.reasoning = reasoned(message)
        choice.tool_calls = [dict(c) for c in mappings(message.get("tool_calls"))] or None
        legacy = message.get("function_call")
        if choice.tool_calls is None and isinstance(legacy, dict):
            choice.tool_calls = [legacy_call(cast("JsonDict", legacy))]
    return reply


def said(message: Mapping[str, Any]) -> str | None:
    """The words of a message or delta: its content, else its refusal or what it spoke."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_texts(cast("list[Any]", content)))
    if isinstance(content, str) and content:
        return content
    for other in (message.get("refusal"), mapping(message.get("audio")).get("transcript")):
        if isinstance(other, str):
            return other
    return content if isinstance(content, str) else None


def _texts(parts: list[Any]) -> list[str]:
    texts = [mapping(part).get("text") for part in parts]
    return [text for text in texts if isinstance(text, str)]


def reasoned(message: Mapping[str, Any]) -> str | None:
    """The reasoning of a message or delta, under either of its names."""
    for name in ("reasoning", "reasoning_content"):
        if isinstance(message.get(name), str):
            return message[name]
    return None


def legacy_call(function: Mapping[str, Any]) -> JsonDict:
    """A ``function_call`` of the time before ``tool_calls``, in today's shape."""
    return {"id": "", "type": "function", "function": dict(function)}


def error_text(body: Any) -> str:
    """The message of an error body in any of the usual shapes."""
    error = mapping(body).get("error", body)
    message = mapping(error).get("message") or mapping(body).get("detail") or error
    return str(message)


def token_ids(value: Any) -> list[int] | None:
    """A list of integers, else ``None``; the list is the caller's from now on."""
    if not isinstance(value, list):
        return None
    ids = cast("list[Any]", value)
    try:
        total: Any = sum(ids)  # the quickest look at every one of them
    except TypeError:
        return None
    return ids if isinstance(total, int) else None


def index_of(raw: Mapping[str, Any], default: int) -> int:
    index = raw.get("index")
    return index if isinstance(index, int) and 0 <= index < 1024 else default


def _logprobs(content: list[Any]) -> list[float]:
    try:
        return [float(item["logprob"]) for item in content]
    except (TypeError, KeyError, ValueError, OverflowError):
        return [_logprob(item) for item in content]


def _logprob(item: Any) -> float:
    value = mapping(item).get("logprob")
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:  # an integer of hundreds of digits
        return float("nan")


def _count(usage: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) else default
