"""What is said about an engine started here, and what is pinned so that it can be said.

Invariant: only what the engine really does is announced. Whatever options, files and parsers add to
the sampling stands in the announcement, where recorders mark turns by it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from marft_agents.errors import ConfigError
from marft_agents.schema import JsonDict
from marft_agents.serving.commands import LOGPROBS_MODE, SAMPLING_DEFAULTS
from marft_agents.serving.engine_args import Option, given_value, read_options, structured, without

_SOURCE, _OVERRIDE = "--generation-config", "--override-generation-config"
_NEW_TOKENS = "max_new_tokens"
_STRICT = "--tool-strict-level"
_HELD_LEVELS = ("function", "parameter")


def announced_mode(engine_args: Sequence[str]) -> str:
    """The log-probability mode of an engine that was given these options."""
    return given_value(read_options(engine_args), "--logprobs-mode") or LOGPROBS_MODE


def pinned_generation(engine_args: Sequence[str], model_dir: Path) -> tuple[str, ...]:
    """The options with every sampling default written out, where some come from elsewhere.

    Which fields of a ``generation_config.json`` an engine heeds depends on its version; written out
    they hold in any.

    Raises:
        ConfigError: when they are not readable.
    """
    options = read_options(engine_args)
    if not any(option.head in (_SOURCE, _OVERRIDE) for option in options):
        return tuple(engine_args)
    fields = SAMPLING_DEFAULTS | _from_file(options, model_dir) | structured(options, _OVERRIDE)
    kept = without(engine_args, options, _OVERRIDE)
    return (*kept, _OVERRIDE, json.dumps({k: v for k, v in fields.items() if v is not None}))


def announced_sampling(engine_args: Sequence[str], *, calls_held: bool = False) -> JsonDict:
    """What the engine takes for settings that a request leaves out.

    With it stand ``tool_strict_level`` where free tool calls are held to a form, and what else
    changes which token is drawn, by the names that recorders know.

    Args:
        engine_args: as ``pinned_generation`` returns them.
        calls_held: whether the tool parser holds calls to a form by itself.

    Raises:
        ConfigError: for options that cannot be read.
    """
    options = read_options(engine_args)
    given = structured(options, _OVERRIDE)
    out: JsonDict = dict(SAMPLING_DEFAULTS)
    out |= {k: v for k, v in given.items() if k in SAMPLING_DEFAULTS and v is not None}
    if given.get(_NEW_TOKENS) is not None:
        out["max_tokens"] = given[_NEW_TOKENS]
    level = given_value(options, _STRICT)
    if level is not None:
        out["tool_strict_level"] = level
    if calls_held and level not in _HELD_LEVELS:
        out["tool_strict_level"] = "function"
    if processors := [o.value for o in options if o.name == "--logits-processors"]:
        out["logits_processors"] = processors
    if any(option.head == "--watermark-config" for option in options):
        out["watermarking"] = True
    return out


def _from_file(options: Sequence[Option], model_dir: Path) -> JsonDict:
    source = given_value(options, _SOURCE) or "vllm"
    if source == "vllm":
        return {}
    folder = model_dir if source == "auto" else Path(source).expanduser()
    path = folder / "generation_config.json"
    try:
        parsed: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if source == "auto":
            return {}
        raise ConfigError(f"--engine-arg {_SOURCE} {source}: there is no {path}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"--engine-arg {_SOURCE} {source}: {path} is not readable") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"--engine-arg {_SOURCE} {source}: {path} is no JSON object")
    fields = cast("JsonDict", parsed)
    return {k: fields[k] for k in (*SAMPLING_DEFAULTS, _NEW_TOKENS) if fields.get(k) is not None}
