"""A run's state on disk: everything that the next step depends on.

Invariant: a checkpoint is written elsewhere, flushed and renamed into place, so it is whole or not
there; tensors are matched by adapter and name and shape, all of them or none. Only safetensors and
JSON: nothing that is executed when it is read. Floats of the batch are kept as float64, so a
resumed update computes with the same numbers.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from marft_agents.errors import ConfigError
from marft_agents.registry import durable
from marft_agents.training.adam import adam_state, load_adam_state, odd_adam_state
from marft_agents.training.adapters import adapter_state, load_adapter_state
from marft_agents.training.loop import Learner
from marft_agents.training.work import Work
from marft_agents.training.work_state import load_work, part, work_facts, work_tensors

FORMAT = 1
CHECKPOINTS = ".checkpoints"
"""In the registry's folder: the run under way."""
LEARNER = ".learner"
"""In the registry's folder: Adam states and critic at the end of the last run."""
_NAME = "checkpoint-"
_STATE, _FACTS = "state.safetensors", "state.json"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One that was read."""

    folder: Path
    facts: dict[str, Any]
    tensors: dict[str, Tensor]


# -- files -------------------------------------------------------------------------------------


def checkpoints(parent: Path) -> list[Path]:
    """Whole checkpoints in a folder, the oldest first."""
    found = [p for p in parent.glob(f"{_NAME}*") if (p / _FACTS).is_file()]
    return sorted(found, key=_number)


def _number(folder: Path) -> int:
    text = folder.name.removeprefix(_NAME)
    return int(text) if text.isdigit() else 0


def write(parent: Path, learner: Learner, facts: Mapping[str, Any], *, keep: int | None) -> Path:
    """Write the learner's state as the newest checkpoint; those beyond ``keep`` go."""
    parent.mkdir(parents=True, exist_ok=True)
    before = checkpoints(parent)
    target = parent / f"{_NAME}{(_number(before[-1]) if before else 0) + 1:06d}"
    staged = parent / f".{target.name}-partial"
    _sweep(parent)
    tensors, own = learner_state(learner)
    content = {"format": FORMAT, "steps": learner.steps_taken, **own, **facts}
    try:
        staged.mkdir()
        durable.write_file(staged / _STATE, save(tensors))
        durable.write_file(staged / _FACTS, json.dumps(content).encode())
        durable.fsync_folder(staged)
        staged.rename(target)
    except OSError:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    durable.fsync_folder(parent)
    for old in [*before, target][: -keep if keep else 0]:
        remove(old)
    return target


def _sweep(parent: Path) -> None:
    """What an interrupted write or removal left behind."""
    for left in parent.glob(f".{_NAME}*"):
        shutil.rmtree(left, ignore_errors=True)


def read(folder: Path) -> Checkpoint:
    """A checkpoint's content.

    Raises:
        ConfigError: when it cannot be read or is of another format.
    """
    try:
        facts: dict[str, Any] = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        tensors = load_file(folder / _STATE)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"cannot read the checkpoint {folder}: {error}") from error
    if facts.get("format") != FORMAT:
        raise ConfigError(
            f"the checkpoint {folder} has format {facts.get('format')!r}, and this version reads"
            f" {FORMAT}; start again without --resume"
        )
    return Checkpoint(folder, facts, tensors)


def remove(folder: Path) -> None:
    """Delete one checkpoint; at no moment is a part of it taken for a whole one."""
    gone = folder.with_name(f".{folder.name}-gone")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def carry_over(learner: Learner, saved: Checkpoint, *, critic: bool) -> None:
    """Adam states, and critic, of an earlier run for the adapters that go on from its versions."""
    for adapter in saved.facts["adapters"]:
        moments = part(saved.tensors, f"adam/{adapter}/")
        here = adapter in learner.session.adapters
        if here and odd_adam_state(learner.trainer, adapter, moments) is None:
            load_adam_state(learner.trainer, adapter, moments)
    values = part(saved.tensors, "critic/")
    if critic and values:
        learner.critics.load_state(values)


# -- a learner's state -------------------------------------------------------------------------


def learner_state(learner: Learner) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Adapters, Adam states, critic, guards, and the update under way."""
    tensors: dict[str, Tensor] = {}
    for adapter in learner.session.adapters:
        for name, tensor in adapter_state(learner.session.model, adapter).items():
            tensors[f"adapter/{adapter}/{name}"] = tensor
        for name, tensor in adam_state(learner.trainer, adapter).items():
            tensors[f"adam/{adapter}/{name}"] = tensor
    for adapter, state in learner.references.items():
        tensors |= {f"reference/{adapter}/{name}": tensor for name, tensor in state.items()}
    for name, tensor in learner.critics.state().items():
        tensors[f"critic/{name}"] = tensor.detach().cpu().contiguous()
    facts: dict[str, Any] = {
        "guards": learner.guards.state(),
        "nonfinite": dict(learner.trainer.nonfinite),
        "adapters": learner.session.adapters,
        "work": None,
    }
    if learner.work is not None:
        facts["work"] = work_facts(learner.work)
        tensors |= work_tensors(learner.work)
    return {k: v.clone().contiguous() for k, v in tensors.items()}, facts


def load_learner(learner: Learner, saved: Checkpoint, *, fresh_optimizer: bool = False) -> None:
    """Put everything back; the update under way is in ``learner.work``.

    ``fresh_optimizer`` keeps the weights and starts Adam's moments anew.

    Raises:
        ConfigError, AdapterError: when the state is not this run's; nothing was changed then.
    """
    adapters: list[str] = saved.facts["adapters"]
    if sorted(adapters) != sorted(learner.session.adapters):
        raise ConfigError(
            f"the checkpoint {saved.folder} trains {', '.join(sorted(adapters))}, and this run"
            f" {', '.join(sorted(learner.session.adapters))}; give the same logs and agents, or"
            " start again without --resume"
        )
    states = {a: part(saved.tensors, f"adapter/{a}/") for a in adapters}
    critic = part(saved.tensors, "critic/")
    moments = {a: part(saved.tensors, f"adam/{a}/") for a in adapters}
    for adapter in adapters:
        _check_shapes(learner, adapter, states[adapter], saved)
        odd = odd_adam_state(learner.trainer, adapter, moments[adapter])
        if odd is not None and not fresh_optimizer:
            raise ConfigError(
                f"the checkpoint {saved.folder} has another Adam state for adapter {adapter!r} than"
                f" this run: {odd}; start again without --resume, or with --fresh-optimizer"
            )
    learner.work = _work_of(learner, saved)
    for adapter in adapters:
        load_adapter_state(learner.session.model, adapter, states[adapter])
        if not fresh_optimizer:
            load_adam_state(learner.trainer, adapter, moments[adapter])
        if adapter in learner.references:
            learner.references[adapter] = part(saved.tensors, f"reference/{adapter}/")
    if critic:
        learner.critics.load_state(critic)
    learner.guards.load_state(saved.facts["guards"])
    learner.trainer.nonfinite.update(saved.facts["nonfinite"])
    learner.steps_taken = int(saved.facts["steps"])


def _work_of(learner: Learner, saved: Checkpoint) -> Work | None:
    try:
        work = saved.facts["work"]
        return None if work is None else load_work(learner, work, saved.tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the checkpoint {saved.folder} is damaged: {type(error).__name__} {error}; start again"
            " without --resume"
        ) from error


def _check_shapes(
    learner: Learner, adapter: str, state: Mapping[str, Tensor], saved: Checkpoint
) -> None:
    now = adapter_state(learner.session.model, adapter)
    odd = sorted(set(now) ^ set(state))
    if odd:
        raise ConfigError(
            f"the checkpoint {saved.folder} has other tensors for adapter {adapter!r} than this"
            f" run: {len(state)} saved, {len(now)} expected, first difference {odd[0]};"
            " lora_target_modules must be the same, or start again without --resume"
        )
    for name, tensor in now.items():
        if tensor.shape != state[name].shape:
            ranks = [min(t.shape) for t in (state[name], tensor)]
            raise ConfigError(
                f"the checkpoint {saved.folder} trains adapter {adapter!r} at rank {ranks[0]}, and"
                f" this run at rank {ranks[1]} ({name}); give rank {ranks[0]}, or start again"
                " without --resume"
            )
