"""Episodes with made-up hidden states, for tests of critics without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from marft_agents.training.chains import Chain, make_links
from marft_agents.training.cross_fitting import CrossFitted, HeadEstimator, Shelf
from marft_agents.training.features import Text
from marft_agents.training.shrinking import Shrunk, shrink
from marft_agents.training.value_head import CriticSettings

WIDTH = 12
SETTINGS = CriticSettings(
    hidden=16,
    epochs=30,
    learning_rate=5e-3,
    weight_decay=0.1,
    folds=4,
    gamma=1.0,
    lam=0.95,
    seed=0,
    update_epochs=10,
)


class Table:
    """Hidden states from a table: the ids of a text are the number of its first row."""

    width = WIDTH

    def __init__(self) -> None:
        self.rows = torch.empty(0, WIDTH)
        self.reads = 0

    def add(self, rows: Tensor) -> Text:
        first = len(self.rows)
        self.rows = torch.cat([self.rows, rows])
        return Text([first], list(range(len(rows))))

    def read(self, texts: Sequence[Text], adapter: str | None = None) -> Tensor:
        self.reads += 1
        return torch.cat([self.rows[[t.ids[0] + p for p in t.places]] for t in texts])


def world(
    count: int,
    *,
    informative: bool,
    truncated: bool = False,
    lengths: Sequence[int] = (1, 1),
    seed: int = 0,
) -> tuple[Table, list[Chain], list[float]]:
    """Episodes of two actions whose last reward, 0 or 1, is written into the states, or not."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    table, chains, rewards = Table(), list[Chain](), list[float]()
    places, actions = sum(lengths), len(lengths)
    for n in range(count):
        reward = float(draw.random() < 0.5)
        size = places + actions + truncated
        states = torch.randn(size, WIDTH, generator=generator)
        if informative:
            states[:, 0] = 3 * reward - 1.5
        chains.append(chain(n, table.add(states), reward, lengths, truncated=truncated))
        rewards.append(reward)
    return table, chains, rewards


def chain(
    number: int, text: Text, reward: float, lengths: Sequence[int], *, truncated: bool = False
) -> Chain:
    actions = len(lengths)
    links = make_links(
        [0.0] * (actions - 1) + [reward], list(range(actions)), lengths, SETTINGS.discounts
    )
    action_P = [k for k, length in enumerate(lengths) for _ in range(length)]
    return Chain(number, [text], links, action_P, opened=True, final=truncated)


def names(chains: Sequence[Chain], prefix: str = "e") -> list[str]:
    return [f"{prefix}{chain.episode}" for chain in chains]


def new_critic(settings: CriticSettings = SETTINGS) -> CrossFitted:
    return CrossFitted(lambda: HeadEstimator(WIDTH, settings), settings)


def values_of(
    critic: CrossFitted, table: Table, chains: Sequence[Chain], prefix: str = "e", seed: int = 0
) -> list[list[float]]:
    return critic.evaluate(Shelf(table, chains, seed), names(chains, prefix), seed=seed)[0]


def shrunk_values(critic: CrossFitted, table: Table, chains: Sequence[Chain]) -> Shrunk:
    return shrink(chains, values_of(critic, table, chains))
