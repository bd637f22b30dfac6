"""What is said about an engine started here, where options passed on to it change it.

Invariant: only what the engine really does is announced; what cannot be told is left unsaid.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

from marft_agents.schema import JsonDict
from marft_agents.serving.commands import LOGPROBS_MODE, SAMPLING_DEFAULTS

_OVERRIDE = "--override-generation-config"
_NEW_TOKENS = "max_new_tokens"


def announced_mode(engine_args: Sequence[str]) -> str:
    """The log-probability mode of an engine that was given these options."""
    modes = [value for name, value in _options(engine_args) if name == "--logprobs-mode"]
    return modes[-1] if modes else LOGPROBS_MODE


def announced_sampling(engine_args: Sequence[str]) -> JsonDict | None:
    """What the engine takes for settings that a request leaves out; ``None``: not known.

    ``tool_strict_level`` is among them where free tool calls are held to a form.
    """
    defaults: JsonDict = dict(SAMPLING_DEFAULTS)
    for name, value in _options(engine_args):
        if name == "--generation-config" and value != "vllm":
            return None
        if name == "--tool-strict-level":
            defaults["tool_strict_level"] = value
        if name.startswith(_OVERRIDE):
            changed = _changed(name.removeprefix(_OVERRIDE).removeprefix("."), value)
            if changed is None:
                return None
            defaults |= changed
    return defaults


def _changed(key: str, value: str) -> JsonDict | None:
    try:
        parsed: Any = json.loads(value)
    except ValueError:
        return None
    given = {key: parsed} if key else parsed
    if not isinstance(given, dict):
        return None
    fields = cast("JsonDict", given)
    known = {k: v for k, v in fields.items() if k in SAMPLING_DEFAULTS and v is not None}
    limit = fields.get(_NEW_TOKENS)
    return known | ({"max_tokens": limit} if limit is not None else {})


def _options(engine_args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, value) of each option; vLLM takes ``--a-b 1``, ``--a_b 1`` and ``--a-b=1``."""
    for place, word in enumerate(engine_args):
        if not word.startswith("--"):
            continue
        name, _, value = word.partition("=")
        following = engine_args[place + 1] if place + 1 < len(engine_args) else ""
        head, dot, key = name.partition(".")
        yield head.replace("_", "-") + dot + key, value or following
