"""The private names of TRL that training builds on still look as expected."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

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
