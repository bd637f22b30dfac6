"""A run that was interrupted anywhere and resumed ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from marft_agents.errors import AdapterError, ConfigError
from marft_agents.registry import Registry, describe_base, durable, write_untrained_adapter
from marft_agents.training import finetune
from marft_agents.training.checkpoint import CHECKPOINTS, LEARNER, checkpoints, read
from marft_agents.training.config import MarftConfig
from marft_agents.training.trainer import MarftTrainer
from tests.tiny_model import make_tiny_model
from tests.training.learning import settings
from tests.training.synthetic import (
    Team,
    TinyModel,
    publish_trained,
    publish_untrained,
    snapshot,
)

AGENTS = ("router", "writer")


class Interrupted(BaseException):
    """The plug is pulled."""


@dataclass(frozen=True)
class Case:
    """Settings of a run, and the steps that each of its two agents takes."""

    values: dict[str, Any]
    first: int
    second: int

    @property
    def steps(self) -> int:
        return self.first + self.second


PPO: dict[str, Any] = {
    "offline": "ppo", "beta": 0.05, "entropy_coef": 0.01, "weight_decay": 0.1, "max_grad_norm": 0.5,
}  # fmt: skip
CASES = {
    "awr": Case({"offline": "awr", "awr_skip_share": 0.0, "lr_scheduler_type": "cosine"}, 4, 4),
    "ppo": Case(PPO, 4, 4),
    "token": Case(PPO | {"level": "token", "kl_reference": "base", "num_train_epochs": 1.5}, 3, 3),
    "group": Case({"offline": "ppo", "estimator": "group", "order": "random"}, 4, 4),
}


def config(case: Case, **values: Any) -> MarftConfig:
    """Eight episodes in blocks of four rows, two passes."""
    return settings(**{"save_steps": 1, "critic_epochs": 4, **case.values, **values})


class World:
    """One log, and runs on it; each one starts from the same adapters, which are not the base."""

    def __init__(self, root: Path, model_dir: Path, tiny: TinyModel) -> None:
        self.root, self.model_dir = root, model_dir
        self.logs = root / "logs"
        team = Team(tiny, self.logs, chained=True)
        team.write(4, seed=2, task="one")
        team.write(4, seed=5, prefix="f", task="two")

    def registry(self, name: str) -> Registry:
        root = self.root / name / "adapters"
        if root.exists():
            return Registry(root)
        registry = publish_untrained(root, self.model_dir)
        for seed, agent in enumerate(AGENTS):
            version = publish_trained(registry, self.model_dir, agent, seed=seed)
            registry.promote(agent, version, by="test", evidence={})
        return registry

    def run(
        self,
        name: str,
        config: MarftConfig,
        *,
        logs: Sequence[Path] | None = None,
        model: Path | None = None,
        **options: Any,
    ) -> list[str]:
        said: list[str] = []
        finetune(
            logs or [self.logs],
            model=str(model or self.model_dir),
            output=self.registry(name).root,
            config=config,
            say=said.append,
            **options,
        )
        return said

    def whole(self, kind: str) -> Registry:
        """The run of a kind that nothing interrupts."""
        if not (self.root / f"whole-{kind}").exists():
            self.run(f"whole-{kind}", config(CASES[kind]))
        return self.registry(f"whole-{kind}")


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, tiny: TinyModel
) -> Iterator[World]:
    yield World(tmp_path_factory.mktemp("resume"), model_dir, tiny)


def unplug(monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """End the process's work when so many steps were taken and their checkpoints written."""
    real = MarftTrainer.advance
    taken = iter(range(after + 1))

    def advance(self: MarftTrainer) -> bool:
        going_on = real(self)
        if next(taken) == after:
            raise Interrupted
        return going_on

    monkeypatch.setattr(MarftTrainer, "advance", advance)


def interrupt(world: World, name: str, config: MarftConfig, *, after: int, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        unplug(monkeypatch, after=after)
        with pytest.raises(Interrupted):
            world.run(name, config, **options)


def trained(registry: Registry, agent: str) -> Path:
    """The folder of the newest version."""
    return registry.path(agent, registry.versions(agent)[-1])


def assert_same(
    one: Registry, other: Registry, *, but: Sequence[str] = (), but_facts: Sequence[str] = ()
) -> None:
    """Published files, manifests (``but`` some settings and facts), Adam, critic and credit."""
    for agent in AGENTS:
        name = "adapter_model.safetensors"
        assert (trained(one, agent) / name).read_bytes() == (
            trained(other, agent) / name
        ).read_bytes(), agent
        facts = [r.manifest(agent, r.versions(agent)[-1]).training for r in (one, other)]
        for fact in facts:
            fact["settings"] = {k: v for k, v in fact["settings"].items() if k not in but}
        assert all(facts[0][k] == facts[1][k] for k in facts[0] if k not in but_facts)
    ends = [read(checkpoints(r.root / LEARNER)[-1]) for r in (one, other)]
    assert set(ends[0].tensors) == set(ends[1].tensors)
    for name, tensor in ends[0].tensors.items():
        assert torch.equal(tensor, ends[1].tensors[name]), name
    for name in ("steps", "guards", "nonfinite"):
        assert ends[0].facts[name] == ends[1].facts[name]
    credit = [(r.root / "credit.jsonl").read_text() for r in (one, other)]
    assert credit[0] == credit[1]


POINTS = [
    ("awr", 3),  # in the middle of the router
    ("awr", 7),  # before the last step
    ("ppo", 1),
    ("ppo", 4),  # between router and writer: the compound factors come next
    ("ppo", 6),
    ("token", 5),
    ("group", 4),
]


@pytest.mark.parametrize(("kind", "after"), POINTS)
def test_resumed_runs_end_as_uninterrupted_ones(kind: str, after: int, world: World) -> None:
    case, name = CASES[kind], f"{kind}-{after}"
    interrupt(world, name, config(case), after=after)
    registry = world.registry(name)
    assert all(registry.versions(a) == [1, 2] for a in AGENTS), "nothing was published"
    said = world.run(name, config(case), resume=True)
    assert f"{after} steps were taken before" in "\n".join(said)
    assert all(registry.versions(a) == [1, 2, 3] for a in AGENTS)
    assert_same(registry, world.whole(kind))


def test_the_writer_is_compounded_with_the_router_in_these_runs(world: World) -> None:
    """So that a resumed update would differ if the factors were lost."""
    interrupt(world, "factors", config(CASES["ppo"]), after=6)
    (*_, newest) = checkpoints(world.registry("factors").root / CHECKPOINTS)
    factors = [factor for _, factor in read(newest).facts["work"]["batch"]["factor"]]
    assert len(factors) == 8 and max(abs(factor - 1) for factor in factors) > 0.01


def test_a_run_may_be_interrupted_again_and_after_its_last_checkpoint(world: World) -> None:
    """Checkpoints every third step: two steps are taken again, and so is one later."""
    seldom = config(CASES["ppo"], save_steps=3)
    interrupt(world, "again", seldom, after=5)
    interrupt(world, "again", seldom, after=5, resume=True)  # five more steps, from the third
    said = world.run("again", seldom, resume=True)
    assert "6 steps were taken before" in "\n".join(said)
    assert_same(world.registry("again"), world.whole("ppo"), but=("save_steps",))


def test_an_interruption_before_the_first_step_leaves_nothing_to_resume(world: World) -> None:
    values = config(CASES["awr"])
    interrupt(world, "early", values, after=0)
    with pytest.raises(ConfigError, match=r"no checkpoint in .*Start without --resume"):
        world.run("early", values, resume=True)
    world.run("early", values)
    assert_same(world.registry("early"), world.whole("awr"))


def test_a_run_that_ended_cannot_be_resumed(world: World) -> None:
    world.whole("awr")
    with pytest.raises(ConfigError, match="a run that ended has none"):
        world.run("whole-awr", config(CASES["awr"]), resume=True)


def test_only_so_many_checkpoints_are_kept(world: World) -> None:
    interrupt(world, "kept", config(CASES["awr"], save_total_limit=3), after=6)
    found = checkpoints(world.registry("kept").root / CHECKPOINTS)
    assert [read(folder).facts["steps"] for folder in found] == [4, 5, 6]


def test_without_checkpoints_nothing_is_written_for_a_resume(world: World) -> None:
    interrupt(world, "none", config(CASES["awr"], save_strategy="no"), after=6)
    assert checkpoints(world.registry("none").root / CHECKPOINTS) == []


def test_case_20_a_full_disk_costs_checkpoints_and_no_training(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 20: it is said at every checkpoint, and the versions are published."""
    real = durable.write_file

    def full(path: Path, data: bytes) -> None:
        if path.parent.parent.name in (CHECKPOINTS, LEARNER):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(durable, "write_file", full)
    said = world.run("full", config(CASES["awr"]))
    lines = [line for line in said if "No space left on device" in line]
    assert len(lines) == 9 and all(line.startswith("WARNING: cannot") for line in lines)
    assert "the one before it stays, and training goes on" in lines[0]
    name = "adapter_model.safetensors"
    for agent in AGENTS:
        one, other = (
            trained(r, agent) / name for r in (world.registry("full"), world.whole("awr"))
        )
        assert one.read_bytes() == other.read_bytes()


# -- another run is not resumed ------------------------------------------------------------------


@pytest.fixture(scope="module")
def halfway(world: World) -> World:
    """An interrupted run under the name ``halfway``."""
    interrupt(world, "halfway", config(CASES["ppo"]), after=4)
    return world


def refused(world: World, values: MarftConfig, match: str, **options: Any) -> None:
    root = world.registry("halfway").root
    before = snapshot(root)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(MarftTrainer, "training_step", no_step)
        with pytest.raises((ConfigError, AdapterError), match=match):
            world.run("halfway", values, resume=True, **options)
    assert snapshot(root) == before


def no_step(*args: Any) -> Any:
    raise AssertionError("a step was taken")


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"learning_rate": 0.5}, r"learning_rate 0\.01, and now it is 0\.5"),
        ({"level": "token"}, "level 'action', and now it is 'token'"),
        ({"lora_rank": 16}, "lora_rank 8, and now it is 16"),
        ({"beta": 0.0}, r"beta 0\.05, and now it is 0\.0"),
        ({"seed": 7}, "seed 42, and now it is 7"),
        ({"agents": {"writer": "frozen"}}, "agents {}, and now it is {'writer': 'frozen'}"),
        ({"per_device_train_batch_size": 8}, "took 4 turns and now it would take 8"),
        ({"gradient_accumulation_steps": 3}, "took 4 turns and now it would take 12"),
    ],
)
def test_another_setting_is_refused_with_both_values(
    values: dict[str, Any], match: str, halfway: World
) -> None:
    refused(halfway, config(CASES["ppo"], **values), match)


def test_settings_that_change_nothing_may_change(halfway: World, tmp_path: Path) -> None:
    case = CASES["ppo"]
    shutil.copytree(halfway.root / "halfway", halfway.root / "copied")
    other = config(
        case, save_steps=2, save_total_limit=1, logging_steps=1, per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    halfway.run("copied", other, resume=True)
    changed = ("save_steps", "save_total_limit", "logging_steps")
    batches = ("per_device_train_batch_size", "gradient_accumulation_steps")
    assert_same(halfway.registry("copied"), halfway.whole("ppo"), but=(*changed, *batches))


def test_another_base_is_refused_with_both_names(halfway: World, tmp_path: Path) -> None:
    ours, other = halfway.model_dir, make_tiny_model(tmp_path / "other", seed=3)
    named = "|".join(describe_base(folder).fingerprint[:12] for folder in (ours, other))
    match = rf"is of the base tiny \(({named})\), and --model is other \(({named})\)"
    refused(halfway, config(CASES["ppo"]), match, model=other)


def test_another_set_of_agents_is_refused_by_name(
    halfway: World, tiny: TinyModel, tmp_path: Path
) -> None:
    Team(tiny, tmp_path, adapters={"poet": None}).write(4, seed=2, prefix="p", agents=("poet",))
    match = "agent 'poet' was not there when the run started and is poet now"
    refused(halfway, config(CASES["ppo"]), match, logs=[halfway.logs, tmp_path])


def test_more_episodes_of_the_same_agents_are_noted(
    halfway: World, tiny: TinyModel, tmp_path: Path
) -> None:
    """The update under way goes on with the episodes that it began with."""
    Team(tiny, tmp_path).write(3, seed=1, prefix="late")
    shutil.copytree(halfway.root / "halfway", halfway.root / "more")
    logs = [halfway.logs, tmp_path]
    said = halfway.run("more", config(CASES["ppo"]), resume=True, logs=logs)
    assert (
        "note: the run began with 8 episodes and there are 11 now; it goes on with those it began"
        " with" in said
    )
    assert_same(halfway.registry("more"), halfway.whole("ppo"), but_facts=("logs",))


def test_adapters_of_another_rank_are_refused_with_both(halfway: World) -> None:
    """Somebody put a version of rank 8 in use meanwhile."""
    name = "rank"
    shutil.copytree(halfway.root / "halfway", halfway.root / name)
    registry = halfway.registry(name)
    staged = halfway.root / "staged"
    write_untrained_adapter(staged, halfway.model_dir, rank=8, seed=0)
    base = describe_base(halfway.model_dir)
    manifest = registry.publish("writer", staged, base=base, parent=2, untrained=True)
    registry.promote("writer", manifest.version, by="test", evidence={})
    before = snapshot(registry.root)
    with pytest.raises(ConfigError, match="'writer' at rank 4, and this run at rank 8"):
        halfway.run(name, config(CASES["ppo"]), resume=True)
    assert snapshot(registry.root) == before


def test_a_fresh_optimizer_keeps_the_weights_and_says_so(halfway: World) -> None:
    shutil.copytree(halfway.root / "halfway", halfway.root / "fresh")
    case = CASES["ppo"]
    said = halfway.run("fresh", config(case), resume=True, fresh_optimizer=True)
    assert "the weights are kept and Adam's moments start anew (--fresh-optimizer)" in said
    registry, whole = halfway.registry("fresh"), halfway.whole("ppo")
    name = "adapter_model.safetensors"
    # The router was done; the writer, who comes next, had no moments yet.
    for agent in AGENTS:
        one, other = (trained(r, agent) / name for r in (registry, whole))
        assert one.read_bytes() == other.read_bytes()
    end = read(checkpoints(registry.root / LEARNER)[-1]).tensors
    assert not [n for n in end if n.startswith("adam/router/")]
    steps = {float(t) for n, t in end.items() if n.startswith("adam/writer/") and "/step" in n}
    assert steps == {4.0}


# -- kill -9 -------------------------------------------------------------------------------------


def test_runs_that_were_killed_at_random_moments_end_as_if_they_were_not(tmp_path: Path) -> None:
    """Every kill leaves whole checkpoints and versions only; see ``killing`` for many more."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.killing", str(tmp_path), "4", "3"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    tally = json.loads(done.stdout)
    assert tally["kills"] == 4 and tally["runs"] >= 1
    assert tally["after_steps"], "some came after a checkpoint"
