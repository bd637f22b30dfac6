"""One base model in memory and one named LoRA adapter per agent on it.

Invariant: the base is frozen and loaded once; every adapter comes from a folder (the version in
use, or a fresh one with B = 0), so training starts from exactly what is served.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from marft_agents.errors import AdapterError, ConfigError
from marft_agents.registry import Registry, write_untrained_adapter
from marft_agents.training._trl import disable_dropout_in_model
from marft_agents.training.plan import NewAdapter


def base_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """The base's number type: float32 on a CPU, as saved elsewhere, unless one is named."""
    if name != "auto":
        return getattr(torch, name)
    return torch.float32 if device.type == "cpu" else "auto"


def load_base(
    model_dir: Path,
    dtype: torch.dtype | str,
    device: torch.device,
    *,
    four_bit: bool = False,
) -> Any:
    """The frozen base model.

    Raises:
        ConfigError: when the folder is no causal language model, or cannot be quantised here.
    """
    extra = {"quantization_config": _four_bit(device)} if four_bit else {}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation="sdpa", **extra
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ConfigError(f"cannot load {model_dir}: {str(error).splitlines()[0]}") from error
    placed = model if four_bit else model.to(device)
    return placed.requires_grad_(False)


def _four_bit(device: torch.device) -> Any:
    """NF4 weights, computed in bfloat16.

    Raises:
        ConfigError: without a GPU or without bitsandbytes.
    """
    if device.type != "cuda":
        raise ConfigError(f"load_in_4bit needs a GPU, and this run is on {device.type}")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("load_in_4bit needs bitsandbytes: pip install bitsandbytes")
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )


def load_tokenizer(model_dir: Path) -> Any:
    """The model's tokenizer; only the critic's transcript goes through it.

    Raises:
        ConfigError: when the folder has none.
    """
    try:
        return AutoTokenizer.from_pretrained(model_dir)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{model_dir} has no usable tokenizer ({str(error).splitlines()[0]});"
            " copy tokenizer.json and tokenizer_config.json of the model into it"
        ) from error


def attach_adapters(base: Any, folders: Mapping[str, Path]) -> PeftModel:
    """The base with one trainable adapter per name; the first one is active."""
    model: PeftModel | None = None
    for adapter, folder in folders.items():
        if model is None:
            model = PeftModel.from_pretrained(
                base, str(folder), adapter_name=adapter, is_trainable=True
            )
        else:
            model.load_adapter(str(folder), adapter, is_trainable=True)
    if model is None:
        raise ValueError("a session has at least one adapter")
    disable_dropout_in_model(model)
    model.set_adapter(next(iter(folders)))
    return model.eval()


def start_folder(
    adapter: str,
    version: int | None,
    registry: Registry,
    model_dir: Path,
    new: NewAdapter,
    *,
    seed: int,
    scratch: Path,
) -> Path:
    """Where an adapter starts: its version's folder, or a fresh one with B = 0."""
    if version is not None:
        return registry.path(adapter, version)
    return write_untrained_adapter(
        scratch / "fresh" / adapter,
        model_dir,
        rank=new.rank,
        alpha=new.alpha,
        target_modules=new.target_modules,
        seed=seed,
    )


def is_of(name: str, adapter: str) -> bool:
    """Whether a parameter is the adapter's: its name stands behind ``lora_A`` and the like.

    A module of the base may be called like an adapter; its parameters are not the adapter's.
    """
    return plain_name(name, adapter) != name


def plain_name(name: str, adapter: str) -> str:
    """The parameter's name in a PEFT file, which names no adapter."""
    return re.sub(rf"(\.lora_\w+)\.{re.escape(adapter)}(?=\.|$)", r"\1", name)


def load_adapter_state(model: PeftModel, adapter: str, state: Mapping[str, Tensor]) -> None:
    """Put an adapter's tensors back, in place: the optimizer goes on holding the same ones.

    Raises:
        AdapterError: when names or shapes are not this adapter's; nothing is changed then.
    """
    own = {
        plain_name(name, adapter): parameter
        for name, parameter in model.named_parameters()
        if is_of(name, adapter)
    }
    if set(own) != set(state):
        odd = sorted(set(own) ^ set(state))
        raise AdapterError(f"adapter {adapter!r}: {len(odd)} tensors differ, first {odd[0]}")
    for name, parameter in own.items():
        if parameter.shape != state[name].shape:
            raise AdapterError(
                f"adapter {adapter!r}: {name} is {tuple(parameter.shape)} here and"
                f" {tuple(state[name].shape)} in the saved state"
            )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(state[name])


def adapter_state(model: PeftModel, adapter: str) -> dict[str, Tensor]:
    """Copies of one adapter's tensors under their plain PEFT names, float32 on the CPU."""
    state: dict[str, Tensor] = get_peft_model_state_dict(
        model, adapter_name=adapter, save_embedding_layers=False
    )
    return {
        name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        for name, tensor in state.items()
    }


def stage_adapter(model: PeftModel, adapter: str, folder: Path) -> Path:
    """Write one adapter as a PEFT folder of its own, ready to publish."""
    folder.mkdir(parents=True)
    save_file(adapter_state(model, adapter), folder / "adapter_model.safetensors", {"format": "pt"})
    config = model.peft_config[adapter]
    was = config.inference_mode
    config.inference_mode = True
    config.save_pretrained(str(folder))
    config.inference_mode = was
    return folder


def change_norms(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, float]:
    """Norms that prove an adapter moved: of the change, and of B now."""

    def norm(tensors: Sequence[Tensor]) -> float:
        return float(torch.sqrt(sum((t.double() ** 2).sum() for t in tensors) + torch.zeros(())))

    return {
        "change_norm": norm([after[name] - before[name] for name in sorted(before)]),
        "b_norm": norm([after[name] for name in sorted(after) if ".lora_B." in name]),
    }


def all_finite(state: dict[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in state.values())
