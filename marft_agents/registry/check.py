"""Whether a staged adapter folder is one that answers as it was trained.

Invariant: every tensor that passes belongs to a module of the base, has that module's shape and
the configured rank, comes as a complete A/B pair, and holds finite numbers. Engines load adapters
that break this and then answer as the base, or nonsense.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from marft_agents.errors import AdapterError
from marft_agents.registry.base import module_pattern
from marft_agents.registry.limits import highest_rank, rank_of, validate_adapter_config
from marft_agents.registry.tensors import (
    FLOAT_TYPES,
    TensorInfo,
    is_finite,
    is_zero,
    read_header,
)
from marft_agents.schema import BaseModelInfo

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_TENSOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True)
class AdapterFacts:
    """What a valid adapter folder says about itself."""

    rank: int
    target_modules: list[str]
    has_effect: bool
    """False when every B is zero: it answers exactly as the base."""


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """``adapter_config.json`` of a folder.

    Raises:
        AdapterError: when it is missing or no JSON object.
    """
    path = folder / CONFIG_FILE
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AdapterError(
            f"{folder} has no readable {CONFIG_FILE}; save the adapter with PEFT's"
            " save_pretrained and give the folder that holds the file"
        ) from error
    except ValueError as error:
        raise AdapterError(f"{path} is no valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path} is no JSON object")
    return cast("dict[str, Any]", config)


def _expected_shape(base: BaseModelInfo, module: str) -> tuple[int, int] | None:
    """(out, in) of a module; ``None`` when the base was described without its modules."""
    if not base.modules:
        return None
    shape = base.modules.get(module_pattern(module)) or base.modules.get(module)
    if shape is None:
        known = sorted({m.rsplit(".", 1)[-1] for m in base.modules})
        raise AdapterError(
            f"the adapter has weights for {module!r}, a module that the base {base.name} does not"
            f" have (it has {', '.join(known)}); train the adapter on this base"
        )
    return shape


def _check_layer(base: BaseModelInfo, module: str) -> None:
    match = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", f".{module}.")
    if match and int(match[1]) >= base.num_hidden_layers:
        raise AdapterError(
            f"the adapter has weights for layer {match[1]} ({module}), the base {base.name} has"
            f" {base.num_hidden_layers} layers (0 to {base.num_hidden_layers - 1});"
            " train the adapter on this base"
        )


def _check_pair(
    base: BaseModelInfo, module: str, pair: Mapping[str, TensorInfo], rank: int
) -> None:
    if set(pair) != {"A", "B"}:
        missing = "A" if "B" in pair else "B"
        raise AdapterError(f"the adapter has no lora_{missing} for {module}; save it again")
    _check_layer(base, module)
    a, b = pair["A"].shape, pair["B"].shape
    shape = _expected_shape(base, module)
    out_in = shape or (b[0] if b else 0, a[-1] if a else 0)
    if a != (rank, out_in[1]) or b != (out_in[0], rank):
        raise AdapterError(
            f"the adapter's {module} has lora_A {list(a)} and lora_B {list(b)}; rank {rank} on the"
            f" base {base.name} (hidden size {base.hidden_size}) needs {[rank, out_in[1]]} and"
            f" {[out_in[0], rank]}; train the adapter on this base"
        )


def _pairs(path: Path, header: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in header.items():
        match = _TENSOR_NAME.fullmatch(name)
        if match is None:
            raise AdapterError(
                f"{path}: tensor {name!r} is no LoRA weight of the form"
                " base_model.model.<module>.lora_A.weight; save the adapter with PEFT's"
                " save_pretrained(selected_adapters=[...])"
            )
        if tensor.dtype not in FLOAT_TYPES:
            raise AdapterError(f"{path}: tensor {name!r} is {tensor.dtype}, not a float type")
        pairs.setdefault(match["module"], {})[match["side"]] = tensor
    if not pairs:
        raise AdapterError(f"{path} holds no tensor; save the adapter again")
    return pairs


def inspect_adapter(
    folder: Path, base: BaseModelInfo, *, max_lora_rank: int | None = None
) -> AdapterFacts:
    """Check a PEFT adapter folder against the limits and against the base.

    Raises:
        AdapterError: saying what was seen, where, and what to do.
    """
    config = read_adapter_config(folder)
    try:
        validate_adapter_config(config, max_lora_rank=max_lora_rank)
    except AdapterError as error:
        raise AdapterError(f"{folder / CONFIG_FILE}: {error}") from error
    path = folder / WEIGHTS_FILE
    if not path.exists():
        raise AdapterError(
            f"{folder} has no {WEIGHTS_FILE}; save the adapter with PEFT's save_pretrained"
        )
    pairs = _pairs(path, read_header(path))
    for module, pair in pairs.items():
        _check_pair(base, module, pair, rank_of(config, module))
    for tensor in (t for pair in pairs.values() for t in pair.values()):
        if not is_finite(path, tensor):
            raise AdapterError(
                f"{path}: tensor {tensor.name!r} holds NaN or infinity; the training diverged,"
                " publish an earlier checkpoint"
            )
    return AdapterFacts(
        rank=highest_rank(config),
        target_modules=sorted({module.rsplit(".", 1)[-1] for module in pairs}),
        has_effect=not all(is_zero(path, pair["B"]) for pair in pairs.values()),
    )
