"""One run: play, learn, measure, again and again, through the product's own learner."""

from __future__ import annotations

import dataclasses
import random
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning.methods import COMMON, Method, Plan, make_config
from benchmarks.learning.relay import NAMES, TEAM_SIZES, Task, draw_task
from benchmarks.learning.team import as_episode, play, success
from benchmarks.learning.words import Words
from benchmarks.records import Record, load_now
from marft_agents.errors import NothingToLearn
from marft_agents.registry import write_untrained_adapter
from marft_agents.schema import Episode
from marft_agents.training.dataset import read_training_set
from marft_agents.training.loop import Learner
from marft_agents.training.session import Session

RANK, ALPHA = 8, 16
_HELD_OUT = "held out"


def tasks_for(key: str, agents: int, count: int, group_size: int = 1) -> list[Task]:
    """``count`` tasks in groups of equal ones; the same key draws the same tasks."""
    draw = random.Random(key)
    groups = [draw_task(draw, agents) for _ in range(count // group_size)]
    return [task for task in groups for _ in range(group_size)]


@dataclasses.dataclass
class Run:
    """A method with a team, a seed and a plan, and what was measured so far."""

    base: Path
    size: str
    method: Method
    seed: int
    plan: Plan
    rate: float
    scratch: Path
    at: list[int] = dataclasses.field(default_factory=list[int])
    curve: list[float] = dataclasses.field(default_factory=list[float])
    explained: list[float] = dataclasses.field(default_factory=list[float])
    silent: int = 0
    """Iterations whose episodes all earned the same."""
    final: float = 0.0
    untrained: float = 0.0

    def __post_init__(self) -> None:
        self.agents = TEAM_SIZES[self.size]
        self.adapters = self.method.adapters(NAMES[: self.agents])
        config = make_config(self.method, self.plan, self.seed, self.rate, self.scratch)
        starts = {
            adapter: write_untrained_adapter(
                self.scratch / adapter,
                self.base,
                rank=RANK,
                alpha=ALPHA,
                target_modules=config.lora_target_modules,
                seed=1000 * self.seed + n,
            )
            for n, adapter in enumerate(dict.fromkeys(self.adapters.values()))
        }
        self.session = Session(self.base, starts, config, _quiet)
        self.learner = Learner(self.session, config, _quiet)
        self.words = Words(self.session.tokenizer)

    def go(self) -> None:
        self.untrained = self.measure(self.plan.final_tasks)
        self.at, self.curve = [0], [self.measure(self.plan.held_out)]
        self.learner.run(self.program())
        self.final = self.measure(self.plan.final_tasks)

    def program(self) -> Generator[Any, None, None]:
        played = 0
        if self.plan.logged:
            yield from self.update(self.episodes(0, self.plan.logged), "awr", 0)
            played = self.plan.logged
            self.note(played)
        for iteration in range(1, self.plan.iterations + 1):
            fresh = self.episodes(iteration, self.plan.episodes)
            yield from self.update(fresh, "ppo", iteration)
            played += self.plan.episodes
            self.note(played)

    def episodes(self, iteration: int, count: int) -> list[Episode]:
        """Fresh episodes of the team as it is now."""
        key = f"tasks {self.size} {self.seed} {iteration}"
        tasks = tasks_for(key, self.agents, count, self.plan.group_size)
        generator = torch.Generator().manual_seed(10_000 * self.seed + iteration)
        relays = play(self.session.model, self.words, tasks, self.adapters, generator)
        return [
            as_episode(relay, f"{iteration}-{n}", self.adapters, iteration + 1)
            for n, relay in enumerate(relays)
        ]

    def update(
        self, episodes: Sequence[Episode], objective: str, iteration: int
    ) -> Generator[Any, None, None]:
        data = read_training_set(episodes)
        try:
            report = yield from self.learner.update(
                data, self.adapters, objective=objective, iteration=iteration
            )
        except NothingToLearn:
            self.silent += 1
            return
        if report.explained_variance is not None:
            self.explained.append(report.explained_variance)

    def note(self, played: int) -> None:
        self.at.append(played)
        self.curve.append(self.measure(self.plan.held_out))

    def measure(self, count: int) -> float:
        """Success on held-out tasks, the same for every method and seed."""
        tasks = tasks_for(f"{_HELD_OUT} {self.size}", self.agents, count)
        generator = torch.Generator().manual_seed(self.seed)
        return success(play(self.session.model, self.words, tasks, self.adapters, generator))


def _quiet(_line: str) -> None:
    """What the product says of each step is for people who train one team."""


def learn(base: Path, size: str, method: Method, seed: int, plan: Plan, rate: float) -> Record:
    """One run from scratch, as a record."""
    started, cpu = time.monotonic(), time.process_time()
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory(prefix="marft-relay-") as scratch:
        run = Run(base, size, method, seed, plan, rate, Path(scratch))
        run.go()
    return {
        **run_key(size, method, seed, plan, rate),
        "untrained": run.untrained,
        "episodes": run.at,
        "success": run.curve,
        "final": run.final,
        "explained_variance": [round(v, 3) for v in run.explained],
        "silent_iterations": run.silent,
        "optimizer_steps": run.learner.steps_taken,
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "load": load_now(),
    }


def run_key(size: str, method: Method, seed: int, plan: Plan, rate: float) -> Record:
    """What tells a run from every other one."""
    return {
        "size": size,
        "method": method.name,
        "seed": seed,
        "plan": dataclasses.asdict(plan),
        "learning_rate": rate,
        "settings": {**COMMON, **method.settings},
    }
