"""The adapter an agent has before it learned anything: A random, B zero.

Invariant: it changes no log-probability (B A = 0), and training can start from it as from a fresh
PEFT LoRA. The same seed gives the same bytes on every machine.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Iterable
from pathlib import Path

from marft_agents.registry.base import module_shapes, resolve_model_dir
from marft_agents.registry.check import CONFIG_FILE, WEIGHTS_FILE
from marft_agents.registry.limits import (
    DEFAULT_ALPHA,
    DEFAULT_RANK,
    DEFAULT_TARGET_MODULES,
    validate_adapter_config,
)
from marft_agents.registry.tensors import write_float32


def write_untrained_adapter(
    folder: str | Path,
    model_dir: str | Path,
    *,
    rank: int = DEFAULT_RANK,
    alpha: int = DEFAULT_ALPHA,
    target_modules: Iterable[str] = DEFAULT_TARGET_MODULES,
    seed: int = 0,
) -> Path:
    """Write a plain PEFT LoRA with A ~ U(-1/sqrt(in), 1/sqrt(in)) and B = 0; returns ``folder``.

    Raises:
        AdapterError: when no server would take such an adapter.
        ConfigError: when the model has no such module.
    """
    targets = sorted(set(target_modules))
    model = resolve_model_dir(str(model_dir))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model) if Path(model_dir).is_dir() else str(model_dir),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }
    validate_adapter_config(config)
    draw = random.Random(seed).random
    tensors: dict[str, tuple[tuple[int, ...], array[float]]] = {}
    for module, (out, into) in module_shapes(model, targets).items():
        bound = 1 / math.sqrt(into)
        prefix = f"base_model.model.{module}"
        values = array("f", [bound * (2 * draw() - 1) for _ in range(rank * into)])
        tensors[f"{prefix}.lora_A.weight"] = ((rank, into), values)
        tensors[f"{prefix}.lora_B.weight"] = ((out, rank), array("f", bytes(4 * out * rank)))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_float32(target / WEIGHTS_FILE, tensors)
    return target
