"""A critic's tensors and Adam's moments by name, as a file of tensors can hold them.

Invariant: a state is put back whole or refused, and moments go to the tensor they belong to by its
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from marft_agents.errors import ConfigError


def adam_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Adam's moments and steps under ``<tensor>.exp_avg`` and so on."""
    out: dict[str, Tensor] = {}
    for name, parameter in named.items():
        moments: dict[str, Any] = optimizer.state.get(parameter, {})
        for key, tensor in moments.items():
            out[f"{name}.{key}"] = tensor.detach().to("cpu", copy=True).contiguous()
    return out


def adam_shapes(named: Mapping[str, nn.Parameter]) -> dict[str, torch.Size]:
    """What ``adam_state`` returns after a step, as shapes."""
    out: dict[str, torch.Size] = {}
    for name, parameter in named.items():
        out |= {f"{name}.{key}": parameter.shape for key in ("exp_avg", "exp_avg_sq")}
        out[f"{name}.step"] = torch.Size(())
    return out


def load_adam_state(
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, nn.Parameter],
    state: Mapping[str, Tensor],
) -> None:
    """Put back what ``adam_state`` returned; a tensor without moments starts anew."""
    for name, parameter in named.items():
        keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{key}" in state]
        optimizer.state.pop(parameter, None)
        if keys:
            where = {key: "cpu" if key == "step" else parameter.device for key in keys}
            optimizer.state[parameter] = {
                key: state[f"{name}.{key}"].to(where[key], copy=True) for key in keys
            }


def require_shapes(state: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    """Check that a state has these tensors and no others.

    Raises:
        ConfigError: when it has not.
    """
    wrong = sorted(
        name
        for name in {*state, *expected}
        if name not in state or name not in expected or state[name].shape != expected[name]
    )
    if not wrong:
        return

    def said(tensors: Mapping[str, Any], name: str) -> str:
        if name not in tensors:
            return "no such tensor"
        shape = tensors[name] if isinstance(tensors[name], torch.Size) else tensors[name].shape
        return f"shape {list(shape)}"

    name = wrong[0]
    raise ConfigError(
        f"the saved critic does not fit this run: {name} has {said(state, name)} there and"
        f" {said(expected, name)} here ({len(wrong)} tensors differ); use the base model and the"
        " critic_* settings that it was trained with, or start without it"
    )
