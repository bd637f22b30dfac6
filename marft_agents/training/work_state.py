"""An update under way as tensors and JSON: its batch, how far it is, and the state before it.

Invariant: reading gives back the same numbers bit for bit; floats are float64 or JSON's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from marft_agents.training.advantages import ActionCredit, Credits
from marft_agents.training.batch import Batch, TrainRow
from marft_agents.training.effect import Before, best_and_worst
from marft_agents.training.loop import Learner
from marft_agents.training.work import UpdateReport, Work

_RAGGED = ("prompt_ids", "token_ids", "behaviour_L", "advantage_L", "weight_L")
_BY_ROW = ("old", "reference")


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


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


def work_tensors(work: Work) -> dict[str, Tensor]:
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


def work_facts(work: Work) -> dict[str, Any]:
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


def load_work(learner: Learner, facts: dict[str, Any], tensors: Mapping[str, Tensor]) -> Work:
    ragged = {name: _unragged(name, tensors) for name in _RAGGED}
    rows: list[TrainRow] = []
    for i, plain in enumerate(facts["rows"]):
        arrays: dict[str, Any] = {name: ragged[name][i] for name in _RAGGED}
        rows.append(TrainRow(**plain, **arrays))
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
        before = Before(part(tensors, f"before/{adapter}/"), good, bad)
        mean = {i: rows[i].advantage for i in batch.rows_of(adapter)}
        best, worst = best_and_worst(mean, learner.config.effect_turns)
        work.meters[adapter] = learner.session.meter(
            adapter, [rows[i] for i in best], [rows[i] for i in worst], before
        )
    return work


def _load_good(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
    out: dict[str, dict[int, Tensor]] = {}
    for name, tensor in part(tensors, "good/").items():
        n, _, plain = name.partition("/")
        out.setdefault(plain, {})[int(n)] = tensor
    return {name: tuple(parts[n] for n in sorted(parts)) for name, parts in out.items()}


def _load_credits(saved: dict[str, Any] | None) -> Credits | None:
    if saved is None:
        return None
    actions = [[ActionCredit(**action) for action in episode] for episode in saved["actions"]]
    by_row: dict[str, Any] = {
        name: {int(k): v for k, v in saved[name].items()} for name in ("advantage", "weight")
    }
    whole: dict[str, Any] = {**saved, "actions": actions, **by_row}
    return Credits(**whole)
