"""What an update trains on: rows with their credit, and the log-probabilities to compare with.

Invariant: a batch is fixed before the first step of an update and can be written to disk whole, so
a resumed update goes on with the very same numbers. What is filled in during the update (proximal
and reference log-probabilities, compound factors) belongs to it too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from marft_agents.training.advantages import Credits
from marft_agents.training.dataset import TrainingSet


@dataclass(frozen=True)
class TrainRow:
    """One turn of L sampled tokens under one adapter."""

    adapter: str
    turn_id: str
    prompt_ids: Sequence[int]
    """(P,)"""
    token_ids: Sequence[int]
    """(L,)"""
    behaviour_L: Sequence[float]
    """μ, the recorded log-probabilities, (L,)."""
    temperature: float
    words: int
    advantage_L: Sequence[float]
    """One number (action level) or one a token (token level)."""
    weight_L: Sequence[float]
    """Weights of advantage-weighted regression, like the advantages."""
    episode: int
    k: int
    version: str | None = None
    """Adapter version that sampled it."""

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def advantage(self) -> float:
        """Mean advantage of the turn's tokens."""
        return math.fsum(self.advantage_L) / len(self.advantage_L)

    @property
    def weight(self) -> float:
        """Mean weight of the turn's tokens."""
        return math.fsum(self.weight_L) / len(self.weight_L)


@dataclass
class Batch:
    """The rows of one update of all adapters."""

    objective: str
    """``awr`` or ``ppo``; or ``sft``, ``kto``, ``dpo``, whose steps are TRL's."""
    iteration: int
    rows: Sequence[TrainRow]
    order: list[list[str]]
    """Groups of adapters; a group is updated after the groups before it."""
    depends: dict[int, list[list[int]]]
    """Per episode: ``EpisodeView.depends_K``."""
    steps: dict[int, list[int]]
    """Per episode: environment step of each action."""
    old: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """Log-probabilities (L,) under the proximal policy, by row."""
    reference: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """Log-probabilities (L,) under the reference of the KL term, by row."""
    factor: dict[int, float] = field(default_factory=dict[int, float])
    """Compound factor M_k by row; 1 where there is none."""
    log_ratio: dict[int, float] = field(default_factory=dict[int, float])
    """log π_new/π_old of the action, by row, once its adapter has been updated."""

    def __post_init__(self) -> None:
        self._rows_of: dict[str, list[int]] = {}
        tokens = Counter[str]()
        for i, row in enumerate(self.rows):
            self._rows_of.setdefault(row.adapter, []).append(i)
            tokens[row.adapter] += len(row.token_ids)
        self._mean_length = {a: tokens[a] / len(rows) for a, rows in self._rows_of.items()}

    def rows_of(self, adapter: str) -> list[int]:
        """Indices of an adapter's rows."""
        return self._rows_of.get(adapter, [])

    def mean_length(self, adapter: str) -> float:
        """Mean L of an adapter's rows."""
        return self._mean_length[adapter]

    @property
    def adapters(self) -> list[str]:
        """In the order in which they are updated."""
        return [adapter for group in self.order for adapter in group]


class _Credited(Sequence[TrainRow]):
    """Rows of a data set with their credit; each is made when it is asked for."""

    def __init__(
        self, data: TrainingSet, credits: Credits, used: Sequence[tuple[str, int]]
    ) -> None:
        self._data, self._credits, self._used = data, credits, used

    def __len__(self) -> int:
        return len(self._used)

    @overload
    def __getitem__(self, index: int) -> TrainRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[TrainRow]: ...
    def __getitem__(self, index: int | slice) -> TrainRow | list[TrainRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        adapter, i = self._used[index]
        row = self._data.rows[i]
        return TrainRow(
            adapter=adapter,
            turn_id=row.turn_id,
            prompt_ids=row.prompt_ids,
            token_ids=row.token_ids,
            behaviour_L=row.logprobs,
            temperature=row.temperature,
            words=row.words,
            advantage_L=self._credits.advantage[i],
            weight_L=self._credits.weight.get(i, [0.0]),
            episode=row.episode,
            k=row.k,
            version=row.adapter,
        )


def make_batch(
    data: TrainingSet,
    by_adapter: Mapping[str, Sequence[int]],
    credits: Credits,
    *,
    objective: str,
    iteration: int,
    order: list[list[str]],
) -> Batch:
    """The rows that an objective trains on: with weight (awr), with a ratio (ppo), or all."""
    wanted = {adapter for group in order for adapter in group}
    used = [
        (adapter, i)
        for adapter, indices in by_adapter.items()
        if adapter in wanted
        for i in indices
        if i in credits.advantage and _is_used(objective, i, data, credits)
    ]
    depends: dict[int, list[list[int]]] = {}
    steps: dict[int, list[int]] = {}
    for e in sorted({data.rows[i].episode for _, i in used}):
        view = data.episodes[e]
        depends[e], steps[e] = view.depends_K, view.steps_K
    return Batch(objective, iteration, _Credited(data, credits, used), order, depends, steps)


def _is_used(objective: str, row: int, data: TrainingSet, credits: Credits) -> bool:
    if objective == "awr":
        return any(credits.weight.get(row, ()))
    return objective != "ppo" or data.rows[row].off_policy is None
