"""Trackers get every metric, under its agent's name, at steps that go on over the whole run."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from marft_agents.errors import ConfigError
from marft_agents.training import FinetuneResult, MarftConfig, Online, finetune
from marft_agents.training.tracking import check_trackers, tracked, tracking_lines
from tests.cli.played_app import Played
from tests.cli.shop import FakeGateway
from tests.training.online_kit import make_source, make_tasks
from tests.training.synthetic import Team, TinyModel, publish_untrained

Logged = list[tuple[int, dict[str, float]]]


class FakeTracker(TrainerCallback):
    """Keeps what a real one would write."""

    logged: Logged = []  # noqa: RUF012 of all of them
    folders: list[str] = []  # noqa: RUF012 of all of them

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        json.loads(args.to_json_string())
        self.folders.append(args.output_dir)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        assert state.is_world_process_zero
        self.logged.append((state.global_step, dict(logs or {})))


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Logged]:
    trackers = integration_utils.INTEGRATION_TO_CALLBACK
    monkeypatch.setitem(trackers, "tensorboard", FakeTracker)
    monkeypatch.setattr(FakeTracker, "logged", [])
    monkeypatch.setattr(FakeTracker, "folders", [])
    yield FakeTracker.logged


class Place:
    """Logs, adapters, and the app behind them."""

    def __init__(self, root: Path, tiny: TinyModel) -> None:
        self.root, self.model = root, tiny.folder
        publish_untrained(root / "adapters", tiny.folder)
        Team(tiny, root / "logs").write(16)
        self.played = Played(tiny, root / "adapters", root / "logs")
        self.gateway = FakeGateway(tiny.folder, root / "adapters")

    def swap(self, adapter: str, version: int) -> None:
        self.gateway.swap(adapter, version)

    def run(self, *, online: bool = False, resume: bool = False, **settings: Any) -> FinetuneResult:
        standard: dict[str, Any] = {
            "use_cpu": True, "num_train_epochs": 2, "episodes_per_iteration": 8, "iterations": 2,
            "online_learning_rate": 1e-3, "report_to": "tensorboard", "logging_steps": 1,
        }  # fmt: skip
        source = make_source(
            self.root / "logs", self.played.play, make_tasks(8), episodes_per_iteration=8
        )
        with source:
            result = finetune(
                [self.root / "logs"],
                model=str(self.model),
                output=self.root / "adapters",
                config=MarftConfig(**(standard | settings)),
                online=Online(source, self.swap) if online else None,
                resume=resume,
                say=lambda line: None,
            )
        assert result is not None
        return result


def steps_of(logged: Logged, name: str) -> list[int]:
    return [step for step, values in logged if name in values]


def increasing(steps: list[int], *, strictly: bool = True) -> bool:
    return all(a < b or (a == b and not strictly) for a, b in itertools.pairwise(steps))


def test_every_metric_of_every_agent_arrives_at_increasing_steps(
    logged: Logged, tiny: TinyModel, tmp_path: Path
) -> None:
    place = Place(tmp_path, tiny)
    place.run(online=True)
    assert FakeTracker.folders == [str(tmp_path / "adapters" / ".tracking")]
    assert increasing([step for step, _ in logged], strictly=False)
    offline = {f"{a}/{n}" for a in ("router", "writer") for n in ("loss", "logp", "weight_mean")}
    gradient = {
        f"{a}/{n}"
        for a in ("router", "writer")
        for n in ("kl", "ratio", "entropy", "clip_ratio/low_mean", "advantage", "version",
                  "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference/max")
    }  # fmt: skip
    names = {name for _, values in logged for name in values}
    assert offline | gradient <= names
    assert {"online/reward_mean", "online/episodes", "reward"} <= names
    for name in names - {"loss", "grad_norm"}:
        assert steps_of(logged, name), name
        assert increasing(steps_of(logged, name), strictly=name.startswith("online/")), name
    assert len(steps_of(logged, "online/reward_mean")) == 2
    assert all(math.isfinite(v) for _, values in logged for v in values.values())
    last = steps_of(logged, "router/logp")[-1]
    assert steps_of(logged, "router/ratio")[0] > last, "online goes on counting"


def test_a_resumed_run_goes_on_counting(logged: Logged, tiny: TinyModel, tmp_path: Path) -> None:
    place = Place(tmp_path, tiny)
    place.gateway.refuse = "writer"
    with pytest.raises(Exception, match="refused"):
        place.run(online=True, save_steps=1, offline="none")
    before = max(step for step, _ in logged)
    place.gateway.refuse = None
    count = len(logged)
    place.run(online=True, resume=True, save_steps=1, offline="none")
    assert before > 0 and min(step for step, _ in logged[count:]) >= before
    assert increasing([step for step, _ in logged], strictly=False)


@pytest.mark.parametrize("method", ["sft", "kto"])
def test_trls_trainers_report_under_the_agents_names(
    method: str, logged: Logged, tiny: TinyModel, tmp_path: Path
) -> None:
    Place(tmp_path, tiny).run(offline=method)
    for name in ("router/loss", "writer/loss"):
        assert len(steps_of(logged, name)) > 1 and increasing(steps_of(logged, name)), name
    assert steps_of(logged, "router/loss")[-1] < steps_of(logged, "writer/loss")[0]


def config(*names: str) -> MarftConfig:
    return MarftConfig(use_cpu=True, report_to=list(names))


def test_a_missing_tracker_is_named_with_the_command(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing(TrainerCallback):
        def __init__(self) -> None:
            raise RuntimeError("WandbCallback requires wandb to be installed")

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Missing)
    with pytest.raises(ConfigError, match="wandb is not installed: pip install wandb"):
        Place(tmp_path, tiny).run(report_to="wandb")
    with pytest.raises(ConfigError, match="no tracker is called 'tensorbord'; use trackio"):
        check_trackers(config("tensorbord"))
    check_trackers(config("none"))


def test_where_to_look_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    made = tracked(config("tensorboard", "trackio", "wandb"), tmp_path)
    assert list(tracking_lines(made)) == [
        f"tracking: tensorboard --logdir {tmp_path}/.tracking/runs",
        "tracking: trackio show --project marft-agents",
        "tracking: wandb, project marft-agents",
    ]
    assert list(tracking_lines(tracked(config(), tmp_path))) == []


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_tensorboard_itself(tiny: TinyModel, tmp_path: Path) -> None:
    Place(tmp_path, tiny).run()
    assert list((tmp_path / "adapters" / ".tracking" / "runs").glob("*/events.out.*"))
