"""A made-up app for the tests of online collecting, and short-hands around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marft_agents.recording import MarftRecorder
from marft_agents.schema import Turn
from marft_agents.training.dataset import TrainingSet
from marft_agents.training.online import OnlineSettings, OnlineSource
from marft_agents.training.tasks import Task, TaskMixer
from tests.log.events import turn

if TYPE_CHECKING:
    from marft_agents.training.config import MarftConfig

CURRENT = {"router": 1, "writer": 1}
Score = Callable[[Any, int], Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """The part of a ``MarftConfig`` that collecting reads."""

    seed: int = 0
    episodes_per_iteration: int = 4
    group_size: int = 1
    at_once: int = 4
    episode_timeout: float = 60.0
    dynamic_sampling: bool = True
    max_resample: int = 2
    replay_share: float = 0.0
    max_staleness: int = 2


def a_config_is_accepted(config: MarftConfig) -> OnlineSettings:
    """Checked by the type checker."""
    return config


class App:
    """A team of two whose calls are made up; ``score(task, n)`` is what its n-th run returns."""

    def __init__(self, score: Score, *, version: int = 1, changes: bool = False) -> None:
        self.score = score
        self.version = version
        self.changes = changes
        self.seen: list[Any] = []

    def turns(self, episode_id: str) -> list[Turn]:
        out: list[Turn] = []
        for n, name in enumerate(("router", "writer")):
            fields: dict[str, Any] = {"turn_id": f"{episode_id}.{n}"}
            fields["adapter_start"] = fields["adapter_end"] = f"{name}@v{self.version}"
            out.append(turn(n, episode=episode_id, agent=name, **fields))
        if self.changes:
            out[1] = out[1].model_copy(update={"adapter_end": f"writer@v{self.version + 1}"})
        return out

    async def __call__(self, task: Any, recorder: MarftRecorder) -> Any:
        number = self.seen.count(task)
        self.seen.append(task)
        async with recorder.episode(task=f"text of {task}"):
            live = recorder.current()
            assert live is not None
            for made in self.turns(live.id):
                live.add_turn(made)
            await asyncio.sleep(0)
            returned = self.score(task, number)
            if isinstance(returned, Exception):
                raise returned
        return returned


def make_tasks(count: int) -> list[Task]:
    return [Task(f"t{n}", n) for n in range(count)]


def silent(_: str) -> None:
    pass


def make_source(
    folder: Path,
    run: Any,
    tasks: Sequence[Task],
    reward: Any = None,
    say: Say = silent,
    **settings: Any,
) -> OnlineSource:
    return OnlineSource(
        run,
        tasks,
        Settings(**settings),
        logs=folder,
        run_id="r1",
        make_recorder=MarftRecorder,
        reward=reward,
        say=say,
    )


def parity(task: Any, number: int) -> float:
    """Every group of two has spread."""
    return float(number % 2)


def by_task(task: int, number: int) -> float:
    return float(task % 2)


def always_half(task: int, number: int) -> float:
    return 0.5


def never(task: int, number: int) -> None:
    return None


def fails_on_0(task: int, number: int) -> Any:
    return ConnectionError("x") if task == 0 else float(task)


def rewards_by_task(data: TrainingSet) -> dict[str | None, list[float]]:
    out: dict[str | None, list[float]] = {}
    for episode in data.episodes:
        out.setdefault(episode.task, []).append(episode.total_reward)
    return {task: sorted(rewards) for task, rewards in out.items()}


def drawn(iteration: int, count: int, tasks: Sequence[Task], seed: int = 0) -> list[str]:
    return [task.id for task in TaskMixer(tasks, seed).draw(iteration, 0, count)]
