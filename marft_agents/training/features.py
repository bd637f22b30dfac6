"""Hidden states at places of texts, one causal pass over each.

Invariant: a state depends on the text up to its place and on nothing else: texts read together do
not see each other, and what comes later changes nothing. A text longer than the window is read in
overlapping windows; each place is taken from the first window that holds it with at least half a
window of text before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marft_agents.training._trl import use_adapter
from marft_agents.training.packing import Pack
from marft_agents.training.scoring import tree_inputs

_SORTED = 1 << 20


@dataclass(frozen=True)
class Text:
    """Token ids (T,) and the places, indices into them, where hidden states are wanted."""

    ids: Sequence[int]
    places: Sequence[int]


@dataclass(frozen=True)
class Piece:
    """What one window reads of a text; ``rows`` number the places through all texts."""

    prompt_ids: array[int]
    places: list[int]
    rows: list[int]
    token_ids: Sequence[int] = ()


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


def cut(texts: Iterable[Text], size: int) -> Iterator[Piece]:
    """The texts' windows, each ending at its last place; those that serve no place are left out."""
    row = 0
    for text in texts:
        for start, end, first in windows(max(text.places, default=0) + 1, size):
            here = [i for i, place in enumerate(text.places) if first <= place < end]
            if here:
                places = [text.places[i] - start for i in here]
                ids = text.ids[start : start + max(places) + 1]
                yield Piece(array("q", ids), places, [row + i for i in here])
        row += len(text.places)


def groups(pieces: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    """Pieces that are read together, common beginnings once, at most ``limit`` tokens if several.

    They are sorted, so that common beginnings come side by side.
    """
    pack, inside = Pack(), list[Piece]()
    for piece in sorted(pieces, key=lambda piece: piece.prompt_ids):
        if inside and len(pack.ids) + pack.cost(piece) > limit:
            yield inside
            pack, inside = Pack(), []
        pack.insert(piece.prompt_ids)
        inside.append(piece)
    if inside:
        yield inside


def read_group(backbone: Any, pieces: Sequence[Piece]) -> tuple[list[int], Tensor]:
    """Rows, and their hidden states (R, H) as float32 on the CPU; gradients flow if enabled."""
    pack = Pack()
    rows: list[int] = []
    nodes: list[int] = []
    for piece in pieces:
        path = pack.insert(piece.prompt_ids)
        nodes += [path[place] for place in piece.places]
        rows += piece.rows
    hidden = backbone(**tree_inputs(pack, backbone.device)).last_hidden_state[0]
    return rows, hidden[nodes].to("cpu", torch.float32)


@contextmanager
def flags_kept(model: Any) -> Generator[None]:
    """Afterwards every parameter is trainable if it was; new ones are not."""
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trainable)


@contextmanager
def adapter_alone(model: Any, adapter: str | None) -> Generator[Any]:
    """The backbone under one adapter or none; afterwards every adapter is as it was."""
    with flags_kept(model), use_adapter(model, adapter):
        yield model.get_base_model().base_model


@dataclass(frozen=True)
class Reader:
    """Reads texts with one model.

    ``share`` says that several texts read together are read as if alone; ``window`` and
    ``pack_tokens`` are tokens of a window and of one pass.
    """

    model: Any
    share: bool
    window: int
    pack_tokens: int

    @property
    def width(self) -> int:
        return self.model.get_base_model().config.get_text_config().hidden_size

    def groups(self, texts: Sequence[Text]) -> Iterator[list[Piece]]:
        """What is read in one pass each; common beginnings are sought among ``_SORTED`` tokens."""
        limit = self.pack_tokens if self.share else 0
        pieces: list[Piece] = []
        tokens = 0
        for piece in cut(texts, self.window):
            pieces.append(piece)
            tokens += len(piece.prompt_ids)
            if tokens >= _SORTED:
                yield from groups(pieces, limit)
                pieces, tokens = [], 0
        yield from groups(pieces, limit)

    @torch.no_grad()
    def read(self, texts: Sequence[Text], adapter: str | None = None) -> Tensor:
        """Hidden states (R, H) of all places of the texts, in order."""
        out = torch.empty(sum(len(text.places) for text in texts), self.width)
        with adapter_alone(self.model, adapter) as backbone:
            for pieces in self.groups(texts):
                rows, hidden = read_group(backbone, pieces)
                out[rows] = hidden
        return out
