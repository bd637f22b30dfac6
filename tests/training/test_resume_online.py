"""Interrupted while it trains online: the iterations that follow are those that would have been."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from marft_agents.log import LogReader
from marft_agents.registry import Registry
from marft_agents.training.checkpoint import LEARNER, checkpoints, read
from marft_agents.training.config import MarftConfig
from marft_agents.training.dataset import TrainingSet, read_training_set
from marft_agents.training.stages import Online, Stages
from tests.training.learning import settings
from tests.training.synthetic import Team, TinyModel
from tests.training.test_resume import AGENTS, Interrupted, World, interrupt, trained

ITERATIONS = 3
FIRST, EACH = 8, 8
"""Steps of the stage on logs, and of an iteration: two agents, two blocks, two passes."""


class Recorded:
    """Other episodes every iteration, and a state that says how many were asked for."""

    def __init__(self, world: World, tiny: TinyModel) -> None:
        self.logs = [world.root / f"iteration-{i}" for i in range(ITERATIONS + 1)]
        self.asked, self.signal = 0, True
        for i, folder in enumerate(self.logs):
            if i and not folder.exists():
                Team(tiny, folder, chained=True).write(8, seed=i + 4, prefix=f"i{i}-")

    def collect(self, iteration: int, current: Mapping[str, int]) -> TrainingSet:
        self.asked += 1
        assert self.asked == iteration, "an iteration is collected once, whatever happens"
        return read_training_set(LogReader(self.logs[iteration]).episodes())

    def lines(self) -> list[str]:
        return []

    def metrics(self) -> dict[str, float]:
        return {"online/asked": float(self.asked)}

    def state(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.asked = state["asked"]


def config(**values: Any) -> MarftConfig:
    return settings(**{
        "offline": "awr", "awr_skip_share": 0.0, "save_steps": 1, "critic_epochs": 4,
        "critic_update_epochs": 2, "iterations": ITERATIONS, "online_learning_rate": 1e-2,
        "beta": 0.05, "order": "random", "lr_scheduler_type": "linear", **values,
    })  # fmt: skip


class Runs:
    """Runs on one world; a swap puts a version in use, as a server does."""

    def __init__(self, world: World, tiny: TinyModel) -> None:
        self.world, self.tiny = world, tiny

    def online(self, registry: Registry) -> Online:
        def swap(adapter: str, version: int) -> None:
            registry.promote(adapter, version, by="test", evidence={})

        return Online(Recorded(self.world, self.tiny), swap)

    def run(self, name: str, **options: Any) -> Registry:
        registry = self.world.registry(name)
        self.world.run(name, config(), online=self.online(registry), **options)
        return registry

    def interrupt(self, name: str, *, after: int) -> None:
        online = self.online(self.world.registry(name))
        interrupt(self.world, name, config(), after=after, online=online)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, tiny: TinyModel) -> Runs:
    return Runs(World(tmp_path_factory.mktemp("online"), model_dir, tiny), tiny)


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Registry:
    return runs.run("whole")


def assert_same_end(one: Registry, other: Registry) -> None:
    """Last versions, Adam, critic, guards, and the numbers of every iteration."""
    for agent in AGENTS:
        name = "adapter_model.safetensors"
        files = [(trained(r, agent) / name).read_bytes() for r in (one, other)]
        assert files[0] == files[1], agent
    ends = [read(checkpoints(r.root / LEARNER)[-1]) for r in (one, other)]
    assert set(ends[0].tensors) == set(ends[1].tensors)
    for name, tensor in ends[0].tensors.items():
        assert torch.equal(tensor, ends[1].tensors[name]), name
    assert ends[0].facts["guards"] == ends[1].facts["guards"]
    assert ends[0].facts["steps"] == ends[1].facts["steps"] == FIRST + ITERATIONS * EACH
    versions = ("router/version", "writer/version")
    rounds = [
        [{k: v for k, v in r.items() if k not in versions} for r in end.facts["rounds"]]
        for end in ends
    ]
    assert rounds[0] == rounds[1] and len(rounds[0]) == ITERATIONS


@pytest.mark.parametrize(
    "after",
    [
        5,  # on the logs
        FIRST + EACH + 2,  # in the second iteration, with the first agent
        FIRST + EACH + 6,  # with the second one, compounded
        FIRST + 2 * EACH,  # before the first step of the third
    ],
)
def test_resumed_iterations_are_those_that_would_have_been(
    after: int, runs: Runs, whole: Registry
) -> None:
    name = f"cut-{after}"
    runs.interrupt(name, after=after)
    registry = runs.run(name, resume=True)
    assert all(registry.versions(a) == whole.versions(a) == [1, 2, 3, 4, 5, 6] for a in AGENTS)
    assert_same_end(registry, whole)


def test_an_interruption_between_swap_and_checkpoint_repeats_the_end_of_the_iteration(
    runs: Runs, whole: Registry
) -> None:
    """The server serves a version that the run does not know of; the next one equals it."""
    real = Stages.save
    registry = runs.world.registry("swapped")

    def save(self: Stages) -> None:
        if self.learner.work is None and self.iteration == 2:
            raise Interrupted
        real(self)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Stages, "save", save)
        with pytest.raises(Interrupted):
            runs.run("swapped")
    assert [registry.current(a) for a in AGENTS] == [4, 4]
    runs.run("swapped", resume=True)
    name = "adapter_model.safetensors"
    for agent in AGENTS:
        assert registry.versions(agent)[-1] == 7
        one, two = (registry.path(agent, v) / name for v in (4, 5))
        assert one.read_bytes() == two.read_bytes()
    assert_same_end(registry, whole)


# -- a later run ---------------------------------------------------------------------------------


def later(runs: Runs, name: str, said: list[str], **values: Any) -> None:
    """A run from where another one ended, online only."""
    shutil.copytree(runs.world.root / "whole", runs.world.root / name)
    registry = runs.world.registry(name)
    changed = config(offline="none", iterations=1, **values)
    said += runs.world.run(name, changed, online=runs.online(registry))


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, ["Adam and critic go on from the run that made router@v6, writer@v6"]),
        (
            {"critic_hidden": 8},
            [
                "Adam goes on from the run that made router@v6, writer@v6",
                "the critic starts anew: critic_hidden is another one",
            ],
        ),
    ],
)
def test_a_later_run_goes_on_with_adam_and_critic_where_they_fit(
    values: dict[str, Any], wanted: list[str], runs: Runs, whole: Registry
) -> None:
    said: list[str] = []
    name = f"later-{len(values)}"
    later(runs, name, said, **values)
    assert [line for line in said if "Adam" in line or "critic starts" in line] == wanted
    registry = runs.world.registry(name)
    end = read(checkpoints(registry.root / LEARNER)[-1]).tensors
    steps = {float(t) for n, t in end.items() if n.startswith("adam/") and n.endswith("/step")}
    assert steps == {4.0 + ITERATIONS * 4 + 4}
    fits = next(int(t) for n, t in end.items() if n.endswith("fits"))
    assert (fits > 1) == (not values)
