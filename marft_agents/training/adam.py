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


def load_adam_state(trainer: MarftTrainer, adapter: str, state: Mapping[str, Tensor]) -> None:
    """Put the optimizer's tensors of one adapter back."""
    optimizer: Any = trainer.optimizer
    by_tensor: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        plain, _, key = name.rpartition("/")
        by_tensor.setdefault(plain, {})[key] = value
    for name, parameter in trainer.parameters_of(adapter):
        kept = by_tensor.get(plain_name(name, adapter))
        if kept:
            optimizer.state[parameter] = {
                key: value.clone() if key == "step" else value.to(parameter.device).clone()
                for key, value in kept.items()
            }
