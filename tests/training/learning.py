"""A learner on the tiny model, and updates whose batches are made by hand.

Agents speak one after another in one step; the first one's second turn is in a step of its own.
Recorded log-probabilities are those of the adapters as they are when the batch is made.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from marft_agents.registry import write_untrained_adapter
from marft_agents.training._quiet import quiet
from marft_agents.training.adapters import adapter_state
from marft_agents.training.batch import Batch, TrainRow
from marft_agents.training.config import MarftConfig
from marft_agents.training.loop import Learner
from marft_agents.training.session import Session
from marft_agents.training.work import UpdateReport, Work

AGENTS = ("router", "writer")
State = dict[str, dict[str, Tensor]]


def settings(**values: Any) -> MarftConfig:
    standard: dict[str, Any] = {
        "use_cpu": True,
        "learning_rate": 1e-2,
        "num_train_epochs": 2.0,
        "per_device_train_batch_size": 4,
        "offline": "ppo",
        "target_kl": 100.0,
        "report_to": "none",
    }
    return MarftConfig(**(standard | values))


def start_folder(folder: Path, model_dir: Path, *, seed: int, scale: float = 0.3) -> Path:
    """An adapter to start from; its B is random of this scale."""
    write_untrained_adapter(folder, model_dir, rank=4, seed=seed)
    weights = folder / "adapter_model.safetensors"
    draw = torch.Generator().manual_seed(seed)
    state = {
        name: tensor if ".lora_A." in name else torch.randn(tensor.shape, generator=draw) * scale
        for name, tensor in load_file(weights).items()
    }
    save_file(state, weights, {"format": "pt"})
    return folder


def make_learner(
    model_dir: Path,
    root: Path,
    *,
    adapters: Sequence[str] = AGENTS,
    scale: float = 0.3,
    share: bool | None = None,
    own_settings: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
    **values: Any,
) -> Learner:
    """A learner whose adapters are always the same ones, for the same names."""
    own = dict(own_settings or {})
    config = settings(output_dir=str(root / "loop"), adapters=own, **values)
    folders: dict[str, Path] = {}
    for adapter in adapters:
        folder = root / "start" / adapter
        if not folder.exists():
            start_folder(folder, model_dir, seed=sum(map(ord, adapter)), scale=scale)
        folders[adapter] = folder
    with quiet():
        session = Session(model_dir, folders, config, say)
        if share is not None:
            session._share = share  # pyright: ignore[reportPrivateUsage] otherwise tried out
        return Learner(session, config, say)


def make_rows(
    adapters: Sequence[str] = AGENTS, *, episodes: int = 6, level: str = "action", seed: int = 0
) -> list[TrainRow]:
    """A turn of each adapter and one more of the first, with advantages of both signs."""
    draw = random.Random(seed)
    owners = [*adapters, adapters[0]]
    rows: list[TrainRow] = []
    for episode in range(episodes):
        for k, adapter in enumerate(owners):
            length = 1 + (episode + k) % 3
            advantage = [draw.uniform(-2, 2) for _ in range(length if level == "token" else 1)]
            rows.append(
                TrainRow(
                    adapter=adapter,
                    turn_id=f"e{episode}.{k}",
                    prompt_ids=[1, 40, 41, 42 + episode % 3, 43 + k],
                    token_ids=[60 + draw.randrange(9), 50 + draw.randrange(5), 2][-length:],
                    behaviour_L=[0.0] * length,
                    temperature=1.0 if episode % 2 else 0.7,
                    words=1 + length // 2,
                    advantage_L=advantage,
                    weight_L=[0.5 + abs(a) for a in advantage],
                    episode=episode,
                    k=k,
                )
            )
    return rows


def recorded(learner: Learner, rows: Sequence[TrainRow], *, noise: float = 0.0) -> list[TrainRow]:
    """The rows with log-probabilities of the adapters as they are now, off by up to ``noise``."""
    draw = random.Random(1)
    out: list[TrainRow] = []
    learner.session.try_sharing(rows)
    for row in rows:
        (logps,) = learner.session.score([row], row.adapter)
        noisy = [logp + draw.uniform(-noise, noise) for logp in logps]
        out.append(dataclasses.replace(row, behaviour_L=noisy))
    return out


def make_work(
    learner: Learner,
    rows: Sequence[TrainRow],
    *,
    objective: str = "ppo",
    iteration: int = 0,
    order: Sequence[Sequence[str]] | None = None,
    depends: Mapping[int, list[list[int]]] | None = None,
    mean_reward: float = 0.5,
) -> Work:
    """An update of these rows; each action read the ones before it unless told otherwise."""
    numbers = sorted({row.episode for row in rows})
    last = len(learner.session.adapters)
    read = [list(range(k)) for k in range(last + 1)]
    batch = Batch(
        objective,
        iteration,
        list(rows),
        [list(group) for group in order or [[a] for a in learner.session.adapters]],
        dict(depends) if depends is not None else dict.fromkeys(numbers, read),
        {e: [0] * last + [1] for e in numbers},
    )
    return Work(batch, None, UpdateReport(iteration, objective), mean_reward)


def learn(learner: Learner, works: Iterable[Work | Callable[[], Work]]) -> list[UpdateReport]:
    """Take the steps of one update after another."""
    reports: list[UpdateReport] = []

    def program() -> Any:
        for work in works:
            ready = work if isinstance(work, Work) else work()
            reports.append((yield from learner.train(ready)))

    with quiet():
        learner.run(program())
    return reports


def states(learner: Learner) -> State:
    return {a: adapter_state(learner.session.model, a) for a in learner.session.adapters}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Bit for bit."""
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def adam_of(learner: Learner, adapter: str) -> dict[str, Tensor]:
    """Copies of an adapter's moments and step counts."""
    optimizer: Any = learner.trainer.optimizer
    return {
        f"{name}/{key}": value.detach().clone()
        for name, parameter in learner.trainer.parameters_of(adapter)
        for key, value in (optimizer.state.get(parameter) or {}).items()
    }


class Watch:
    """What every optimizer step moved; hangs itself behind the learner's own hook."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.moved = learner, list[list[str]]()
        self.adam_moved: list[list[str]] = []
        self._last, self._adam = states(learner), self._moments()
        self._then = learner.after_step
        learner.after_step = self._look

    def _moments(self) -> State:
        return {a: adam_of(self.learner, a) for a in self.learner.session.adapters}

    def _look(self) -> None:
        now, adam = states(self.learner), self._moments()
        self.moved.append([a for a in now if not same(now[a], self._last[a])])
        self.adam_moved.append([a for a in adam if not same(adam[a], self._adam[a])])
        self._last, self._adam = now, adam
        self._then()
