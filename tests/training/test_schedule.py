"""Who is updated when, in which order, over which rows, and with which step size."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from marft_agents.errors import ConfigError
from marft_agents.training import finetune
from marft_agents.training.config import MarftConfig
from marft_agents.training.dataset import EpisodeView, TrainingSet
from marft_agents.training.loop import Learner
from marft_agents.training.rates import block_size, rate_factor
from marft_agents.training.schedule import (
    depth_in_team,
    passes,
    schedule_of,
    steps_of,
    update_order,
)
from tests.training.learning import learn, make_learner, make_rows, make_work, recorded, settings


def view(agents: list[str], depends: list[list[int]], steps: list[int]) -> EpisodeView:
    zeros = [0.0] * len(agents)
    turns = [str(k) for k in range(len(agents))]
    return EpisodeView("e", None, agents, turns, steps, zeros, zeros, depends, False, [])


# -- order ---------------------------------------------------------------------------------------


def test_depth_counts_other_adapters_of_the_same_step_that_were_read() -> None:
    data = TrainingSet(
        episodes=[
            view(["a", "b", "c"], [[], [0], [0, 1]], [0, 0, 0]),
            view(["c", "a", "a", "b"], [[], [0], [1], [0, 1, 2]], [0, 0, 0, 1]),
        ]
    )
    roles = {"a": "a", "b": "b", "c": "c"}
    depth = depth_in_team(data, roles, ["a", "b", "c"])
    assert depth == {"a": 1 / 3, "b": 0.5, "c": 1.0}
    shared = depth_in_team(data, {"a": "ab", "b": "ab", "c": "frozen"}, ["ab"])
    assert shared == {"ab": 0.0}, "a frozen agent moves nobody, one's own turns neither"


DEPTH = {"planner": 0.0, "coder": 1.0, "critic": 2.0, "poet": 0.0}


def test_sequential_goes_along_the_dependencies_and_ties_by_name() -> None:
    order = update_order(DEPTH, schedule="sequential", order="dependency", seed=0, iteration=3)
    assert order == [["planner"], ["poet"], ["coder"], ["critic"]]


def test_a_random_order_differs_between_rounds_and_not_between_runs() -> None:
    def orders(seed: int) -> list[list[list[str]]]:
        return [
            update_order(DEPTH, schedule="sequential", order="random", seed=seed, iteration=i)
            for i in range(20)
        ]

    assert orders(1) == orders(1) != orders(2)
    assert all(sorted(group[0] for group in order) == sorted(DEPTH) for order in orders(1))
    firsts = Counter(order[0][0] for order in orders(1))
    assert set(firsts) == set(DEPTH)


def test_alternate_trains_one_adapter_a_round_in_turn() -> None:
    orders = [
        update_order(DEPTH, schedule="alternate", order="dependency", seed=0, iteration=i)
        for i in range(5)
    ]
    assert orders == [[["planner"]], [["poet"]], [["coder"]], [["critic"]], [["planner"]]]


def test_simultaneous_is_one_group() -> None:
    order = update_order(DEPTH, schedule="simultaneous", order="dependency", seed=0, iteration=0)
    assert order == [["planner", "poet", "coder", "critic"]]


@pytest.mark.parametrize(
    ("objective", "values", "wanted"),
    [
        ("ppo", {}, "sequential"),
        ("ppo", {"schedule": "alternate"}, "alternate"),
        ("ppo", {"estimator": "ippo"}, "simultaneous"),
        ("ppo", {"estimator": "ippo", "schedule": "alternate"}, "alternate"),
        ("awr", {"schedule": "alternate"}, "sequential"),
    ],
)
def test_the_schedule_of_an_update(objective: str, values: dict[str, Any], wanted: str) -> None:
    assert schedule_of(settings(**values), objective) == wanted


# -- passes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 3, 8, 50])
@pytest.mark.parametrize("epochs", [1.0, 2.0, 0.5, 1.5])
def test_every_pass_takes_every_row_once(block: int, epochs: float) -> None:
    rows = [100 + i for i in range(20)]
    lengths = {row: (row * 7) % 11 for row in rows}
    blocks = passes(rows, lengths, block=block, epochs=epochs, key="k")
    a_pass = math.ceil(20 / block)
    assert len(blocks) == steps_of(20, block=block, epochs=epochs) == math.ceil(a_pass * epochs)
    for n in range(int(epochs)):
        taken = [row for b in blocks[n * a_pass : (n + 1) * a_pass] for row in b]
        assert sorted(taken) == rows
    assert all(1 <= len(b) <= block for b in blocks)


def test_passes_are_shuffled_and_repeatable() -> None:
    rows, lengths = list(range(40)), dict.fromkeys(range(40), 1)
    one = passes(rows, lengths, block=4, epochs=2, key="a")
    assert one == passes(rows, lengths, block=4, epochs=2, key="a")
    assert one != passes(rows, lengths, block=4, epochs=2, key="b")
    assert one[:10] != one[10:], "the second pass is in another order"
    assert [row for b in one[:10] for row in b] != rows


def test_rows_of_a_block_are_of_like_length() -> None:
    lengths = {row: row for row in range(64)}
    blocks = passes(list(lengths), lengths, block=8, epochs=1, key="k")
    assert all(max(b) - min(b) <= 12 for b in blocks)


def test_a_block_is_all_processes_rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(per_device_train_batch_size=2, gradient_accumulation_steps=3)
    assert block_size(config) == 6
    monkeypatch.setattr(MarftConfig, "world_size", 2)
    assert block_size(config) == 12


# -- step sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "values", "wanted"),
    [
        ("constant", {}, [1, 1, 1, 1, 1]),
        ("linear", {}, [1, 0.75, 0.5, 0.25, 0]),
        ("linear", {"warmup_steps": 2}, [0, 0.5, 1, 0.5, 0]),
        ("cosine", {}, [1, 0.8536, 0.5, 0.1464, 0]),
        ("polynomial", {"lr_scheduler_kwargs": {"lr_end": 0.005}}, [1, 0.875, 0.75, 0.625, 0.5]),
        ("cosine_with_min_lr", {"lr_scheduler_kwargs": {"min_lr": 0.005}}, [1, 0.9268, 0.75]),
    ],
)
def test_step_sizes_follow_the_schedule(
    kind: str, values: dict[str, Any], wanted: list[float]
) -> None:
    config = settings(lr_scheduler_type=kind, **values)
    factors = [rate_factor(config, at, 4, config.learning_rate) for at in range(len(wanted))]
    assert factors == pytest.approx(wanted, abs=1e-4)


def watch_rates(learner: Learner) -> list[float]:
    """The step size that Adam finds at every step, of the adapter that is stepped."""
    rates: list[float] = []
    trainer: Any = learner.trainer
    take, optimizer = trainer.training_step, trainer.optimizer

    def step(*args: Any) -> Any:
        adapter = trainer.block.adapter
        out = take(*args)
        rates.extend(g["lr"] for g in optimizer.param_groups if g["adapter"] == adapter)
        return out

    trainer.training_step = step
    return rates


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_runs_over_all_adapters_steps_offline(
    kind: str, model_dir: Path, tmp_path: Path
) -> None:
    """Six steps of the router, then four of the writer, whose own step size is smaller."""
    own = {"writer": {"learning_rate": 2e-3}}
    learner = make_learner(model_dir, tmp_path, lr_scheduler_type=kind, own_settings=own)
    rates = watch_rates(learner)
    learn(learner, [make_work(learner, recorded(learner, make_rows()))])
    shape = [
        1 - n / 10 if kind == "linear" else 0.5 * (1 + math.cos(math.pi * n / 10))
        for n in range(10)
    ]
    wanted = [(1e-2 if n < 6 else 2e-3) * factor for n, factor in enumerate(shape)]
    assert rates == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(
    ("warmup", "wanted"),
    [(0, (1e-3, 7.5e-4, 5e-4, 2.5e-4)), (2, (5e-4, 5e-4, 1e-3, 5e-4))],
)
def test_online_the_schedule_runs_over_the_rounds(
    warmup: int, wanted: tuple[float, ...], model_dir: Path, tmp_path: Path
) -> None:
    """The first round of a warm-up, whose step size would be 0, takes that of the second."""
    learner = make_learner(
        model_dir,
        tmp_path,
        lr_scheduler_type="linear",
        warmup_steps=warmup,
        iterations=4,
        online_learning_rate=1e-3,
    )
    rates = watch_rates(learner)
    rows = recorded(learner, [r for r in make_rows(episodes=2) if r.adapter == "router"])
    learn(
        learner,
        [make_work(learner, rows, iteration=i, order=[["router"]]) for i in range(1, 5)],
    )
    assert rates == pytest.approx([rate for rate in wanted for _ in range(2)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "cosine_with_min_lr is refused: .*min_lr"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "warmup_stable_decay is refused"),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1.0}},
            "polynomial is refused",
        ),
    ],
)
def test_a_schedule_that_no_step_can_follow_is_refused_before_anything_is_read(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        finetune(
            [tmp_path / "no-logs"], model="no-model", output=tmp_path, config=settings(**values)
        )


@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", "no-such-schedule"])
def test_a_schedule_that_watches_or_does_not_exist_is_no_setting(kind: str) -> None:
    with pytest.raises(ConfigError, match="a setting was refused"):
        settings(lr_scheduler_type=kind)
