"""Who is updated when: the order of adapters, and the passes over each one's rows.

Invariant: everything here is a function of its arguments (seed, iteration, adapter, pass), so a
resumed run sees the same order without any generator's state. Every block (the rows of one
optimizer step, all processes together) holds rows of one adapter.

    sequential    one adapter after another, in the order of D or a random one
    alternate     one adapter an iteration, round robin
    simultaneous  all of them from the same start, without compounding; so does ``ippo``
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marft_agents.training.config import MarftConfig
from marft_agents.training.dataset import TrainingSet

_POOL = 8


@dataclass(frozen=True)
class Block:
    """The rows of one optimizer step."""

    adapter: str
    rows: list[int]
    """Indices into the batch's rows; together they are divided by ``size``."""
    size: int
    step: int
    """From 1, among the ``steps`` of this adapter's update."""
    steps: int


def depth_in_team(
    data: TrainingSet, roles: Mapping[str, str], adapters: Sequence[str]
) -> dict[str, float]:
    """Per adapter: the mean number of other adapters' actions of its step that an action read."""
    counts: dict[str, list[int]] = {adapter: [] for adapter in adapters}
    for episode in data.episodes:
        owners = [roles.get(agent) for agent in episode.agents_K]
        for k, depends in enumerate(episode.depends_K):
            owner = owners[k]
            if owner in counts:
                counts[owner].append(
                    sum(
                        owners[j] in counts
                        and owners[j] != owner
                        and episode.steps_K[j] == episode.steps_K[k]
                        for j in depends
                    )
                )
    return {adapter: sum(c) / len(c) if c else 0.0 for adapter, c in counts.items()}


def schedule_of(config: MarftConfig, objective: str) -> str:
    """The schedule of an update.

    Regression on logs compares with no earlier policy, so its order is of no matter. Agents of
    ``ippo`` know nothing of each other: nobody waits, and nothing is compounded.
    """
    if objective != "ppo":
        return "sequential"
    alone = config.estimator == "ippo" and config.schedule == "sequential"
    return "simultaneous" if alone else config.schedule


def update_order(
    depth: Mapping[str, float], *, schedule: str, order: str, seed: int, iteration: int
) -> list[list[str]]:
    """Groups of adapters: later groups are compounded with the groups before them."""
    ranked = sorted(depth, key=lambda adapter: (depth[adapter], adapter))
    if schedule == "alternate":
        return [[ranked[iteration % len(ranked)]]]
    if order == "random":
        random.Random(f"order {seed} {iteration}").shuffle(ranked)
    if schedule == "simultaneous":
        return [ranked]
    return [[adapter] for adapter in ranked]


def steps_of(rows: int, *, block: int, epochs: float) -> int:
    """Optimizer steps of an adapter with so many rows; a fraction shortens the last pass."""
    return math.ceil(math.ceil(rows / block) * epochs)


def passes(
    rows: Sequence[int], lengths: Mapping[int, int], *, block: int, epochs: float, key: str
) -> list[list[int]]:
    """Rows of every optimizer step: shuffled each pass, rows of a block of like length."""
    wanted = steps_of(len(rows), block=block, epochs=epochs)
    out: list[list[int]] = []
    draw = random.Random(key)
    while len(out) < wanted:
        out += _one_pass(rows, lengths, block, draw)[: wanted - len(out)]
    return out


def _one_pass(
    rows: Sequence[int], lengths: Mapping[int, int], block: int, draw: random.Random
) -> list[list[int]]:
    mixed = draw.sample(list(rows), len(rows))
    pool = block * _POOL
    by_length: list[int] = []
    for start in range(0, len(mixed), pool):
        by_length += sorted(mixed[start : start + pool], key=lengths.__getitem__)
    blocks = [by_length[i : i + block] for i in range(0, len(by_length), block)]
    draw.shuffle(blocks)
    return blocks
