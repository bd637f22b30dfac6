"""The optimizer's state by adapter and tensor name: saved, given back, taken from a checkpoint.

Invariant: a state goes back to the very tensor it belongs to, matched by name, never by position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from marft_agents.training.adapters import plain_name
from marft_agents.training.trainer import MarftTrainer

_MOMENTS = ("exp_avg", "exp_avg_sq")
Snapshot = dict[str, tuple[Tensor, ...]]


def snapshot(trainer: MarftTrainer, adapters: Sequence[str]) -> Snapshot:
    """Everything that an update can move: each parameter, then its moments by key."""
    optimizer: Any = trainer.optimizer
    out: Snapshot = {}
    for adapter in adapters:
        for name, parameter in trainer.parameters_of(adapter):
            state = optimizer.state.get(parameter) or {}
            moments = [state[key].detach().clone() for key in sorted(state)]
            out[name] = (parameter.detach().clone(), *moments)
    return out


def give_back(trainer: MarftTrainer, adapters: Sequence[str], saved: Snapshot) -> None:
    """Put a snapshot back, in place."""
    optimizer: Any = trainer.optimizer
    with torch.no_grad():
        for adapter in adapters:
            for name, parameter in trainer.parameters_of(adapter):
                value, *moments = saved[name]
                parameter.copy_(value)
                state = optimizer.state.get(parameter)
                if not state:
                    continue
                if not moments:
                    del optimizer.state[parameter]
                    continue
                for key, moment in zip(sorted(state), moments, strict=True):
                    state[key].copy_(moment)


def adam_state(trainer: MarftTrainer, adapter: str) -> dict[str, Tensor]:
    """``<tensor>/<key>`` to the optimizer's tensors of one adapter."""
    optimizer: Any = trainer.optimizer
    out: dict[str, Tensor] = {}
    for name, parameter in trainer.parameters_of(adapter):
        plain = plain_name(name, adapter)
        for key, value in (optimizer.state.get(parameter) or {}).items():
            if isinstance(value, Tensor):
                out[f"{plain}/{key}"] = value.detach().cpu()
    return out


def odd_adam_state(trainer: MarftTrainer, adapter: str, state: Mapping[str, Tensor]) -> str | None:
    """Why a saved state is not this adapter's; none at all is one, before the first step."""
    if not state:
        return None
    shapes = {plain_name(n, adapter): p.shape for n, p in trainer.parameters_of(adapter)}
    names = {key.rpartition("/")[0] for key in state}
    if names != set(shapes):
        odd = sorted(names ^ set(shapes))
        return f"{len(names)} tensors saved, {len(shapes)} expected, first difference {odd[0]}"
    for key, saved in state.items():
        name, _, what = key.rpartition("/")
        if what in _MOMENTS and saved.shape != shapes[name]:
            return f"{name} is {list(saved.shape)} there and {list(shapes[name])} here"
    return None


def load_adam_state(trainer: MarftTrainer, adapter: str, state: Mapping[str, Tensor]) -> None:
    """Put the optimizer's tensors of one adapter back; the step count where this Adam wants it."""
    optimizer: Any = trainer.optimizer
    on_device = {
        group["adapter"]
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
    }
    by_tensor: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        plain, _, key = name.rpartition("/")
        by_tensor.setdefault(plain, {})[key] = value
    for name, parameter in trainer.parameters_of(adapter):
        kept = by_tensor.get(plain_name(name, adapter))
        if kept:
            step_at = parameter.device if adapter in on_device else torch.device("cpu")
            optimizer.state[parameter] = {
                key: value.to(step_at if key == "step" else parameter.device, copy=True)
                for key, value in kept.items()
            }
