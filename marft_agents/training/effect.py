"""Proof that training did what it was for.

Invariant: the same turns are scored before and after, at their recorded temperature: the best and
the worst ones by advantage. An adapter is published only when its tensors moved and are finite;
whether good actions became likelier than bad ones is measured and said, not assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from marft_agents.errors import TrainingError
from marft_agents.schema import Probe
from marft_agents.training._trl import use_adapter
from marft_agents.training.adapters import adapter_state, all_finite, change_norms
from marft_agents.training.packing import Scorable
from marft_agents.training.scoring import score_turns

_PROBE_TOKENS = 64
_PROBE_CANDIDATES = 4


@dataclass(frozen=True)
class Effect:
    """Change of the mean log-probability per token, and size of the change of the weights."""

    good_before: float
    good_after: float
    bad_before: float
    bad_after: float
    change_norm: float
    b_norm: float

    @property
    def good_change(self) -> float:
        return self.good_after - self.good_before

    @property
    def bad_change(self) -> float:
        return self.bad_after - self.bad_before

    @property
    def as_intended(self) -> bool:
        """Good actions gained on bad ones."""
        return self.good_change > self.bad_change


def best_and_worst(advantage: Mapping[int, float], count: int) -> tuple[list[int], list[int]]:
    """Up to ``count`` rows of highest and of lowest advantage, disjoint."""
    ranked = sorted(advantage, key=lambda i: (advantage[i], i))
    count = max(min(count, len(ranked) // 2), 1)
    return ranked[len(ranked) - count :], ranked[:count]


class Measured(Scorable, Protocol):
    """A turn and the temperature that it was sampled at."""

    @property
    def temperature(self) -> float: ...


@dataclass(frozen=True)
class Before:
    """An adapter as it was, and how it scored the measured turns."""

    state: dict[str, Tensor]
    good: float
    bad: float


class EffectMeter:
    """Measures one adapter before (on construction, unless it is known) and after training."""

    def __init__(
        self,
        model: Any,
        adapter: str,
        good: Sequence[Measured],
        bad: Sequence[Measured],
        *,
        pack_tokens: int,
        share: bool,
        before: Before | None = None,
    ) -> None:
        self._model, self.adapter = model, adapter
        self._good, self._bad = list(good), list(bad)
        self._pack_tokens, self._share = pack_tokens, share
        self.before = before or Before(adapter_state(model, adapter), *self._measure())

    def _score(self, rows: Sequence[Scorable], temperatures: Sequence[float]) -> list[list[float]]:
        return score_turns(
            self._model, rows, temperatures, pack_tokens=self._pack_tokens, share=self._share
        )

    def _measure(self) -> tuple[float, float]:
        rows = [*self._good, *self._bad]
        with use_adapter(self._model, self.adapter):
            scored = self._score(rows, [row.temperature for row in rows])
        means = [math.fsum(logps) / len(logps) for logps in scored]
        good, bad = means[: len(self._good)], means[len(self._good) :]
        return math.fsum(good) / len(good), math.fsum(bad) / len(bad)

    def finish(self) -> Effect:
        """The effect of training.

        Raises:
            TrainingError: when the adapter did not move, or is not finite.
        """
        after = adapter_state(self._model, self.adapter)
        if not all_finite(after):
            raise TrainingError(
                f"adapter {self.adapter!r} holds NaN or infinity after training; nothing was"
                " published. Lower learning_rate"
            )
        norms = change_norms(self.before.state, after)
        if norms["change_norm"] == 0:
            raise TrainingError(
                f"adapter {self.adapter!r} did not move in training; nothing was published."
                " Raise learning_rate or epochs"
            )
        good, bad = self._measure()
        return Effect(self.before.good, good, self.before.bad, bad, **norms)

    def probe(self) -> Probe:
        """The measured turn on which the adapter differs most from the base, at temperature 1."""
        shortest = sorted(
            self._good + self._bad, key=lambda row: len(row.prompt_ids) + len(row.token_ids)
        )
        candidates = [_cut(row) for row in shortest[:_PROBE_CANDIDATES]]
        ones = [1.0] * len(candidates)
        with use_adapter(self._model, self.adapter):
            ours = self._score(candidates, ones)
        with use_adapter(self._model, None):
            base = self._score(candidates, ones)
        gaps = [
            max(abs(a - b) for a, b in zip(x, y, strict=True))
            for x, y in zip(ours, base, strict=True)
        ]
        best = gaps.index(max(gaps))
        return Probe(
            prompt_token_ids=list(candidates[best].prompt_ids),
            token_ids=list(candidates[best].token_ids),
            logprobs=ours[best],
            base_logprobs=base[best],
        )


def _cut(row: Scorable) -> _Short:
    """The turn with at most the first tokens of its reply: a probe is one short request."""
    return _Short(row.prompt_ids, row.token_ids[:_PROBE_TOKENS])


@dataclass(frozen=True)
class _Short:
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
