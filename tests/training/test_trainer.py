"""The training loop: one adapter moves at a time; how rows fall into batches is no matter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback

from marft_agents.errors import ConfigError, TrainingError
from marft_agents.training._quiet import quiet
from marft_agents.training.adapters import adapter_state
from marft_agents.training.config import MarftConfig
from marft_agents.training.losses import awr_loss
from marft_agents.training.trainer import Collator, MarftTrainer, WeightedTurn

AGENTS = ("router", "writer")


def make_model(model_dir: Path) -> PeftModel:
    with quiet():
        base: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="sdpa"
        )
        torch.manual_seed(0)
        shape = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
        model = get_peft_model(base, shape, adapter_name=AGENTS[0])
        for agent in AGENTS[1:]:
            model.add_adapter(agent, shape)
        model.set_adapter(AGENTS[0])
    return model


def turns(*adapters: str, count: int = 6) -> list[WeightedTurn]:
    return [
        WeightedTurn(
            adapter=adapter,
            prompt_ids=[1, 40, 41, 42 + n % 3],
            token_ids=[60 + n, 50, 2][: 1 + n % 3],
            weight=0.5 + n,
            temperature=1.0 if n % 2 else 0.7,
        )
        for adapter in adapters
        for n in range(count)
    ]


def train(
    model: PeftModel,
    rows: Sequence[WeightedTurn],
    tmp_path: Path,
    *,
    share: bool = True,
    callbacks: Sequence[TrainerCallback] = (),
    trainer: type[MarftTrainer] = MarftTrainer,
    **settings: Any,
) -> MarftTrainer:
    standard: dict[str, Any] = {
        "use_cpu": True,
        "learning_rate": 1e-2,
        "num_train_epochs": 2.0,
        "per_device_train_batch_size": 4,
        "output_dir": str(tmp_path / "loop"),
    }
    with quiet():
        made = trainer(
            model,
            MarftConfig(**(standard | settings)),
            rows,
            share_prefixes=share,
            callbacks=callbacks,
        )
        made.train()
    return made


def states(model: PeftModel) -> dict[str, dict[str, torch.Tensor]]:
    return {agent: adapter_state(model, agent) for agent in AGENTS}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_an_adapter_without_rows_stays_bit_identical_under_weight_decay(
    model_dir: Path, tmp_path: Path
) -> None:
    model = make_model(model_dir)
    before = states(model)
    base = {n: p.clone() for n, p in model.named_parameters() if ".lora_" not in n}
    train(model, turns("router"), tmp_path, weight_decay=0.5)
    after = states(model)
    assert same(before["writer"], after["writer"])
    assert not same(before["router"], after["router"])
    assert all(torch.equal(base[n], p) for n, p in model.named_parameters() if n in base)


class Moved(TrainerCallback):
    """Which adapters each optimizer step changed."""

    def __init__(self, model: PeftModel) -> None:
        self.model, self.last, self.steps = model, states(model), list[list[str]]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = states(self.model)
        self.steps.append([a for a in AGENTS if not same(now[a], self.last[a])])
        self.last = now


def test_every_step_moves_exactly_one_adapter_one_after_another(
    model_dir: Path, tmp_path: Path
) -> None:
    model = make_model(model_dir)
    moved = Moved(model)
    trainer = train(
        model, turns(*AGENTS), tmp_path, callbacks=[moved], weight_decay=0.1,
        gradient_accumulation_steps=2, per_device_train_batch_size=2,
    )  # fmt: skip
    assert moved.steps == [["router"]] * 4 + [["writer"]] * 4
    optimizer: Any = trainer.optimizer
    steps = {float(s["step"]) for s in optimizer.state.values()}
    assert steps == {4.0}, "each adapter has an Adam state of its own"


@pytest.mark.parametrize(
    "settings",
    [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"pack_tokens": 16},
        {"share": False},
    ],
)
def test_batches_accumulation_and_packing_do_not_change_what_is_learned(
    settings: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    one, other = make_model(model_dir), make_model(model_dir)
    train(one, turns(*AGENTS), tmp_path)
    train(other, turns(*AGENTS), tmp_path, **settings)
    for agent, state in states(one).items():
        for name, tensor in adapter_state(other, agent).items():
            assert torch.allclose(tensor, state[name], atol=2e-4), name


def test_the_weight_decides_what_is_imitated(model_dir: Path, tmp_path: Path) -> None:
    model = make_model(model_dir)
    rows = [
        WeightedTurn("router", [1, 40, 41], [token], weight)
        for token, weight in ((60, 10.0), (61, 0.01))
    ]
    train(model, rows, tmp_path, num_train_epochs=20)
    with torch.no_grad():
        logits = model(torch.tensor([[1, 40, 41]])).logits[0, -1]
    assert logits.argmax() == 60


def test_training_is_repeatable(model_dir: Path, tmp_path: Path) -> None:
    models = [make_model(model_dir) for _ in range(2)]
    for model in models:
        train(model, turns(*AGENTS), tmp_path)
    assert all(same(states(models[0])[a], states(models[1])[a]) for a in AGENTS)


class Sick(MarftTrainer):
    """Gives a loss that is not finite on its first ``sick`` packs."""

    sick = 1

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().compute_loss(*args, **kwargs)
        if self.sick > 0:
            self.sick -= 1
            return loss * float("nan")
        return loss


def _infinite(grad: torch.Tensor) -> torch.Tensor:
    return grad * float("inf")


class Steep(MarftTrainer):
    """Gives a finite loss with a gradient that is not, once."""

    steep = 1

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().compute_loss(*args, **kwargs)
        if self.steep > 0:
            self.steep -= 1
            loss.register_hook(_infinite)
        return loss


@pytest.mark.parametrize("kind", [Sick, Steep])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(
    kind: type[MarftTrainer], model_dir: Path, tmp_path: Path
) -> None:
    model = make_model(model_dir)
    moved = Moved(model)
    trainer = train(model, turns("router"), tmp_path, callbacks=[moved], trainer=kind)
    assert trainer.nonfinite == {"router": 1}
    assert moved.steps == [[], ["router"], ["router"], ["router"]]
    assert all(torch.isfinite(t).all() for t in states(model)["router"].values())


def test_too_many_of_them_stop_the_run(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sick, "sick", 99)
    with pytest.raises(TrainingError, match="'router': 2 steps gave a loss that is not finite"):
        train(make_model(model_dir), turns("router"), tmp_path, trainer=Sick, max_nonfinite_steps=1)


def test_metrics_are_logged_per_adapter(model_dir: Path, tmp_path: Path) -> None:
    trainer = train(make_model(model_dir), turns(*AGENTS), tmp_path, logging_steps=1)
    for agent in AGENTS:
        logged = [entry for entry in trainer.state.log_history if f"{agent}/loss" in entry]
        assert len(logged) == 4
        assert {f"{agent}/logp", f"{agent}/weight_mean", f"{agent}/entropy"} <= set(logged[0])
        assert 0 < logged[0][f"{agent}/entropy"] < 6


def test_gradient_checkpointing_learns_the_same(model_dir: Path, tmp_path: Path) -> None:
    one, other = make_model(model_dir), make_model(model_dir)
    train(one, turns("router"), tmp_path)
    train(other, turns("router"), tmp_path, gradient_checkpointing=True)
    for name, tensor in states(one)["router"].items():
        assert torch.allclose(tensor, states(other)["router"][name], atol=2e-4)


def test_a_mixed_batch_is_refused() -> None:
    with pytest.raises(TrainingError, match="mixes the adapters router, writer"):
        Collator(100, share=True)(turns(*AGENTS, count=1))


def test_fillers_are_left_out_of_the_loss() -> None:
    rows = [*turns("router", count=2), WeightedTurn("router", (0,), (0,), 0.0)]
    batch = Collator(100, share=True)(rows)["batch"]
    assert batch.weight_B == [0.5, 1.5]
    assert sum(len(pack.rows) for pack in batch.packs) == 2


def test_the_loss_is_the_weighted_mean_over_a_full_batch() -> None:
    logp, weight = torch.tensor([-1.0, -2.0]), torch.tensor([0.5, 2.0])
    assert awr_loss(logp, weight, 4).item() == pytest.approx((0.5 + 4.0) / 4)


def test_settings_of_the_run_are_not_changed_by_the_loop(model_dir: Path, tmp_path: Path) -> None:
    trainer = train(make_model(model_dir), turns("router", count=2), tmp_path, num_train_epochs=3)
    assert trainer.config.num_train_epochs == 3
    assert trainer.state.global_step == 3
    assert dataclasses.is_dataclass(trainer.config)


@pytest.mark.parametrize(
    "settings",
    [
        {"report_to": "no-such-tracker"},
        {"lr_scheduler_type": "cosine_with_min_lr"},  # needs arguments of its own
        {"optim": "paged_adamw_8bit"},  # needs a package that is not installed here
    ],
)
def test_a_setting_that_the_loop_cannot_carry_out_is_the_users_mistake(
    settings: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="a setting was refused"):
        train(make_model(model_dir), turns(*AGENTS), tmp_path, **settings)
