"""Agent by agent: the order in which rows are trained on.

Invariant: adapters come one after another, each with all its epochs, and every optimizer step
(micro-batches and processes included) holds rows of one adapter only. A block that is not full is
filled with that adapter's filler, which has no weight. Inside a step rows of like length stand
together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence

from torch.utils.data import Sampler

_POOL = 8


class AgentBlockSampler(Sampler[int]):
    """Indices of rows, adapter-major.

    Args:
        rows: row indices per adapter, in the order in which adapters are trained.
        fillers: index of the weightless filler row per adapter.
        lengths: tokens per row index.
        block: rows of one optimizer step.
        epochs: passes over each adapter's rows; a fraction shortens the last pass.
    """

    def __init__(
        self,
        rows: Mapping[str, Sequence[int]],
        fillers: Mapping[str, int],
        lengths: Sequence[int],
        *,
        block: int,
        epochs: float,
        seed: int,
    ) -> None:
        self._rows = {adapter: list(indices) for adapter, indices in rows.items()}
        self._fillers, self._lengths = fillers, lengths
        self._block, self._epochs, self._seed = block, epochs, seed

    def blocks(self, adapter: str) -> int:
        """Optimizer steps of one adapter."""
        return math.ceil(math.ceil(len(self._rows[adapter]) / self._block) * self._epochs)

    def __len__(self) -> int:
        return self._block * sum(self.blocks(adapter) for adapter in self._rows)

    def __iter__(self) -> Iterator[int]:
        draw = random.Random(self._seed)
        for adapter in self._rows:
            wanted = self.blocks(adapter)
            while wanted > 0:
                for block in self._pass(adapter, draw)[:wanted]:
                    yield from block
                    wanted -= 1

    def _pass(self, adapter: str, draw: random.Random) -> list[list[int]]:
        """Blocks of one pass: shuffled, but rows of one block are of like length."""
        rows = draw.sample(self._rows[adapter], len(self._rows[adapter]))
        pool = self._block * _POOL
        by_length: list[int] = []
        for start in range(0, len(rows), pool):
            by_length += sorted(rows[start : start + pool], key=self._lengths.__getitem__)
        blocks = [by_length[i : i + self._block] for i in range(0, len(by_length), self._block)]
        draw.shuffle(blocks)
        filler = self._fillers[adapter]
        return [block + [filler] * (self._block - len(block)) for block in blocks]
