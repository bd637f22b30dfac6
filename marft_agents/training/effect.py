"""Proof that training did what it was for.

Invariant: the same turns are scored before and after, at their recorded temperature: the best and
the worst ones by advantage. An adapter is published only when its tensors moved and are finite;
whether good actions became likelier than bad ones is measured and said, not assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marft_agents.errors import TrainingError
from marft_agents.schema import Probe
from marft_agents.training._trl import use_adapter
from marft_agents.training.adapters import adapter_state, all_finite, change_norms
from marft_agents.training.dataset import TurnRow
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


def best_and_worst(
    rows: Sequence[int], advantage: dict[int, float], count: int
) -> tuple[list[int], list[int]]:
    """Up to ``count`` row indices of highest and of lowest advantage, disjoint."""
    ranked = sorted(rows, key=lambda i: (advantage[i], i))
    count = min(count, len(ranked) // 2)
    return ranked[len(ranked) - count :], ranked[:count]


class EffectMeter:
    """Measures one adapter before (on construction) and after training."""

    def __init__(
        self,
        model: Any,
        adapter: str,
        good: Sequence[TurnRow],
        bad: Sequence[TurnRow],
        *,
        pack_tokens: int,
        share: bool,
    ) -> None:
        self._model, self._adapter = model, adapter
        self._good, self._bad = list(good), list(bad)
        self._pack_tokens, self._share = pack_tokens, share
        self._state = adapter_state(model, adapter)
        self._before = self._measure()

    def _score(self, rows: Sequence[Scorable], temperatures: Sequence[float]) -> list[list[float]]:
        return score_turns(
            self._model, rows, temperatures, pack_tokens=self._pack_tokens, share=self._share
        )

    def _measure(self) -> tuple[float, float]:
        rows = [*self._good, *self._bad]
        with use_adapter(self._model, self._adapter):
            scored = self._score(rows, [row.temperature for row in rows])
        means = [math.fsum(logps) / len(logps) for logps in scored]
        good, bad = means[: len(self._good)], means[len(self._good) :]
        return math.fsum(good) / len(good), math.fsum(bad) / len(bad)

    def finish(self) -> Effect:
        """The effect of training.

        Raises:
            TrainingError: when the adapter did not move, or is not finite.
        """
        after = adapter_state(self._model, self._adapter)
        if not all_finite(after):
            raise TrainingError(
                f"adapter {self._adapter!r} holds NaN or infinity after training; nothing was"
                " published. Lower learning_rate"
            )
        norms = change_norms(self._state, after)
        if norms["change_norm"] == 0:
            raise TrainingError(
                f"adapter {self._adapter!r} did not move in training; nothing was published."
                " Raise learning_rate or epochs"
            )
        good, bad = self._measure()
        return Effect(self._before[0], good, self._before[1], bad, **norms)

    def probe(self) -> Probe:
        """The measured turn on which the adapter differs most from the base, at temperature 1."""
        shortest = sorted(self._good + self._bad, key=lambda row: row.length)
        candidates = [_cut(row) for row in shortest[:_PROBE_CANDIDATES]]
        ones = [1.0] * len(candidates)
        with use_adapter(self._model, self._adapter):
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


def _cut(row: TurnRow) -> _Short:
    """The turn with at most the first tokens of its reply: a probe is one short request."""
    return _Short(row.prompt_ids, row.token_ids[:_PROBE_TOKENS])


@dataclass(frozen=True)
class _Short:
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
