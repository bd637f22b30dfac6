"""The private names of TRL that training builds on still look as expected."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback, TrainingArguments

from marft_agents.training import _trl

PACKAGE = Path(__file__).parents[2] / "marft_agents"


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # pyright: ignore[reportArgumentType] any callable


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("selective_log_softmax", ["logits", "index"]),
        ("entropy_from_logits", ["logits"]),
        ("use_adapter", ["model", "adapter_name"]),
        ("disable_dropout_in_model", ["model"]),
    ],
)
def test_functions_take_what_is_passed(name: str, expected: list[str]) -> None:
    assert parameters(getattr(_trl, name))[: len(expected)] == expected


def test_the_base_trainer_and_config_are_transformers() -> None:
    assert issubclass(_trl.BaseTrainer, Trainer)
    assert issubclass(_trl.BaseConfig, TrainingArguments)
    assert hasattr(_trl.BaseTrainer, "_send_telemetry")
    assert _trl.BaseTrainer.loss_is_scaled_for_ga is None


def test_the_loop_still_calls_what_is_overridden() -> None:
    assert parameters(Trainer.training_step) == ["self", "model", "inputs", "num_items_in_batch"]
    assert parameters(Trainer.create_optimizer) == ["self", "model"]
    assert parameters(Trainer._get_train_sampler) == ["self", "train_dataset"]  # pyright: ignore[reportPrivateUsage] overridden
    assert parameters(Trainer.log) == ["self", "logs", "start_time"]
    assert hasattr(TrainerCallback, "on_pre_optimizer_step")


@pytest.mark.parametrize("method", ["SFT", "KTO", "DPO"])
def test_trainers_take_rows_that_were_prepared_elsewhere(method: str) -> None:
    """Their own preparation encodes text; it is replaced, and so is what sends and writes."""
    trainer: Any = getattr(_trl, f"{method}Trainer")
    assert parameters(trainer._prepare_dataset)[:2] == ["self", "dataset"]
    assert issubclass(trainer, _trl.BaseTrainer)
    assert {"model", "args", "train_dataset", "processing_class", "callbacks"} <= set(
        parameters(trainer)
    )
    assert "create_model_card" in dir(trainer)
    settings = {f.name for f in dataclasses.fields(getattr(_trl, f"{method}Config"))}
    assert {"max_length", "router_aux_loss_coef"} <= settings


@pytest.mark.parametrize("method", ["KTO", "DPO"])
def test_references_may_be_known_beforehand(method: str) -> None:
    trainer: Any = getattr(_trl, f"{method}Trainer")
    assert "ref_model" in parameters(trainer)
    assert "if self.precompute_ref_logps:" in inspect.getsource(trainer._compute_loss)
    assert "beta" in {f.name for f in dataclasses.fields(getattr(_trl, f"{method}Config"))}


def test_one_device_can_be_asked_for() -> None:
    """More visible GPUs must not make the loop copy the model."""
    assert TrainingArguments(use_cpu=True).n_gpu <= 1
    assert "_n_gpu" in inspect.getsource(TrainingArguments)


def test_trl_is_imported_in_one_place_and_never_its_experiments() -> None:
    offences: list[str] = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                if name.split(".")[0] == "trl" and path.name != "_trl.py":
                    offences.append(f"{path}: {name}")
                if name.startswith("trl.experimental"):
                    offences.append(f"{path}: {name}")
    assert offences == []
