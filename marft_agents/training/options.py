"""Settings from a YAML file and from the command line.

Invariant: the command line overrides the file, the file overrides the defaults; a key nobody knows
is refused with the nearest known one, and a value of the wrong type with the field's type. Numbers
that YAML reads as text (``1e-4``) are numbers here.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from marft_agents.errors import ConfigError

_HUB = "nothing; publish an adapter folder with the hub's own tools"
_COMPARE = "nothing; compare the served versions on held-out tasks instead"
_NO_DATA = "nothing; turns are dealt out in packs, without columns or workers"
_LAUNCH = "torchrun: every process holds the base model, and the turns are dealt out to them"
CHOICES: dict[str, tuple[str, ...]] = {
    "offline": ("awr", "ppo", "sft", "kto", "dpo", "none"),
    "estimator": ("marft", "group", "ippo", "single"),
    "level": ("action", "token"),
    "schedule": ("sequential", "alternate", "simultaneous"),
}
"""Of settings that the command line has flags for."""
MANAGED = {
    "output_dir": "--output",
    "max_steps": "num_train_epochs (logs), iterations and update_epochs (online)",
    "resume_from_checkpoint": "--resume, from Python finetune(..., resume=True)",
    "remove_unused_columns": "nothing; rows have no columns",
    "push_to_hub": _HUB,
    "hub_model_id": _HUB,
    "eval_strategy": _COMPARE,
    "eval_on_start": _COMPARE,
    "load_best_model_at_end": "marft-agents swap, which goes back to any version",
    "auto_find_batch_size": "pack_tokens, which bounds what a pass holds",
    "per_device_eval_batch_size": _COMPARE,
    "fp16": "dtype, the type of the base's weights; adapters are float32",
    "bf16": "dtype, the type of the base's weights; adapters are float32",
    "neftune_noise_alpha": "nothing; noise would change the recorded policy",
    "label_smoothing_factor": "nothing; a smoothed loss is none of these objectives",
    "use_liger_kernel": "nothing; turns are scored in packs of their own",
    "optim_target_modules": "lora_target_modules",
    "data_seed": "seed",
    "label_names": _NO_DATA,
    "length_column_name": _NO_DATA,
    "dataloader_num_workers": _NO_DATA,
    "dataloader_drop_last": _NO_DATA,
    "ignore_data_skip": "--resume, which always goes on at the step it stopped at",
    "save_only_model": "--resume, which needs everything that a checkpoint holds",
    "eval_steps": _COMPARE,
    "metric_for_best_model": _COMPARE,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "liger_kernel_config": "nothing; turns are scored in packs of their own",
    "deepspeed": _LAUNCH,
    "fsdp": _LAUNCH,
    "parallelism_config": _LAUNCH,
}
"""Fields that the command itself sets, and what to use in their place."""


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: when it is missing, no YAML, or no mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config {path}: {error}") from error
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path} is no valid YAML{where}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, not a {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def read_assignments(pairs: Sequence[str]) -> dict[str, Any]:
    """``key=value`` pairs of the command line; values are read as YAML.

    Raises:
        ConfigError: for a pair without ``=``.
    """
    out: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set takes key=value, not {pair!r}")
        try:
            out[key.strip()] = yaml.safe_load(text)
        except yaml.YAMLError:
            out[key.strip()] = text
    return out


def merge(config: type[Any], layers: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Fields for a dataclass from layers ``(where, values)``, the later ones winning.

    Raises:
        ConfigError: for an unknown or managed key, or a value of the wrong type.
    """
    hints = typing.get_type_hints(config)
    known = {f.name for f in dataclasses.fields(config) if f.init}
    out: dict[str, Any] = {}
    for where, values in layers:
        for key, value in values.items():
            if key in MANAGED:
                raise ConfigError(f"{where}: {key} is not set here; use {MANAGED[key]}")
            if key not in known:
                near = get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"{where}: unknown setting {key!r}{hint}")
            out[key] = coerce(value, hints[key], f"{where}: {key}")
            if key == "adapters":
                out[key] = _of_adapters(out[key], hints, where)
    return out


def _of_adapters(settings: Mapping[str, Any], hints: Mapping[str, Any], where: str) -> Any:
    """The settings of single adapters, each of the type that it has for all of them."""
    return {
        adapter: {
            name: coerce(value, hints[name], f"{where}: adapters: {adapter}: {name}")
            if name in hints
            else value
            for name, value in own.items()
        }
        if isinstance(own, Mapping)
        else own
        for adapter, own in settings.items()
    }


def refuse_managed(config: Any) -> None:
    """Refuse a configuration made in Python that sets what would have no effect.

    Raises:
        ConfigError: naming the field and what to use.
    """
    for field in dataclasses.fields(config):
        if field.name == "output_dir" or field.name not in MANAGED:
            continue
        if getattr(config, field.name) not in (None, False, field.default):
            raise ConfigError(f"{field.name} is not set here; use {MANAGED[field.name]}")


def coerce(value: Any, hint: Any, name: str) -> Any:
    """``value`` as one of the types in ``hint``.

    Raises:
        ConfigError: when none of them fits.
    """
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    options = list(typing.get_args(hint)) if union else [hint]
    if value is None:
        if types.NoneType in options:
            return None
        raise ConfigError(f"{name} has no value")
    for option in options:
        fitted = _fit(value, option)
        if fitted is not None:
            return fitted
    wanted = " or ".join(_name(o) for o in options if o is not types.NoneType)
    raise ConfigError(f"{name} is {value!r}; it must be {wanted}")


def _fit(value: Any, option: Any) -> Any:
    """``value`` as ``option``; ``None`` when it is not one."""
    kind = typing.get_origin(option) or option
    if kind is bool:
        return value if isinstance(value, bool) else None
    if kind in (int, float):
        return _fit_number(value, kind)
    if kind is list:
        items: Any = value.split(",") if isinstance(value, str) else value
        return [str(item).strip() for item in items] if isinstance(items, list) else None
    if kind is dict:
        return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else None
    if kind is str:
        return str(value) if isinstance(value, str | int | float) and value is not True else None
    return value if kind in (Any, object) or isinstance(value, str) else None


def _fit_number(value: Any, kind: type[int] | type[float]) -> int | float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    if kind is float:
        return number
    return int(number) if number.is_integer() else None


def _name(option: Any) -> str:
    kind = typing.get_origin(option) or option
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(kind, "a list" if kind is list else "a mapping" if kind is dict else "text")
