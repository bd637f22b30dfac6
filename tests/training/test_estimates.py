"""Figures before a run: their arithmetic by hand, and against the tiny model itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from marft_agents.log import LogReader
from marft_agents.registry import Registry, describe_base, module_shapes
from marft_agents.training._quiet import quiet
from marft_agents.training.config import MarftConfig
from marft_agents.training.dataset import read_training_set
from marft_agents.training.estimates import (
    Device,
    Estimate,
    Load,
    Memory,
    Shape,
    adapter_parameters,
    adapters_bytes,
    base_bytes,
    pass_bytes,
    seconds,
    size_text,
    slot_line,
    slots,
    time_text,
)
from marft_agents.training.forecast import (
    estimate,
    estimate_lines,
    has_critic,
    measure,
    read_shape,
    training_load,
)
from marft_agents.training.packing import pack_turns
from marft_agents.training.plan import Plan, ServerLimits, make_plan
from marft_agents.training.run import new_adapter
from marft_agents.training.scoring import score
from marft_agents.training.session import Session
from tests.training.synthetic import Team, TinyModel, publish_untrained

SHAPE = Shape(
    parameters=1000, stored=2000, matrices=800, hidden=10, layers=2, inner=20, vocab=50
)  # fmt: skip
CPU = Device("cpu", flops=1e9, start=0.0, free=10**9)


def test_the_base_by_its_number_type_or_in_four_bits() -> None:
    assert base_bytes(SHAPE, width=4, four_bit=False) == 4000
    assert base_bytes(SHAPE, width=None, four_bit=False) == 2000
    assert base_bytes(SHAPE, width=None, four_bit=True) == 800 * 0.5625 + 200 * 2


def test_an_adapter_its_moments_and_what_guards_keep() -> None:
    modules = {"a.q_proj": (30, 10), "a.v_proj": (20, 10)}
    assert adapter_parameters(4, modules) == 4 * (40 + 30)
    assert adapters_bytes([100, 50]) == 4 * (6 * 150 + 100)
    assert adapters_bytes([]) == 0


def test_a_pass_grows_with_tokens_logits_and_width() -> None:
    def of(**changed: Any) -> float:
        standard: dict[str, Any] = {
            "tokens": 100, "sampled": 10, "width": 4, "checkpointing": False,
        }  # fmt: skip
        return pass_bytes(SHAPE, **(standard | changed))

    logits = 4 * 4 * 10 * 50
    assert of() == 2 * 100 * (14 * 10 + 5 * 20) * 4 + logits
    assert of(tokens=200) - logits == 2 * (of() - logits)
    assert of(checkpointing=True) < of()


def test_time_by_hand() -> None:
    load = Load(tokens=100, sampled=10, passes=2)
    forward = 100 * (2 * (800 + 50) + 4 * 50 * 10 * 2) + 2 * 10 * 10 * 50
    once = seconds(SHAPE, load, CPU, adapter=50, trained=False)
    assert once == pytest.approx(forward / 0.5e9)
    assert seconds(SHAPE, load, CPU, adapter=50, trained=True) == pytest.approx(2 * once)
    checkpointed = seconds(SHAPE, load, CPU, adapter=50, trained=True, checkpointing=True)
    assert checkpointed == pytest.approx(3 * once)
    slow = Device("cpu", 1e30, start=1e-3, free=None)
    assert seconds(SHAPE, load, slow, adapter=0, trained=True) == pytest.approx(2 * 2 * 0.5)
    assert seconds(SHAPE, Load(), CPU, adapter=0, trained=True) == 0


def made(total: int, free: int | None, *, one_pass: int = 1, kind: str = "cpu") -> Estimate:
    memory = Memory(base=total - one_pass, adapters=0, one_pass=one_pass, critic=0)
    return Estimate(memory, Device(kind, 1e9, 0.0, free), {"critic": 30.0, "training": 270.0}, 9)


def test_what_will_not_fit_is_said_with_what_to_do() -> None:
    assert made(10, 10).warning() is None and made(10, None).warning() is None
    assert "dtype: bfloat16" in str(made(10**9, 10**8).warning())
    assert "load_in_4bit" in str(made(10**9, 10**8, kind="cuda").warning())
    assert "lower pack_tokens" in str(made(10**9, 10**8, one_pass=9 * 10**8).warning())


def test_the_figures_in_words() -> None:
    memory, duration = made(3 * 10**9, 8 * 10**9).lines()
    assert memory.startswith("  memory: about 3.0 GB (base 3.0 GB") and "8.0 GB are free" in memory
    assert duration.startswith(
        "  time: about 5 min (critic 30 s, training 4 min), 9 trained tokens"
    )
    assert [size_text(x) for x in (1.44e9, 54.6e6, 10)] == ["1.4 GB", "55 MB", "below 1 MB"]
    assert [time_text(x) for x in (0.2, 40, 420, 9000)] == ["below 1 s", "40 s", "7 min", "2.5 h"]


def test_slots_of_the_engine() -> None:
    assert [slots(n) for n in (1, 2, 5)] == [2, 4, 10]
    assert "--max-loras 4 --max-lora-rank 16" in slot_line(2, 16, given=None, server=False)
    assert "the server holds 4" in slot_line(2, 16, given=4, server=True)
    assert "WARNING: the server holds 4" in slot_line(3, 16, given=4, server=True)
    assert "is not known" in slot_line(3, 16, given=None, server=True)


# -- against the model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny: TinyModel) -> tuple[Plan, Registry]:
    root = tmp_path_factory.mktemp("estimates")
    registry = publish_untrained(root / "adapters", tiny.folder)
    Team(tiny, root / "logs").write(24)
    config = settings()
    plan = make_plan(
        read_training_set(LogReader(root / "logs").episodes()),
        registry=registry,
        base=describe_base(tiny.folder),
        model_dir=tiny.folder,
        agents={},
        new=lambda adapter: new_adapter(config, adapter),
        max_length=None,
        limits=ServerLimits(16),
    )
    return plan, registry


def settings(**values: Any) -> MarftConfig:
    return MarftConfig(use_cpu=True, **values)


def session(place: tuple[Plan, Registry], tiny: TinyModel) -> Session:
    folders = {a: place[1].path(a, 1) for a in ("router", "writer")}
    with quiet():
        return Session(tiny.folder, folders, settings(), lambda line: None)


def test_parameters_are_those_of_the_loaded_model(
    place: tuple[Plan, Registry], tiny: TinyModel
) -> None:
    model = session(place, tiny).model
    base = [p for n, p in model.named_parameters() if ".lora_" not in n]
    assert read_shape(tiny.folder).parameters == sum(p.numel() for p in base)
    adapter = sum(p.numel() for n, p in model.named_parameters() if ".router." in n)
    targets = place[1].manifest("router", 1).target_modules
    assert adapter_parameters(4, module_shapes(tiny.folder, targets)) == adapter


def test_a_pass_holds_about_what_is_estimated(
    place: tuple[Plan, Registry], tiny: TinyModel
) -> None:
    """Bytes of all tensors kept for the backward pass, each storage once."""
    plan, shape = place[0], read_shape(tiny.folder)
    opened = session(place, tiny)
    rows = plan.rows_of(plan.adapters[0])
    (pack,) = pack_turns(rows, 1 << 20)
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in opened.model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = score(opened.model, pack, [1.0] * len(rows), entropy="measured")
    heads = len({node for path in pack.predictors for node in path})
    guess = pass_bytes(
        shape, tokens=len(pack.ids), sampled=heads, width=4, checkpointing=False
    )  # fmt: skip
    assert scores.logp_T.requires_grad
    assert 0.5 < guess / sum(kept.values()) < 2


def test_tokens_are_counted_as_they_will_be_packed(place: tuple[Plan, Registry]) -> None:
    plan = place[0]
    rows = plan.rows_of(plan.adapters[0])
    packed = training_load(rows, settings(num_train_epochs=2), 2)
    assert packed.load.passes == 2 * math.ceil(len(rows) / 8)
    assert packed.load.sampled <= 2 * sum(len(row.token_ids) for row in rows)
    alone = 2 * sum(row.length - 1 for row in rows)
    assert packed.load.tokens < alone, "prompts share their beginnings"


def test_many_rows_are_scaled_from_some(place: tuple[Plan, Registry]) -> None:
    plan = place[0]
    rows = plan.rows_of(plan.adapters[0])
    few = training_load(rows, settings(), 1)
    many = training_load(list(rows) * 40, settings(), 1)
    assert many.load.passes == pytest.approx(40 * few.load.passes, rel=0.05)


def test_the_figures_of_a_plan(place: tuple[Plan, Registry]) -> None:
    plan, registry = place
    figures = estimate(plan, registry, settings(), CPU)
    assert set(figures.steps) == {"critic", "training"}
    assert figures.memory.base == read_shape(plan.model_dir).stored
    longer = estimate(plan, registry, settings(num_train_epochs=8), CPU)
    assert longer.steps["training"] == pytest.approx(2 * figures.steps["training"], rel=0.05)
    assert longer.steps["critic"] == figures.steps["critic"]
    assert not has_critic(settings(offline="sft")) and not has_critic(settings(estimator="group"))
    tokenwise = estimate(plan, registry, settings(level="token"), CPU)
    assert tokenwise.memory.critic > figures.memory.critic
    alone = estimate(plan, registry, settings(estimator="group"), CPU)
    assert alone.memory.critic == 0 and set(alone.steps) == {"training"}


def test_a_dry_run_says_them(place: tuple[Plan, Registry], tiny: TinyModel) -> None:
    plan, registry = place
    limits = ServerLimits(16, None, 2, of_server=True)
    lines = list(
        estimate_lines(plan, registry, tiny.folder, settings(), limits, online=True)
    )  # fmt: skip
    assert [line.split(":")[0].strip() for line in lines] == [
        "estimate (rough)", "memory", "time", "online", "engine",
    ]  # fmt: skip
    assert "WARNING: the server holds 2" in lines[-1]
    alone = list(estimate_lines(None, registry, Path(tiny.folder), settings(), limits, online=True))
    assert len(alone) == 2 and alone[1].startswith("  engine: 2 adapters")


def test_a_device_is_measured(tiny: TinyModel) -> None:
    device = measure(torch.device("cpu"), torch.float32, read_shape(tiny.folder), 64)
    assert device.kind == "cpu" and 1e6 < device.flops < 1e15 and 0 < device.start < 0.1
    assert device.free is None or device.free > 0
