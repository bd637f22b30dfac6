"""Turns scored together, with what their prompts share computed once.

Invariant: the token tree of a pack holds every distinct prefix once, and a token sees exactly its
own ancestors, so each turn is scored as if it were alone. Nothing is padded. The last sampled token
predicts nothing and is not in the tree.

The turns of one agent share system prompt, examples and often history: on real chats the tree is
about half as large as the turns laid side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Scorable(Protocol):
    """What packing needs of a turn: prompt ids (P,) and sampled ids (L,)."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...


@dataclass
class Pack:
    """A tree of N tokens over some turns; ``rows`` are their indices in the caller's list."""

    ids: list[int] = field(default_factory=list[int])
    depth: list[int] = field(default_factory=list[int])
    """Position of each token in its turn, (N,)."""
    runs: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(start, parent): tokens from ``start`` to the next run hang in a chain below ``parent``."""
    rows: list[int] = field(default_factory=list[int])
    predictors: list[list[int]] = field(default_factory=list[list[int]])
    """Per turn (L,): the token from which each sampled token was predicted."""
    targets: list[list[int]] = field(default_factory=list[list[int]])
    """Per turn (L,): the sampled token ids."""
    _children: dict[tuple[int, int], int] = field(
        default_factory=dict[tuple[int, int], int], repr=False
    )

    @property
    def is_chain(self) -> bool:
        """Whether plain causal attention is the right mask."""
        return len(self.runs) == 1

    def _walk(self, sequence: Sequence[int]) -> list[int]:
        """Nodes of the longest prefix that is in the tree already."""
        path: list[int] = []
        node = -1
        for token in sequence:
            child = self._children.get((node, token))
            if child is None:
                break
            node = child
            path.append(node)
        return path

    def cost(self, turn: Scorable) -> int:
        """Tokens that the turn would add."""
        sequence = _inputs(turn)
        return len(sequence) - len(self._walk(sequence))

    def insert(self, sequence: Sequence[int]) -> list[int]:
        """Nodes of the sequence, in order; those that are not there yet are added."""
        path = self._walk(sequence)
        if len(path) < len(sequence):
            self.runs.append((len(self.ids), path[-1] if path else -1))
        for depth in range(len(path), len(sequence)):
            parent = path[-1] if path else -1
            node = len(self.ids)
            self._children[parent, sequence[depth]] = node
            self.ids.append(sequence[depth])
            self.depth.append(depth)
            path.append(node)
        return path

    def add(self, row: int, turn: Scorable) -> None:
        path = self.insert(_inputs(turn))
        self.rows.append(row)
        self.predictors.append(path[len(turn.prompt_ids) - 1 :])
        self.targets.append(list(turn.token_ids))


def _inputs(turn: Scorable) -> list[int]:
    return [*turn.prompt_ids, *turn.token_ids[:-1]]


def pack_turns(turns: Iterable[Scorable], max_tokens: int, *, share: bool = True) -> list[Pack]:
    """Packs of at most ``max_tokens`` tokens (a longer turn gets one of its own).

    Turns are taken in an order that puts common prefixes side by side. Without ``share`` every
    turn is a pack: for models whose attention is not a plain causal softmax.
    """
    order = sorted(enumerate(turns), key=lambda item: list(item[1].prompt_ids))
    packs: list[Pack] = []
    for row, turn in order:
        full = not packs or (
            packs[-1].rows and len(packs[-1].ids) + packs[-1].cost(turn) > max_tokens
        )
        if full or not share:
            packs.append(Pack())
        packs[-1].add(row, turn)
    return packs
