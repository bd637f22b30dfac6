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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from marft_agents.errors import ConfigError
from marft_agents.registry import durable
from marft_agents.training.adapters import adapter_state, load_adapter_state
from marft_agents.training.advantages import ActionCredit, Credits
from marft_agents.training.batch import Batch, TrainRow
from marft_agents.training.effect import Before, best_and_worst
from marft_agents.training.loop import Learner, UpdateReport, Work

FORMAT = 1
CHECKPOINTS = ".checkpoints"
"""In the registry's folder: the run under way."""
LEARNER = ".learner"
"""In the registry's folder: Adam states and critic at the end of the last run."""
_NAME = "checkpoint-"
_STATE, _FACTS = "state.safetensors", "state.json"
_RAGGED = ("prompt_ids", "token_ids", "behaviour_L", "advantage_L", "weight_L")
_BY_ROW = ("old", "reference")


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
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    tensors, own = learner_state(learner)
    content = {"format": FORMAT, "steps": learner.steps_taken, **own, **facts}
    durable.write_file(staged / _STATE, save(tensors))
    durable.write_file(staged / _FACTS, json.dumps(content).encode())
    durable.fsync_folder(staged)
    staged.rename(target)
    durable.fsync_folder(parent)
    for old in [*before, target][: -keep if keep else 0]:
        shutil.rmtree(old, ignore_errors=True)
    return target


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


def carry_over(learner: Learner, saved: Checkpoint) -> None:
    """Adam states and critic of an earlier run for the adapters that go on from its versions."""
    for adapter in saved.facts["adapters"]:
        if adapter in learner.session.adapters:
            _load_adam(learner, adapter, _part(saved.tensors, f"adam/{adapter}/"))
    critic = _part(saved.tensors, "critic/")
    if critic:
        learner.critics.load_state(critic)


# -- a learner's state -------------------------------------------------------------------------


def learner_state(learner: Learner) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Adapters, Adam states, critic, guards, and the update under way."""
    tensors: dict[str, Tensor] = {}
    for adapter in learner.session.adapters:
        for name, tensor in adapter_state(learner.session.model, adapter).items():
            tensors[f"adapter/{adapter}/{name}"] = tensor
        tensors |= _adam(learner, adapter)
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
        facts["work"] = _work_facts(learner.work)
        tensors |= _work_tensors(learner.work)
    return {k: v.clone().contiguous() for k, v in tensors.items()}, facts


def _adam(learner: Learner, adapter: str) -> dict[str, Tensor]:
    optimizer: Any = learner.trainer.optimizer
    out: dict[str, Tensor] = {}
    for name, parameter in learner.trainer.parameters_of(adapter):
        plain = name.replace(f".{adapter}.", ".")
        for key, value in (optimizer.state.get(parameter) or {}).items():
            if isinstance(value, Tensor):
                out[f"adam/{adapter}/{plain}/{key}"] = value.detach().cpu()
    return out


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
    states = {a: _part(saved.tensors, f"adapter/{a}/") for a in adapters}
    critic = _part(saved.tensors, "critic/")
    for adapter in adapters:
        _check_shapes(learner, adapter, states[adapter], saved)
    work = saved.facts.get("work")
    if work is not None:
        learner.work = _load_work(learner, work, saved.tensors)
    for adapter in adapters:
        load_adapter_state(learner.session.model, adapter, states[adapter])
        if not fresh_optimizer:
            _load_adam(learner, adapter, _part(saved.tensors, f"adam/{adapter}/"))
        if adapter in learner.references:
            learner.references[adapter] = _part(saved.tensors, f"reference/{adapter}/")
    if critic:
        learner.critics.load_state(critic)
    learner.guards.load_state(saved.facts["guards"])
    learner.trainer.nonfinite.update(saved.facts["nonfinite"])
    learner.steps_taken = int(saved.facts["steps"])


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


def _load_adam(learner: Learner, adapter: str, state: Mapping[str, Tensor]) -> None:
    optimizer: Any = learner.trainer.optimizer
    for name, parameter in learner.trainer.parameters_of(adapter):
        plain = name.replace(f".{adapter}.", ".")
        kept = {k.rsplit("/", 1)[1]: v for k, v in state.items() if k.rsplit("/", 1)[0] == plain}
        if kept:
            optimizer.state[parameter] = {
                key: value.clone() if key == "step" else value.to(parameter.device).clone()
                for key, value in kept.items()
            }


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


# -- an update under way -----------------------------------------------------------------------


def _ragged(name: str, rows: Sequence[Sequence[float]]) -> dict[str, Tensor]:
    whole = name.endswith("_ids")
    flat = [x for row in rows for x in row]
    return {
        f"work/{name}": torch.tensor(flat, dtype=torch.int64 if whole else torch.float64),
        f"work/{name}/lengths": torch.tensor([len(row) for row in rows], dtype=torch.int64),
    }


def _unragged(name: str, tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    lengths = tensors[f"work/{name}/lengths"].tolist()
    return [part.tolist() for part in tensors[f"work/{name}"].split(lengths)]


def _work_tensors(work: Work) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name in _RAGGED:
        out |= _ragged(name, [getattr(row, name) for row in work.batch.rows])
    for name in _BY_ROW:
        values: dict[int, list[float]] = getattr(work.batch, name)
        out |= _ragged(name, list(values.values()))
    for adapter, meter in work.meters.items():
        for name, tensor in meter.before.state.items():
            out[f"before/{adapter}/{name}"] = tensor
    for name, tensors in work.good.items():
        for n, tensor in enumerate(tensors):
            out[f"good/{n}/{name}"] = tensor.detach().cpu()
    return out


def _work_facts(work: Work) -> dict[str, Any]:
    batch, credits = work.batch, work.credits
    names = [f.name for f in dataclasses.fields(TrainRow) if f.name not in _RAGGED]
    return {
        "rows": [{name: getattr(row, name) for name in names} for row in batch.rows],
        "batch": {
            "objective": batch.objective,
            "iteration": batch.iteration,
            "order": batch.order,
            "depends": list(batch.depends.items()),
            "steps": list(batch.steps.items()),
            "factor": list(batch.factor.items()),
            "log_ratio": list(batch.log_ratio.items()),
            **{name: list(getattr(batch, name)) for name in _BY_ROW},
        },
        "credits": None if credits is None else dataclasses.asdict(credits),
        "report": dataclasses.asdict(work.report),
        "mean_reward": work.mean_reward,
        "position": work.position,
        "step": work.step,
        "sums": work.sums,
        "before": {a: [m.before.good, m.before.bad] for a, m in work.meters.items()},
    }


def _load_work(learner: Learner, facts: dict[str, Any], tensors: Mapping[str, Tensor]) -> Work:
    ragged = {name: _unragged(name, tensors) for name in _RAGGED}
    rows = [
        TrainRow(**plain, **{name: ragged[name][i] for name in _RAGGED})
        for i, plain in enumerate(facts["rows"])
    ]
    saved = facts["batch"]
    batch = Batch(
        objective=saved["objective"],
        iteration=saved["iteration"],
        rows=rows,
        order=saved["order"],
        depends=dict(saved["depends"]),
        steps=dict(saved["steps"]),
        factor=dict(saved["factor"]),
        log_ratio=dict(saved["log_ratio"]),
        **{n: dict(zip(saved[n], _unragged(n, tensors), strict=True)) for n in _BY_ROW},
    )
    work = Work(
        batch=batch,
        credits=_load_credits(facts["credits"]),
        report=UpdateReport(**facts["report"]),
        mean_reward=facts["mean_reward"],
        position=facts["position"],
        step=facts["step"],
        sums=facts["sums"],
        good=_load_good(tensors),
    )
    learner.session.try_sharing(rows)
    for adapter, (good, bad) in facts["before"].items():
        before = Before(_part(tensors, f"before/{adapter}/"), good, bad)
        mean = {i: rows[i].advantage for i in batch.rows_of(adapter)}
        best, worst = best_and_worst(mean, learner.config.effect_turns)
        work.meters[adapter] = learner.session.meter(
            adapter, [rows[i] for i in best], [rows[i] for i in worst], before
        )
    return work


def _load_good(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
    out: dict[str, dict[int, Tensor]] = {}
    for name, tensor in _part(tensors, "good/").items():
        n, _, plain = name.partition("/")
        out.setdefault(plain, {})[int(n)] = tensor
    return {name: tuple(parts[n] for n in sorted(parts)) for name, parts in out.items()}


def _load_credits(saved: dict[str, Any] | None) -> Credits | None:
    if saved is None:
        return None
    actions = [[ActionCredit(**action) for action in episode] for episode in saved["actions"]]
    by_row = {name: {int(k): v for k, v in saved[name].items()} for name in ("advantage", "weight")}
    return Credits(**{**saved, "actions": actions, **by_row})
