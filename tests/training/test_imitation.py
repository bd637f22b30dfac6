"""TRL's trainers on recorded ids: textbook losses, one adapter moves, the model is given back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from trl.trainer import base_trainer

from marft_agents.errors import ConfigError, NothingToLearn, TrainingError
from marft_agents.training import imitation
from marft_agents.training._quiet import quiet
from marft_agents.training._trl import use_adapter
from marft_agents.training.adapters import adapter_state
from marft_agents.training.config import MarftConfig
from marft_agents.training.imitation import train_with_trl
from marft_agents.training.preferences import METHODS, MethodRow
from marft_agents.training.scoring import score_turns

AGENTS = ("router", "writer", "marft-critic")
GOOD, BAD = [60, 61, 2], [70, 2]


def make_model(model_dir: Path, *, dropout: float = 0.0) -> PeftModel:
    """Three adapters that have been trained before: their B is not zero."""
    with quiet():
        base: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="sdpa"
        )
        shape = LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=dropout
        )
        torch.manual_seed(0)
        model = get_peft_model(base, shape, adapter_name=AGENTS[0])
        for agent in AGENTS[1:]:
            model.add_adapter(agent, shape)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.2)
        model.set_adapter(AGENTS[1])
    return model.eval()


def turns(count: int = 12, *, prompts: int = 3, good: int = 2) -> list[MethodRow]:
    """Every ``good``-th turn is good; replies differ in length, pad and end token are one id."""
    return [
        MethodRow(
            prompt_ids=[1, 40, 2, 41, 42 + n % prompts],
            token_ids=BAD if n % good else GOOD,
            episode=n,
            episode_reward=0.0 if n % good else 1.0,
            advantage=-1.0 if n % good else 1.0,
        )
        for n in range(count)
    ]


def train(
    model: PeftModel,
    method: str,
    tmp_path: Path,
    *,
    rows: Any = None,
    steps: int = -1,
    **settings: Any,
) -> tuple[dict[str, float], list[str]]:
    """Metrics and what was said; ``steps`` ends it early."""
    standard: dict[str, Any] = {
        "use_cpu": True,
        "learning_rate": 1e-2,
        "num_train_epochs": 3.0,
        "per_device_train_batch_size": 4,
    }
    said: list[str] = []
    config = MarftConfig(**(standard | settings))
    config.max_steps = steps
    with quiet():
        metrics = train_with_trl(
            model,
            method,
            {"router": turns()} if rows is None else rows,
            config,
            tmp_path / "scratch",
            said.append,
        )
    return metrics, said


def logps(
    model: PeftModel, rows: Sequence[MethodRow], adapter: str = "router"
) -> list[list[float]]:
    with use_adapter(model, adapter):
        return score_turns(model, rows, [1.0] * len(rows), pack_tokens=1000, share=False)


def states(model: PeftModel) -> dict[str, dict[str, torch.Tensor]]:
    return {agent: adapter_state(model, agent) for agent in AGENTS}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


# -- losses ------------------------------------------------------------------------------------


def test_sft_starts_at_the_mean_nll_of_the_good_replies_and_nothing_else(
    model_dir: Path, tmp_path: Path
) -> None:
    model, rows = make_model(model_dir), turns(good=3)
    good = [x for row in logps(model, [r for r in rows if r.episode_reward]) for x in row]
    metrics, _ = train(
        model, "sft", tmp_path, rows={"router": rows}, per_device_train_batch_size=12
    )
    assert metrics["router/loss_first"] == pytest.approx(-math.fsum(good) / len(good), abs=1e-4)
    assert metrics["router/loss"] < metrics["router/loss_first"]


def test_dpo_starts_at_ln_2_with_the_starting_adapter_as_reference(
    model_dir: Path, tmp_path: Path
) -> None:
    """The adapters' B is not zero, so the base as reference would give another loss."""
    model = make_model(model_dir)
    sums = [math.fsum(row) for row in logps(model, turns(6))]
    metrics, _ = train(model, "dpo", tmp_path, steps=1, per_device_train_batch_size=8)
    assert metrics["router/loss_first"] == pytest.approx(math.log(2), abs=1e-4)
    assert metrics["router/logps/chosen"] == pytest.approx(sum(sums[::2]) / 3, abs=1e-3)
    assert metrics["router/logps/rejected"] == pytest.approx(sum(sums[1::2]) / 3, abs=1e-3)


@pytest.mark.parametrize("good", [2, 4])
def test_kto_starts_at_one_half_however_many_of_each_label(
    good: int, model_dir: Path, tmp_path: Path
) -> None:
    model, rows = make_model(model_dir), turns(good=good)
    sums = [math.fsum(row) for row in logps(model, rows)]
    metrics, _ = train(
        model, "kto", tmp_path, rows={"router": rows}, steps=1, per_device_train_batch_size=12
    )
    assert metrics["router/loss_first"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["router/kl"] == pytest.approx(0, abs=1e-4)
    chosen = [x for x, row in zip(sums, rows, strict=True) if row.advantage > 0]
    assert metrics["router/logps/chosen"] == pytest.approx(sum(chosen) / len(chosen), abs=1e-3)


def test_kto_follows_its_formula_after_the_start(model_dir: Path, tmp_path: Path) -> None:
    """Second step of full batches: the loss from log-ratios scored by our own code."""
    rows, beta = turns(), 0.5
    stopped, model = make_model(model_dir), make_model(model_dir)
    settings: dict[str, Any] = {"per_device_train_batch_size": 12, "preference_beta": beta}
    before = [math.fsum(x) for x in logps(stopped, rows)]
    other = [
        MethodRow(row.prompt_ids, BAD if row.token_ids == GOOD else GOOD, 0, 0.0) for row in rows
    ]
    other_before = [math.fsum(x) for x in logps(stopped, other)]
    train(stopped, "kto", tmp_path, steps=1, **settings)
    ratios = [math.fsum(x) - b for x, b in zip(logps(stopped, rows), before, strict=True)]
    moved = [math.fsum(x) - b for x, b in zip(logps(stopped, other), other_before, strict=True)]
    z = max(0.0, sum(moved) / len(moved))
    losses = [
        1 - 1 / (1 + math.exp(-beta * (r - z) * (1 if row.advantage > 0 else -1)))
        for r, row in zip(ratios, rows, strict=True)
    ]
    metrics, _ = train(model, "kto", tmp_path, steps=2, **settings)
    assert metrics["router/kl"] == pytest.approx(z, abs=1e-3)
    assert metrics["router/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    assert metrics["router/loss"] < 0.499


@pytest.mark.parametrize("method", METHODS)
def test_good_replies_gain_and_bad_ones_lose(method: str, model_dir: Path, tmp_path: Path) -> None:
    model, rows = make_model(model_dir), turns(2, prompts=1)
    before = [math.fsum(x) for x in logps(model, rows)]
    train(model, method, tmp_path, num_train_epochs=6)
    good, bad = (
        math.fsum(x) - b for x, b in zip(logps(model, rows), before, strict=True)
    )  # fmt: skip
    assert good > 0.01
    assert method == "sft" or bad < -0.01


@pytest.mark.parametrize("method", METHODS)
def test_turns_longer_than_trls_limit_are_trained_whole(
    method: str, model_dir: Path, tmp_path: Path
) -> None:
    model = make_model(model_dir)
    long = [1, *range(40, 140)] * 11
    rows = [
        MethodRow(long, r.token_ids, r.episode, r.episode_reward, r.advantage) for r in turns(2)
    ]
    before = [math.fsum(x) for x in logps(model, rows)]
    metrics, _ = train(model, method, tmp_path, rows={"router": rows}, steps=1)
    assert len(long) > 1024
    if method == "sft":
        assert metrics["router/loss_first"] == pytest.approx(-before[0] / 3, abs=1e-3)
    else:
        assert metrics["router/logps/chosen"] == pytest.approx(before[0], abs=1e-3)
    assert logps(model, rows) != before


# -- one adapter moves ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_only_the_adapter_being_trained_moves(method: str, model_dir: Path, tmp_path: Path) -> None:
    model = make_model(model_dir)
    before = states(model)
    base = {n: p.clone() for n, p in model.named_parameters() if ".lora_" not in n}
    _, said = train(model, method, tmp_path, weight_decay=0.5, steps=2)
    after = states(model)
    assert [a for a in AGENTS if not same(before[a], after[a])] == ["router"]
    assert all(torch.equal(base[n], p) for n, p in model.named_parameters() if n in base)
    assert said[-1].startswith("  router: step 2/2  loss ")


def test_adapters_are_trained_one_after_another_each_with_its_own_settings(
    model_dir: Path, tmp_path: Path
) -> None:
    model = make_model(model_dir)
    before = states(model)
    metrics, _ = train(
        model,
        "sft",
        tmp_path,
        rows={"router": turns(), "writer": turns()},
        adapters={"writer": {"learning_rate": 1e-30}},
    )
    assert {name.split("/")[0] for name in metrics} == {"router", "writer"}
    assert [a for a in AGENTS if not same(before[a], states(model)[a])] == ["router"]


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_moves_another_adapter_is_stopped(
    method: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(model_dir)
    kind = imitation.TRAINERS[method][0]
    step = kind.training_step

    def leaky(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in model.named_parameters():
            if ".writer." in name:
                parameter.data[0, 0] += 1e-7
        return step(self, *args, **kwargs)

    monkeypatch.setattr(kind, "training_step", leaky)
    with pytest.raises(TrainingError, match="'router' changed writer too; nothing was published"):
        train(model, method, tmp_path, steps=1)


def test_an_adapter_with_nothing_to_learn_is_said_and_left(model_dir: Path, tmp_path: Path) -> None:
    model = make_model(model_dir)
    before = states(model)
    rows = {"router": turns(), "writer": turns()[:1]}
    metrics, said = train(model, "kto", tmp_path, rows=rows, steps=1)
    assert {name.split("/")[0] for name in metrics} == {"router"}
    assert "kto: writer has nothing to learn from (1 desirable and 0 undesirable turns" in said[1]
    assert same(before["writer"], states(model)["writer"])
    with pytest.raises(NothingToLearn):
        train(model, "kto", tmp_path, rows={"writer": turns()[:1]})


# -- the model is given back ---------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_given_back_as_it_was(method: str, model_dir: Path, tmp_path: Path) -> None:
    model = make_model(model_dir)
    base: Any = model.get_base_model()
    config, generation = base.config.to_dict(), base.generation_config.to_dict()
    forward = base.forward
    thawed = [p.requires_grad for p in model.parameters()]
    train(model, method, tmp_path, steps=1, gradient_checkpointing=True)
    assert base.forward == forward and "forward" not in model.__dict__
    assert base.config.to_dict() == config
    assert base.generation_config.to_dict() == generation
    assert model.active_adapters == ["writer"]
    assert [p.requires_grad for p in model.parameters()] == thawed
    assert all(p.grad is None for p in model.parameters())
    assert not model.training and not base.is_gradient_checkpointing
    assert not base.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_written_but_scratch_and_nothing_is_sent(
    method: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def phone(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("telemetry")

    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(base_trainer, "send_telemetry", phone)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    train(make_model(model_dir), method, tmp_path, steps=2, save_steps=1)
    assert list((tmp_path / "cwd").iterdir()) == []
    assert [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("method", METHODS)
def test_dropout_is_off_wherever_it_hides(method: str, model_dir: Path, tmp_path: Path) -> None:
    model, plain = make_model(model_dir, dropout=0.5), make_model(model_dir)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.__dict__["attention_dropout"] = 0.5
    for one in (model, plain):
        train(one, method, tmp_path, steps=2)
    assert same(states(model)["router"], states(plain)["router"])


@pytest.mark.parametrize("method", METHODS)
def test_training_is_repeatable_and_checkpointing_changes_nothing(
    method: str, model_dir: Path, tmp_path: Path
) -> None:
    one, other, saving = (make_model(model_dir) for _ in range(3))
    for model, checkpointing in ((one, False), (other, False), (saving, True)):
        train(model, method, tmp_path, steps=3, gradient_checkpointing=checkpointing)
    assert same(states(one)["router"], states(other)["router"])
    for name, tensor in states(saving)["router"].items():
        assert torch.allclose(tensor, states(one)["router"][name], atol=1e-4)


def test_adapters_on_a_quantised_base_stay_in_float32(model_dir: Path, tmp_path: Path) -> None:
    """TRL rounds them to bfloat16 there, where a small step is lost."""
    model = make_model(model_dir)
    base: Any = model.get_base_model()
    base.is_loaded_in_8bit = True
    before = states(model)["router"]
    metrics, _ = train(model, "dpo", tmp_path, steps=1, learning_rate=1e-30)
    assert metrics["router/loss_first"] == pytest.approx(math.log(2), abs=1e-4)
    assert same(states(model)["router"], before)
    assert all(p.dtype == torch.float32 for n, p in model.named_parameters() if ".lora_" in n)


# -- refusals and guards -------------------------------------------------------------------------


def test_kto_needs_two_turns_in_a_batch(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="per_device_train_batch_size to 2 or more"):
        train(make_model(model_dir), "kto", tmp_path, per_device_train_batch_size=1)


def test_a_setting_that_cannot_be_carried_out_is_the_users_mistake(
    model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="a setting was refused"):
        train(make_model(model_dir), "sft", tmp_path, optim="paged_adamw_8bit")


def _infinite(grad: torch.Tensor) -> torch.Tensor:
    return grad * float("inf")


@pytest.mark.parametrize("method", METHODS)
def test_steps_that_are_not_finite_change_nothing_and_stop_the_run_when_there_are_many(
    method: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(model_dir)
    before = states(model)
    kind = imitation.TRAINERS[method][0]
    loss = kind.compute_loss

    def steep(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = loss(self, *args, **kwargs)
        out.register_hook(_infinite)
        return out

    monkeypatch.setattr(kind, "compute_loss", steep)
    _, said = train(model, method, tmp_path, steps=2)
    assert same(before["router"], states(model)["router"])
    assert said[-1] == "WARNING: router: 2 steps were not finite and were skipped"
    with pytest.raises(TrainingError, match="'router': 2 steps gave a gradient"):
        train(model, method, tmp_path, max_nonfinite_steps=1)
    assert model.active_adapters == ["writer"]
