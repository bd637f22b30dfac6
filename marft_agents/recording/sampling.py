"""Which sampling settings were in effect for one request.

Invariant: a value is what the request asked for, else what the server announced, else ``None``;
it is never a guess at a server's default.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, cast

from marft_agents.schema import JsonDict, LogprobMode, Sampling

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_INTS = ("top_k", "max_tokens", "seed")
_GRAMMARS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
)


def sampling_of(request: Mapping[str, Any], defaults: Mapping[str, Any]) -> Sampling:
    """Settings of a chat completion request, filled up with the server's announced defaults."""
    asked = dict(request)
    if asked.get("max_tokens") is None:
        asked["max_tokens"] = asked.get("max_completion_tokens")
    values: dict[str, Any] = {}
    for name in _FLOATS:
        values[name] = _number(_first(asked, defaults, name))
    for name in _INTS:
        number = _number(_first(asked, defaults, name))
        values[name] = None if number is None else int(number)
    return Sampling(
        **values, stop=_stop(_first(asked, defaults, "stop")), grammar=constrained(request)
    )


def constrained(request: Mapping[str, Any]) -> bool:
    """Whether a forced tool call or an output format masks tokens while sampling."""
    choice = request.get("tool_choice")
    if choice == "required" or isinstance(choice, Mapping):
        return True
    output = request.get("response_format")
    if isinstance(output, Mapping):
        kind = cast("Mapping[str, Any]", output).get("type")
        if kind not in (None, "text"):
            return True
    return any(request.get(name) is not None for name in _GRAMMARS)


def announced_defaults(header: str | None) -> JsonDict:
    """The ``X-Marft-Sampling-Defaults`` header; ``{}`` when absent or unreadable."""
    if not header:
        return {}
    try:
        parsed = json.loads(header)
    except (ValueError, RecursionError):
        return {}
    return cast("JsonDict", parsed) if isinstance(parsed, dict) else {}


def announced_mode(header: str | None) -> LogprobMode | None:
    """``processed_logprobs`` → ``processed``, ``raw_logprobs`` → ``raw``, else ``None``."""
    word = (header or "").strip().lower()
    if word.startswith("processed"):
        return "processed"
    return "raw" if word.startswith("raw") else None


def _first(asked: Mapping[str, Any], defaults: Mapping[str, Any], name: str) -> Any:
    value = asked.get(name)
    return defaults.get(name) if value is None else value


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _stop(value: Any) -> list[str] | None:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        words = [w for w in cast("list[Any]", value) if isinstance(w, str)]
        return words or None
    return None
