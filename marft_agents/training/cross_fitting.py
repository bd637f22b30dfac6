"""Values of episodes from critics that never saw them.

Invariant: a critic that has seen a reward predicts it and leaves no advantage to learn from. So the
episodes are dealt into folds, and a fold's values come from a critic fitted on the others. That one
starts from the carried critic, which knows earlier episodes only; a fold of episodes that the
carried critic knows already starts anew. Last, the carried critic is fitted on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from marft_agents.training.chains import Chain, thin
from marft_agents.training.features import Text
from marft_agents.training.value_head import CriticSettings, HeadFit, Read

_MEMORY = 2 << 30
"""Bytes of hidden states kept while fitting."""
_LESSONS = 32
"""Most places of one action that are fitted on: its tokens share one return, or nearly."""


class TextReader(Protocol):
    """Reads hidden states (R, H) at the places of texts; ``Reader`` does it with a model."""

    @property
    def width(self) -> int: ...
    def read(self, texts: Sequence[Text], adapter: str | None = None) -> Tensor: ...


class Shelf:
    """Chains, and the hidden states of their rows as far as they fit into memory."""

    def __init__(self, reader: TextReader, chains: Sequence[Chain], seed: int) -> None:
        self.reader, self.chains = reader, chains
        self.limit = _MEMORY // (4 * reader.width)
        self.whole = sum(chain.rows for chain in chains) <= self.limit
        self.lessons = _lessons(chains, self.limit, seed)
        self._reads: dict[int, Read] = {}
        self._full: dict[int, Tensor] = {}

    def reads(self, which: Sequence[int]) -> list[Read]:
        """What is fitted on, of some chains; those without a lesson are left out."""
        if not self._reads:
            self._fill()
        return [self._reads[i] for i in which if i in self._reads]

    def _fill(self) -> None:
        numbers = list(self.lessons)
        if not self.whole:
            found = read_chains(self.reader, [self.lessons[i][0] for i in numbers])
            self._reads = {i: Read(*r) for i, r in zip(numbers, found, strict=True)}
            return
        for i, (_, features) in zip(
            range(len(self.chains)), read_chains(self.reader, self.chains), strict=True
        ):
            chain, rows = self.lessons[i]
            self._full[i] = features
            kept = features if len(rows) == len(features) else features[rows]
            self._reads[i] = Read(chain, kept)

    def features(self, which: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """The hidden states of all rows of some chains, read again where they were not kept."""
        if self.whole:
            self.reads(which)
            yield from ((i, self._full[i]) for i in which)
            return
        for part in parts(self.chains, which, self.limit):
            read = read_chains(self.reader, [self.chains[i] for i in part])
            yield from ((i, features) for i, (_, features) in zip(part, read, strict=True))


def _lessons(chains: Sequence[Chain], limit: int, seed: int) -> dict[int, tuple[Chain, list[int]]]:
    """What is fitted on, by number of the chain: thinned, or a random part, to ``limit`` rows."""
    most = _LESSONS
    out = {i: thin(chain, most) for i, chain in enumerate(chains)}
    while most > 1 and sum(len(rows) for _, rows in out.values()) > limit:
        most //= 2
        out = {i: thin(chain, most) for i, chain in enumerate(chains)}
    order = torch.randperm(len(chains), generator=torch.Generator().manual_seed(seed)).tolist()
    total = sum(len(rows) for _, rows in out.values())
    while total > limit and len(out) > 2:
        total -= len(out.pop(order.pop())[1])
    return out


def parts(chains: Sequence[Chain], which: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Runs of ``which`` of at most ``limit`` rows (one chain may have more)."""
    part: list[int] = []
    rows = 0
    for i in which:
        if part and rows + chains[i].rows > limit:
            yield part
            part, rows = [], 0
        part.append(i)
        rows += chains[i].rows
    if part:
        yield part


def read_chains(
    reader: TextReader, chains: Sequence[Chain], adapter: str | None = None
) -> Iterator[tuple[Chain, Tensor]]:
    """Hidden states (R, H) of each chain's rows."""
    table = reader.read([text for chain in chains for text in chain.texts], adapter)
    split = table.split([chain.rows for chain in chains])
    return zip(chains, split, strict=True)


class Estimator(Protocol):
    """A critic that can be fitted: a head, or a head with an adapter."""

    @property
    def fits(self) -> int: ...
    def fit(self, shelf: Shelf, which: Sequence[int], *, epochs: int, seed: int) -> float: ...
    def values(self, shelf: Shelf, which: Sequence[int]) -> Iterator[tuple[int, list[float]]]: ...
    def state(self) -> dict[str, Tensor]: ...
    def load_state(self, state: Mapping[str, Tensor]) -> None: ...


class HeadEstimator:
    """A head on the frozen base."""

    def __init__(self, width: int, settings: CriticSettings) -> None:
        self.head = HeadFit(width, settings)

    @property
    def fits(self) -> int:
        return self.head.fits

    def fit(self, shelf: Shelf, which: Sequence[int], *, epochs: int, seed: int) -> float:
        return self.head.fit(shelf.reads(which), epochs=epochs, seed=seed)

    def values(self, shelf: Shelf, which: Sequence[int]) -> Iterator[tuple[int, list[float]]]:
        for i, features in shelf.features(which):
            yield i, self.head.values(features).tolist()

    def state(self) -> dict[str, Tensor]:
        return self.head.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.head.load_state(state)


@dataclass(frozen=True)
class Fold:
    """Episodes that are held out together; ``fresh``: from a critic that starts anew."""

    held_out: frozenset[int]
    fresh: bool


def deal(seen_E: Sequence[bool], folds: int, *, carried: bool, seed: int) -> list[Fold]:
    """Folds over all episodes; ``seen_E`` says which of them the carried critic knows."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(seen_E), generator=generator).tolist()
    out: list[Fold] = []
    for known in (False, True):
        group = [e for e in order if seen_E[e] == known]
        count = min(folds, len(group))
        fresh = known or not carried
        out += [Fold(frozenset(group[n::count]), fresh) for n in range(count)]
    return out


def name_hash(name: str) -> int:
    """64 bits of an episode's id."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


class CrossFitted:
    """A carried estimator, and the values of episodes that it has not seen yet."""

    def __init__(self, make: Callable[[], Estimator], settings: CriticSettings) -> None:
        self._make, self.settings = make, settings
        self.carried = make()
        self._seen: set[int] = set()

    def evaluate(
        self, shelf: Shelf, names_E: Sequence[str], *, seed: int
    ) -> tuple[list[list[float]], float]:
        """Values of all rows of every chain, and the loss of the carried critic's fit."""
        chains = shelf.chains
        known = [name_hash(name) in self._seen for name in names_E]
        values: list[list[float]] = [[] for _ in chains]
        before = self.carried.state()
        folds = deal(known, self.settings.folds, carried=bool(self.carried.fits), seed=seed)
        for fold in folds:
            estimator = self._make()
            if not fold.fresh:
                estimator.load_state(before)
            held = [i for i, chain in enumerate(chains) if chain.episode in fold.held_out]
            rest = [i for i, chain in enumerate(chains) if chain.episode not in fold.held_out]
            estimator.fit(shelf, rest, epochs=self._epochs(estimator), seed=seed)
            for i, rows in estimator.values(shelf, held):
                values[i] = rows
        self.carried.load_state(before)
        epochs = self._epochs(self.carried)
        loss = self.carried.fit(shelf, range(len(chains)), epochs=epochs, seed=seed)
        self._seen.update(name_hash(name) for name in names_E)
        return values, loss

    def _epochs(self, estimator: Estimator) -> int:
        return self.settings.update_epochs if estimator.fits else self.settings.epochs

    def state(self) -> dict[str, Tensor]:
        """The carried critic, and which episodes it has seen."""
        seen = torch.tensor(sorted(self._seen), dtype=torch.int64)
        return self.carried.state() | {"seen": seen}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state; see ``HeadFit.load_state``."""
        rest = {name: tensor for name, tensor in state.items() if name != "seen"}
        self.carried.load_state(rest)
        self._seen = set(state["seen"].tolist()) if "seen" in state else set()
