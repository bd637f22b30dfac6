"""What an update trains on: rows with their credit, and the log-probabilities to compare with.

Invariant: a batch is fixed before the first step of an update and can be written to disk whole, so
a resumed update goes on with the very same numbers. What is filled in during the update (proximal
and reference log-probabilities, compound factors) belongs to it too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from marft_agents.training.advantages import Credits
from marft_agents.training.dataset import EpisodeView, TrainingSet


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
    rows: list[TrainRow]
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
        for i, row in enumerate(self.rows):
            self._rows_of.setdefault(row.adapter, []).append(i)
        self._mean_length = {
            adapter: math.fsum(len(self.rows[i].token_ids) for i in rows) / len(rows)
            for adapter, rows in self._rows_of.items()
        }

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
    rows = [
        TrainRow(
            adapter=adapter,
            turn_id=data.rows[i].turn_id,
            prompt_ids=data.rows[i].prompt_ids,
            token_ids=data.rows[i].token_ids,
            behaviour_L=data.rows[i].logprobs,
            temperature=data.rows[i].temperature,
            words=data.rows[i].words,
            advantage_L=credits.advantage[i],
            weight_L=credits.weight.get(i, [0.0]),
            episode=data.rows[i].episode,
            k=data.rows[i].k,
            version=data.rows[i].adapter,
        )
        for adapter, indices in by_adapter.items()
        if adapter in wanted
        for i in indices
        if i in credits.advantage and _is_used(objective, i, data, credits)
    ]
    used = {row.episode for row in rows}
    episodes: dict[int, EpisodeView] = {e: data.episodes[e] for e in sorted(used)}
    return Batch(
        objective,
        iteration,
        rows,
        order,
        depends={e: view.depends_K for e, view in episodes.items()},
        steps={e: view.steps_K for e, view in episodes.items()},
    )


def _is_used(objective: str, row: int, data: TrainingSet, credits: Credits) -> bool:
    if objective == "awr":
        return any(credits.weight.get(row, ()))
    return objective != "ppo" or data.rows[row].off_policy is None
