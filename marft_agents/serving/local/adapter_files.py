"""Adapters on disk, read and checked against the model before anything is changed.

Invariant: what is returned can be served exactly: plain LoRA, complete, every tensor finite and in
the shape of a layer that the model has. Everything else is refused with what was seen and where.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# reason: peft and safetensors ship no complete types
from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file

from marft_agents.serving.local.refusal import Refusal

SCALING = frozenset({"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"})
_PLACES = frozenset({"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"})
"""Where the layers are is read from the file's tensors; the config must only agree."""
_WITHOUT_EFFECT = frozenset(
    {
        "peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode",
        "auto_mapping", "peft_version", "lora_dropout", "init_lora_weights", "eva_config",
        "ensure_weight_tying",
    }
)  # fmt: skip
_ORDINARY_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True)
class Staged:
    """An adapter read from disk, ready to enter the model."""

    path: str
    config: dict[str, Any]
    weights: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """Module name -> A (rank, in), B (out, rank)."""


def read_adapter(folder: Path, linears: Mapping[str, tuple[int, int]], max_rank: int) -> Staged:
    """Read and check a PEFT folder against the model's layers.

    Raises:
        Refusal: 404 without folder or files, 400 for anything this engine would not serve exactly.
    """
    config_file, weights_file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for file in (config_file, weights_file):
        if not file.is_file():
            raise Refusal(404, f"No adapter found: {file} does not exist")
    try:
        config: Any = json.loads(config_file.read_bytes())
    except ValueError as error:
        raise Refusal(400, f"{config_file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise Refusal(400, f"{config_file} holds no JSON object")
    _check_config(config, config_file, max_rank)
    try:
        tensors = load_file(weights_file)
    except (SafetensorError, OSError, ValueError) as error:
        raise Refusal(400, f"{weights_file} is no readable safetensors file: {error}") from error
    weights = _pair(tensors, weights_file)
    _check_places(weights, linears, weights_file)
    _check_complete(config, weights, linears, config_file)
    return Staged(str(folder), config, weights)


def _check_config(config: Mapping[str, Any], file: Path, max_rank: int) -> None:
    def refuse(what: str) -> Refusal:
        return Refusal(400, f"{file}: {what}; the local engine serves plain LoRA only")

    if config.get("peft_type") != "LORA":
        raise refuse(f"peft_type is {config.get('peft_type')!r}")
    if config.get("init_lora_weights") not in _ORDINARY_STARTS:
        raise refuse(f"init_lora_weights={config['init_lora_weights']!r} changes the base model")
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(LoraConfig)
        if field.default is not dataclasses.MISSING
    }
    for name, value in config.items():
        if name in SCALING | _PLACES | _WITHOUT_EFFECT or not value:
            continue
        if value != defaults.get(name):
            raise refuse(f"{name}={value!r}")
    ranks: list[Any] = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise refuse(f"r={config.get('r')!r} is no rank")
    if max(ranks) > max_rank:
        raise Refusal(
            400,
            f"{file}: LoRA rank {max(ranks)} is greater than max_lora_rank {max_rank};"
            f" start the engine with --max-lora-rank {max(ranks)} or more",
        )


def _pair(
    tensors: Mapping[str, torch.Tensor], file: Path
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise Refusal(400, f"{file}: tensor {key!r} is no LoRA weight of a causal model")
        if not bool(torch.isfinite(tensor).all()):
            raise Refusal(400, f"{file}: tensor {key!r} holds values that are not finite")
        halves.setdefault(match[1], {})[match[2]] = tensor
    for module, found in halves.items():
        if len(found) < 2:
            raise Refusal(400, f"{file}: {module} has lora_{'/'.join(found)} without the other")
    if not halves:
        raise Refusal(400, f"{file} holds no tensor")
    return {module: (found["A"], found["B"]) for module, found in halves.items()}


def _check_places(
    weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    linears: Mapping[str, tuple[int, int]],
    file: Path,
) -> None:
    for module, (a, b) in weights.items():
        if module not in linears:
            raise Refusal(
                400,
                f"{file}: this model has no adaptable layer {module!r}"
                f" (it has, for instance, {next(iter(linears))!r})",
            )
        out, size = linears[module]
        if a.ndim != 2 or b.ndim != 2 or (b.shape[0], a.shape[1]) != (out, size):
            raise Refusal(
                400,
                f"{file}: {module} has shapes A {tuple(a.shape)}, B {tuple(b.shape)},"
                f" but the layer is {out}x{size}: the adapter is of another base model",
            )
        if a.shape[0] != b.shape[1]:
            raise Refusal(400, f"{file}: {module} has two ranks, {a.shape[0]} and {b.shape[1]}")


def _check_complete(
    config: Mapping[str, Any],
    weights: Mapping[str, Any],
    linears: Mapping[str, tuple[int, int]],
    file: Path,
) -> None:
    """Where the config lists its layers by name, the file must hold exactly these."""
    targets = config.get("target_modules")
    if not isinstance(targets, list):
        return
    unknown = [t for t in targets if not any(_ends(name, t) for name in linears)]
    if unknown:
        raise Refusal(400, f"{file}: no layer of this model is called {unknown[0]!r}")
    if any(config.get(key) is not None for key in ("exclude_modules", "layers_to_transform")):
        return
    for name in linears:
        if any(_ends(name, target) for target in targets) != (name in weights):
            state = "is not a target" if name in weights else "has no weights in the file"
            raise Refusal(400, f"{file}: layer {name!r} {state}: config and file do not agree")


def _ends(name: str, target: Any) -> bool:
    return name == target or name.endswith(f".{target}")
