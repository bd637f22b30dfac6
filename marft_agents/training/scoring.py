"""log π(w | prompt) of recorded tokens under the active adapter.

Invariant: logits are computed only at the places that predict a sampled token, and under the
temperature given, so nothing of a prompt's ``(P, V)`` is ever materialised. The same code scores
for the replay check, for training and for the probe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from marft_agents.training._trl import entropy_from_logits, selective_log_softmax
from marft_agents.training.packing import Pack, Scorable, pack_turns

_SAME = 1e-3


@dataclass(frozen=True)
class Scores:
    """Log-probability of every sampled token of a pack's turns, laid end to end (T,)."""

    logp_T: Tensor
    row_T: Tensor
    """Index into the pack's ``rows``."""
    entropy_T: Tensor | None
    """Entropy of the distribution that each token was drawn from, where it was asked for."""

    def mean_B(self, rows: int) -> Tensor:
        """(1/L) Σ_j log π(w_j) per turn (B,)."""
        zeros = torch.zeros(rows, dtype=self.logp_T.dtype, device=self.logp_T.device)
        ones = torch.ones_like(self.logp_T)
        return zeros.index_add(0, self.row_T, self.logp_T) / zeros.index_add(0, self.row_T, ones)


def tree_mask(pack: Pack) -> Tensor:
    """(N, N) bool: row n is True where token n may look, at itself and its ancestors."""
    size = len(pack.ids)
    mask = torch.zeros(size, size, dtype=torch.bool)
    ends = [start for start, _ in pack.runs[1:]] + [size]
    for (start, parent), end in zip(pack.runs, ends, strict=True):
        if parent >= 0:
            mask[start:end] = mask[parent]
        length = end - start
        mask[start:end, start:end] = torch.ones(length, length, dtype=torch.bool).tril()
    return mask


def tree_inputs(pack: Pack, device: torch.device) -> dict[str, Any]:
    """What a transformers model needs to read a tree in one pass."""
    return {
        "input_ids": torch.tensor([pack.ids], device=device),
        "position_ids": torch.tensor([pack.depth], device=device),
        "attention_mask": None if pack.is_chain else tree_mask(pack)[None, None].to(device),
        "use_cache": False,
    }


def score(
    model: Any, pack: Pack, temperature_B: Sequence[float], *, entropy: str = "none"
) -> Scores:
    """Score a pack's turns; ``temperature_B`` has one entry a turn of the pack.

    ``entropy`` is ``none``, ``measured`` (no gradient) or ``trained``.
    """
    device = model.device
    predictors = torch.tensor(list(chain.from_iterable(pack.predictors)), device=device)
    keep, where_T = torch.unique(predictors, return_inverse=True)
    lengths = torch.tensor([len(t) for t in pack.targets], device=device)
    row_T = torch.repeat_interleave(torch.arange(len(pack.targets), device=device), lengths)
    out = model(**tree_inputs(pack, device), logits_to_keep=keep)
    temperature_T = torch.tensor(temperature_B, device=device)[row_T]
    logits = out.logits[0].float()[where_T] / temperature_T[:, None]
    targets_T = torch.tensor(list(chain.from_iterable(pack.targets)), device=device)
    logp_T = selective_log_softmax(logits[None], targets_T[None])[0]
    entropy_T = None
    if entropy == "measured":
        with torch.no_grad():
            entropy_T = entropy_from_logits(logits.detach())
    elif entropy == "trained":
        entropy_T = entropy_from_logits(logits)
    return Scores(logp_T, row_T, entropy_T)


@torch.no_grad()
def score_turns(
    model: Any,
    turns: Sequence[Scorable],
    temperatures: Sequence[float],
    *,
    pack_tokens: int,
    share: bool,
) -> list[list[float]]:
    """Log-probabilities (L,) of every turn, in the order given."""
    out: list[list[float]] = [[] for _ in turns]
    for pack in pack_turns(turns, pack_tokens, share=share):
        scores = score(model, pack, [temperatures[row] for row in pack.rows])
        values = scores.logp_T.tolist()
        for row, target in zip(pack.rows, pack.targets, strict=True):
            out[row], values = values[: len(target)], values[len(target) :]
    return out


def _shortest_and_longest(turns: Iterable[Scorable], pack_tokens: int) -> list[Scorable]:
    """Two and two different turns that would share a pack, or fewer; a turn at a time is held."""
    short: list[tuple[int, Sequence[int], Scorable]] = []
    long: list[tuple[int, Sequence[int], Scorable]] = []
    for turn in turns:
        key = (*turn.prompt_ids, -1, *turn.token_ids)
        if len(key) > pack_tokens:
            continue
        for kept, sign in ((short, 1), (long, -1)):
            rank = sign * len(key)
            if (len(kept) < 4 or rank < kept[-1][0]) and all(key != other for _, other, _ in kept):
                kept.append((rank, key, turn))
                kept.sort(key=lambda item: item[0])
                del kept[4:]
    first = short[:2]
    last = [item for item in long if all(item[1] != other for _, other, _ in first)][:2]
    return [turn for _, _, turn in (*first, *reversed(last))]


def sharing_is_exact(model: Any, turns: Sequence[Scorable], pack_tokens: int) -> bool:
    """Whether this model scores turns in a tree as it scores them alone.

    Tried on the shortest and longest turns that would share a pack. Models with sliding windows
    shorter than a turn, recurrent layers or masks of their own do not.
    """
    tried = _shortest_and_longest(turns, pack_tokens)
    if len(tried) < 2:
        return False
    ones = [1.0] * len(tried)
    try:
        together = score_turns(model, tried, ones, pack_tokens=1 << 30, share=True)
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError):
        return False
    alone = score_turns(model, tried, ones, pack_tokens=1 << 30, share=False)
    pairs = zip(chain.from_iterable(together), chain.from_iterable(alone), strict=True)
    worst = max(abs(a - b) for a, b in pairs)
    return worst < (_SAME if model.dtype == torch.float32 else 50 * _SAME)
