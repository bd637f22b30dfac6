"""Both benchmarks, small enough for a test: they run, and record what the page needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.learning.learn import learn, tasks_for
from benchmarks.learning.methods import BY_NAME, QUICK, Plan
from benchmarks.learning.relay import Task
from benchmarks.trainer import copies, ours
from benchmarks.trainer.measure import measure
from marft_agents.training._quiet import quiet
from tests.tiny_model import make_tiny_model


def even(_task: Task, said: Sequence[str]) -> float:
    """A verdict that an untrained model meets now and then."""
    return float(len(said[-1]) % 2)


@pytest.mark.parametrize("name", ["single", "ippo", "group", "marft-t"])
def test_every_method_takes_its_steps(
    name: str, relay_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.learning.team.verdict", even)
    with quiet():
        record = learn(relay_base, "duo", BY_NAME[name], 1, QUICK, 1e-3)
    assert record["episodes"] == [0, 16, 32]
    assert len(record["success"]) == 3
    assert record["silent_iterations"] == 0
    steps = 2 * 2 * 2 * 2  # iterations, agents, passes, blocks of 8 of 16 turns
    assert record["optimizer_steps"] == steps or (
        name == "group" and 0 < record["optimizer_steps"] <= steps
    )


def test_logs_come_first_where_the_plan_has_some(
    relay_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.learning.team.verdict", even)
    plan = Plan(iterations=1, episodes=16, block=8, held_out=20, final_tasks=20, logged=32)
    with quiet():
        record = learn(relay_base, "duo", BY_NAME["marft-a"], 1, plan, 1e-3)
    assert record["episodes"] == [0, 32, 48]


def test_all_methods_meet_the_same_tasks_in_groups() -> None:
    tasks = tasks_for("tasks duo 1 1", 2, 8, 4)
    assert tasks == tasks_for("tasks duo 1 1", 2, 8, 4)
    assert len(set(tasks)) == 2 and tasks[:4] == [tasks[0]] * 4
    assert tasks != tasks_for("tasks duo 1 2", 2, 8, 4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("objective", ["ppo", "awr"])
def test_the_product_is_timed(objective: str, tiny: Path, tmp_path: Path) -> None:
    with quiet():
        timed = ours.run(tiny, 2, tmp_path, objective)
    assert timed.tokens > 1000
    assert 0 < timed.step_seconds < timed.seconds


def test_a_base_per_agent_is_timed_on_the_same_tokens(tiny: Path, tmp_path: Path) -> None:
    with quiet():
        timed = copies.run(tiny, 2, tmp_path)
        assert timed.tokens == ours.run(tiny, 2, tmp_path, "ppo").tokens
    assert 0 < timed.step_seconds < timed.seconds


def test_a_process_is_measured_and_trl_takes_the_same_tokens(tiny: Path) -> None:
    record = measure("grpo", tiny, 1)
    assert record["tokens"] > 500
    assert 0 < record["step_seconds"] <= record["seconds"]
    assert record["peak_mib"] >= record["libraries_mib"] > 0
