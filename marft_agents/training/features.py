"""Hidden states of the frozen base at the borders of a joint transcript.

Invariant: every token is read once, all adapters off; transcripts read together do not see each
other. A transcript longer than the window is read in overlapping windows, and each border is taken
from the first window that holds it with at least half a window of text before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marft_agents.training.packing import Pack
from marft_agents.training.scoring import tree_inputs
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
def _read_long(backbone: Any, borders: Borders, size: int) -> Tensor:
    """Hidden states (2K + 1, H) at the borders of a transcript longer than a window."""
    out: dict[int, Tensor] = {}
    wanted = _wanted(borders)
    for start, end, first in windows(len(borders.ids), size):
        here = [w for w in wanted if first <= w < end]
        if not here:
            continue
        ids = torch.tensor([borders.ids[start : max(here) + 1]], device=backbone.device)
        hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state[0]
        picked = hidden[[w - start for w in here]].to("cpu", torch.float32)
        out |= dict(zip(here, picked, strict=True))
    return torch.stack([out[w] for w in wanted])


@torch.no_grad()
def _read_together(backbone: Any, group: Sequence[Borders]) -> list[Tensor]:
    """Hidden states (2K + 1, H) at the borders of several transcripts, in one pass."""
    pack = Pack()
    nodes: list[int] = []
    for borders in group:
        path = pack.insert(borders.ids)
        nodes += [path[w] for w in _wanted(borders)]
    hidden = backbone(**tree_inputs(pack, backbone.device)).last_hidden_state[0]
    picked = hidden[nodes].to("cpu", torch.float32)
    return list(picked.split([len(_wanted(borders)) for borders in group]))


def _wanted(borders: Borders) -> list[int]:
    return [*borders.open_K, *borders.named_K, borders.final]


def _groups(transcripts: Sequence[Borders], size: int, limit: int) -> Iterator[list[Borders]]:
    """Consecutive transcripts of at most ``limit`` tokens together; long ones alone."""
    group: list[Borders] = []
    tokens = 0
    for borders in transcripts:
        length = len(borders.ids)
        if group and (tokens + length > limit or length > size):
            yield group
            group, tokens = [], 0
        group.append(borders)
        tokens += length
        if length > size:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def read_features(
    backbone: Any, transcripts: Sequence[Borders], *, max_length: int, pack_tokens: int
) -> list[EpisodeFeatures]:
    """Features of every transcript; ``backbone`` is the base without head and adapters.

    ``pack_tokens`` transcripts' tokens go through the model at once; 0 reads them one by one.
    """
    out: list[EpisodeFeatures] = []
    for group in _groups(transcripts, max_length, pack_tokens):
        if len(group[0].ids) > max_length:
            read = [_read_long(backbone, group[0], max_length)]
        else:
            read = _read_together(backbone, group)
        for borders, hidden in zip(group, read, strict=True):
            count = len(borders.open_K)
            out.append(EpisodeFeatures(hidden[:count], hidden[count:-1], hidden[-1]))
    return out
