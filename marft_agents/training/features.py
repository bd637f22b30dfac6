"""Hidden states of the frozen base at the borders of a joint transcript.

Invariant: one pass per transcript, all adapters off. A transcript longer than the window is read in
overlapping windows, and each border is taken from the first window that holds it with at least half
a window of text before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marft_agents.training.transcript import Borders


@dataclass(frozen=True)
class EpisodeFeatures:
    """Features at an episode's borders, float32 on the CPU."""

    open_K: Tensor
    """(K, H) before action k, next speaker not known."""
    named_K: Tensor
    """(K, H) before action k, next speaker known."""
    final: Tensor
    """(H,) after everything was said."""


def windows(length: int, size: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, first): the window ``start`` to ``end`` serves tokens from ``first`` on."""
    start, first = 0, 0
    while True:
        end = min(start + size, length)
        yield start, end, first
        if end == length:
            return
        first = end
        start = end - size // 2


@torch.no_grad()
def _hidden(backbone: Any, ids: Sequence[int], wanted: Sequence[int], size: int) -> Tensor:
    """Last hidden states (len(wanted), H) at the wanted tokens."""
    out: dict[int, Tensor] = {}
    device = backbone.device
    for start, end, first in windows(len(ids), size):
        here = [w for w in wanted if first <= w < end]
        if not here:
            continue
        stop = max(here) + 1
        hidden = backbone(
            input_ids=torch.tensor([ids[start:stop]], device=device), use_cache=False
        ).last_hidden_state[0]
        picked = hidden[[w - start for w in here]].to("cpu", torch.float32)
        out |= dict(zip(here, picked, strict=True))
    return torch.stack([out[w] for w in wanted])


def read_features(
    backbone: Any,
    transcripts: Sequence[Borders],
    *,
    max_length: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[EpisodeFeatures]:
    """Features of every transcript; ``backbone`` is the base without head and adapters."""
    out: list[EpisodeFeatures] = []
    for borders in transcripts:
        wanted = [*borders.open_K, *borders.named_K, borders.final]
        hidden = _hidden(backbone, borders.ids, wanted, max_length)
        count = len(borders.open_K)
        out.append(EpisodeFeatures(hidden[:count], hidden[count:-1], hidden[-1]))
        progress(len(out))
    return out
