"""Which sampling settings were in effect for one request.

Invariant: a value is what the request asked for, else what the server announced, else ``None``;
it is never a guess at a server's default. Whatever forbade, forced or reweighted tokens, or chose
among several replies, leaves its mark: such a reply is no plain sample of the policy.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any, cast

from marft_agents.recording.jsontext import mapping, mappings
from marft_agents.schema import JsonDict, LogprobMode, Sampling

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_INTS = ("top_k", "max_tokens", "seed", "min_tokens")
_GRAMMARS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
)
"""Of vLLM (old and new), SGLang and llama.cpp; an engine ignores those that it does not know."""
_SHAPING = (
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "thinking_token_budget",
    "watermarking",
    "vllm_xargs",
    "logits_processors",
    "custom_logit_processor",
    "typical_p",
    "no_repeat_ngram_size",
)
"""Fields that change which token is drawn, beyond those that ``Sampling`` has by name."""
_NO_SETTINGS = frozenset(
    {
        "messages", "model", "user", "metadata", "stream", "stream_options", "logprobs",
        "top_logprobs", "return_token_ids",
    }
)  # fmt: skip
"""Fields of nearly every request that say nothing of how its tokens are drawn."""
_WITHOUT_EFFECT = (None, False, 0, "", [], {})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "thinking_token_budget": (None, -1),
    "typical_p": (None, 1),
}


def sampling_in_effect(
    request: Mapping[str, Any], announced: str | None, *, plain_answer: bool = False
) -> Sampling:
    """``sampling_of`` a request to a server with this header of defaults.

    An application asks for the same settings again and again; they are worked out once.
    """
    asked = tuple((k, type(v), v) for k, v in request.items() if k not in _NO_SETTINGS)
    try:
        return _known_sampling(asked, announced, plain_answer)
    except TypeError:  # a list or an object among them
        defaults = announced_defaults(announced)
        return sampling_of(request, defaults, plain_answer=plain_answer)


@functools.lru_cache(maxsize=256)
def _known_sampling(
    asked: tuple[tuple[str, type, Any], ...], announced: str | None, plain_answer: bool
) -> Sampling:
    request = {name: value for name, _, value in asked}
    return sampling_of(request, announced_defaults(announced), plain_answer=plain_answer)


def sampling_of(
    request: Mapping[str, Any], defaults: Mapping[str, Any], *, plain_answer: bool = False
) -> Sampling:
    """Settings of a chat completion request, filled up with the server's announced defaults.

    ``plain_answer``: the reply ended by itself and calls no tool.
    """
    asked = {**defaults, **{k: v for k, v in request.items() if v is not None}}
    if request.get("max_completion_tokens") is not None:  # the one that counts where both are given
        asked["max_tokens"] = request["max_completion_tokens"]
    values: dict[str, Any] = {name: _number(asked[name]) for name in _FLOATS if name in asked}
    for name in _INTS:
        number = _number(asked[name]) if name in asked else None
        values[name] = None if number is None else int(number)
    return Sampling(
        **values,
        stop=_stop(asked.get("stop")),
        stop_token_ids=_ids(asked.get("stop_token_ids")),
        ignore_eos=_truth(asked.get("ignore_eos")),
        grammar=constrained(request, defaults, plain_answer=plain_answer),
        shaped_by=shaped_by(asked),
        searched=searched(request),
    )


def constrained(
    request: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    *,
    plain_answer: bool = False,
) -> bool:
    """Whether a forced tool call or an output format masks tokens while sampling."""
    choice = request.get("tool_choice")
    if choice == "required" or isinstance(choice, dict):
        return True
    if isinstance(request.get("function_call"), dict):
        return True
    if mapping(request.get("response_format")).get("type") not in (None, "text"):
        return True
    if any(request.get(name) is not None for name in _GRAMMARS):
        return True
    # From the first token of a call on, vLLM holds these to the form of a call; text stays free.
    return not plain_answer and _calls_held_to_a_form(request, defaults or {})


def _calls_held_to_a_form(request: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    tools = mappings(request.get("tools"))
    if not tools or request.get("tool_choice") == "none":
        return False
    if request.get("parallel_tool_calls") is False:
        return True
    if defaults.get("tool_strict_level") in ("function", "parameter"):
        return True
    return any(
        mapping(tool.get("function")).get("strict") is True or tool.get("type") == "custom"
        for tool in tools
    )


def shaped_by(asked: Mapping[str, Any]) -> list[str]:
    """Names of the settings that forbade, forced or reweighted single tokens."""
    return [
        name
        for name in _SHAPING
        if name in asked and asked[name] not in _NEUTRAL.get(name, _WITHOUT_EFFECT)
    ]


def searched(request: Mapping[str, Any]) -> bool:
    """Whether the reply was chosen among several that were generated."""
    best_of, n = _number(request.get("best_of")), _number(request.get("n"))
    return bool(request.get("use_beam_search")) or (best_of or 0) > max(n or 1, 1)


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
    known: dict[str, LogprobMode] = {
        "processed": "processed",
        "processed_logprobs": "processed",
        "raw": "raw",
        "raw_logprobs": "raw",
    }
    return known.get((header or "").strip().lower())


def announced_logits(header: str | None) -> bool:
    """Whether what the server calls log-probabilities are logits."""
    return (header or "").strip().lower().endswith("logits")


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _truth(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _ids(value: Any) -> list[int] | None:
    if not isinstance(value, list):
        return None
    ids = [i for i in cast("list[Any]", value) if isinstance(i, int) and not isinstance(i, bool)]
    return ids or None


def _stop(value: Any) -> list[str] | None:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        words = [w for w in cast("list[Any]", value) if isinstance(w, str)]
        return words or None
    return None
