"""Base models and adapters small enough to write by hand, without torch."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marft_agents.registry.tensors import write_float32

Shapes = Mapping[str, tuple[int, ...]]


def write_tensors(path: Path, shapes: Shapes, *, seed: int = 0, fill: float | None = None) -> None:
    """Random float32 tensors, or all ``fill``."""
    draw = random.Random(seed)
    tensors: dict[str, tuple[tuple[int, ...], array[float]]] = {}
    for name, shape in shapes.items():
        size = 1
        for n in shape:
            size *= n
        values = array("f", [draw.gauss(0, 1) if fill is None else fill for _ in range(size)])
        tensors[name] = (shape, values)
    write_float32(path, tensors)


def make_base(folder: Path, *, hidden: int = 8, layers: int = 2, seed: int = 0) -> Path:
    """A folder that looks like a Llama's: config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 2 * hidden,
        "vocab_size": 32,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (32, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(layers):
        attention = f"model.layers.{i}.self_attn"
        shapes |= {
            f"{attention}.q_proj.weight": (hidden, hidden),
            f"{attention}.k_proj.weight": (hidden // 2, hidden),
            f"{attention}.v_proj.weight": (hidden // 2, hidden),
            f"{attention}.o_proj.weight": (hidden, hidden),
            f"model.layers.{i}.mlp.down_proj.weight": (hidden, 2 * hidden),
        }
    write_tensors(folder / "model.safetensors", shapes, seed=seed)
    return folder


def adapter_shapes(
    *, hidden: int = 8, layers: int = 2, rank: int = 2
) -> dict[str, tuple[int, ...]]:
    """q_proj only."""
    out: dict[str, tuple[int, ...]] = {}
    for i in range(layers):
        prefix = f"base_model.model.model.layers.{i}.self_attn.q_proj"
        out |= {
            f"{prefix}.lora_A.weight": (rank, hidden),
            f"{prefix}.lora_B.weight": (hidden, rank),
        }
    return out


def make_adapter(
    folder: Path,
    *,
    rank: int = 2,
    shapes: Shapes | None = None,
    seed: int = 1,
    fill: float | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A staged PEFT adapter folder with random weights, as a trainer leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings | dict(config or {})))
    names = adapter_shapes(rank=rank) if shapes is None else shapes
    write_tensors(folder / "adapter_model.safetensors", names, seed=seed, fill=fill)
    return folder
