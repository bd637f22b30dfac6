"""Turns as the columns that TRL's trainers take.

Invariants: ids are the recorded ones; every reply token carries loss, no prompt token does; masks
come from lengths. Log-probabilities of the reference are sums over a reply (one number a reply).

``score`` gives them: log π_ref(reply | prompt), in the order asked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from marft_agents.training.preferences import Labelled, MethodRow, Preference

IGNORED = -100
"""Label of a token without loss."""

_LOOK_BACK = 64
"""Rows searched for a mismatched reply when the batch has none."""

Example = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """A reply to a prompt; both as ids."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


Score = Callable[[Sequence[Said]], list[float]]


def sft_examples(rows: Sequence[MethodRow]) -> list[Example]:
    """``input_ids`` and ``labels`` (P+L,)."""
    return [
        {
            "input_ids": [*row.prompt_ids, *row.token_ids],
            "labels": [IGNORED] * len(row.prompt_ids) + list(row.token_ids),
        }
        for row in rows
    ]


def dpo_examples(pairs: Sequence[Preference], score: Score) -> list[Example]:
    """Both replies of each pair and their log-probabilities under the reference."""
    known = _scored(
        [r for pair in pairs for r in (_said(pair.chosen), _said(pair.rejected))], score
    )
    return [
        {
            "prompt_ids": list(pair.chosen.prompt_ids),
            "chosen_ids": list(pair.chosen.token_ids),
            "rejected_ids": list(pair.rejected.token_ids),
            "ref_chosen_logps": known[_said(pair.chosen)],
            "ref_rejected_logps": known[_said(pair.rejected)],
        }
        for pair in pairs
    ]


def kto_examples(
    turns: Sequence[Labelled], score: Score, *, batch: int, seed: int
) -> list[Example]:
    """Labelled replies in batches of ``batch``, each with a mismatched reply for the KL term.

    The order is the one to train in: shuffled, with both labels spread evenly over the batches.
    """
    ordered = _spread(turns, seed)
    rows = [one.row for one in ordered]
    mismatched = [
        Said(tuple(row.prompt_ids), tuple(rows[j].token_ids))
        for row, j in zip(rows, _mismatches(rows, batch), strict=True)
    ]
    known = _scored([*map(_said, rows), *mismatched], score)
    return [
        {
            "prompt_ids": list(one.row.prompt_ids),
            "completion_ids": list(one.row.token_ids),
            "KL_completion_ids": list(other.token_ids),
            "label": one.desirable,
            "ref_logps": known[_said(one.row)],
            "ref_KL_logps": known[other],
        }
        for one, other in zip(ordered, mismatched, strict=True)
    ]


def kto_weights(turns: Sequence[Labelled]) -> tuple[float, float]:
    """λ of desirable and of undesirable turns: each label gets half of the weight, their mean is 1.

    The ratio λ_D n_D : λ_U n_U is 1, inside the range of the KTO paper's equation 8.
    """
    good = sum(one.desirable for one in turns)
    return len(turns) / (2 * good), len(turns) / (2 * (len(turns) - good))


def _said(row: MethodRow) -> Said:
    return Said(tuple(row.prompt_ids), tuple(row.token_ids))


def _scored(replies: Iterable[Said], score: Score) -> dict[Said, float]:
    """Every different reply scored once."""
    distinct = list(dict.fromkeys(replies))
    return dict(zip(distinct, score(distinct), strict=True))


def _spread(turns: Sequence[Labelled], seed: int) -> list[Labelled]:
    draw = random.Random(seed)
    placed: list[tuple[float, Labelled]] = []
    for desirable in (True, False):
        group = [one for one in turns if one.desirable == desirable]
        draw.shuffle(group)
        placed += [((n + 0.5) / len(group), one) for n, one in enumerate(group)]
    return [one for _, one in sorted(placed, key=lambda item: item[0])]


def _mismatches(rows: Sequence[MethodRow], batch: int) -> list[int]:
    """For each row the one whose reply stands in as the mismatched one.

    The nearest before it in its batch, else of those before that, which answered another prompt
    otherwise; else one with another reply; else the one before it.
    """
    said = [_said(row) for row in rows]
    out: list[int] = []
    for i, mine in enumerate(said):
        first = i - i % batch
        size = min(batch, len(rows) - first)
        others = [first + (i - first - n) % size for n in range(1, size)]
        others += [(i - n) % len(rows) for n in range(1, min(len(rows), _LOOK_BACK))]
        different = [j for j in others if said[j].token_ids != mine.token_ids]
        elsewhere = [j for j in different if said[j].prompt_ids != mine.prompt_ids]
        out.append([*elsewhere, *different, *others][0])
    return out
