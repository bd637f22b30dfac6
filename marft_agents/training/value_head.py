"""The value head: a small MLP on hidden states, and how it is fitted to λ-returns.

Invariant: the head computes in units of the returns that it is fitted on. When those units change
between two fits, its last layer is rescaled so that no value changes (PopArt, arXiv 1602.07714).

    loss   Huber(V_φ(s_p), R̂_p), targets R̂ computed anew each epoch; with a value clip c the larger
           of that and the loss of V_old + clip(V_φ - V_old, ±c), V_old the head before the fit
           without its mean error

V after a truncated end is taken from the head before the fit (in the first fit: the mean return)
for all its targets: no return is known there, and V bootstrapped from itself epoch after epoch
would grow without end where nothing is discounted. For the same reason a value that is used stays
within the returns seen so far.

Every action weighs the same, its places share that. An epoch goes through a draw of chains of about
``_EPOCH`` rows, so that a fit costs no more with 10^5 episodes than with 10^3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from marft_agents.training.chains import Chain, Discounts, lambda_returns, rewards_to_go
from marft_agents.training.named_state import (
    adam_shapes,
    adam_state,
    load_adam_state,
    require_shapes,
)

_EPOCH = 1 << 15
_BATCHES = 32
_SMALLEST_BATCH = 64
_LIMIT = 10.0
"""Largest standardised feature, in deviations."""


@dataclass(frozen=True)
class CriticSettings:
    """How a critic is fitted."""

    hidden: int
    epochs: int
    learning_rate: float
    weight_decay: float
    folds: int
    gamma: float
    lam: float
    seed: int
    gamma_w: float = 1.0
    lam_w: float = 1.0
    update_epochs: int = 20
    value_clip: float | None = None
    """In deviations of the returns."""
    max_grad_norm: float = 1.0

    @property
    def discounts(self) -> Discounts:
        return Discounts(self.gamma, self.lam, self.gamma_w, self.lam_w)


class ValueHead(nn.Module):
    """MLP on standardised features, in units of the returns it was fitted on; float32."""

    mean: Tensor
    scale: Tensor
    offset: Tensor
    spread: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("offset", torch.zeros(()))
        self.register_buffer("spread", torch.ones(()))
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))
        self.net = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, 1))
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    @property
    def last(self) -> nn.Linear:
        layer = self.net[2]
        assert isinstance(layer, nn.Linear)
        return layer

    def forward(self, features: Tensor) -> Tensor:
        """Values (N,) of features (N, H)."""
        x = ((features - self.mean) / self.scale).clamp(-_LIMIT, _LIMIT)
        return self.offset + self.spread * self.net(x).squeeze(-1)

    @torch.no_grad()
    def standardise(self, features: Tensor) -> None:
        """Take mean and scale from the features (N, H); a constant one is not blown up."""
        deviation = features.std(0, correction=0)
        self.mean.copy_(features.mean(0))
        self.scale.copy_(deviation.clamp_min(1e-4 + 0.1 * float(deviation.mean())))

    @torch.no_grad()
    def rescale(self, offset: float, spread: float) -> None:
        """Change the units of the output; no value changes."""
        ratio = float(self.spread) / spread
        self.last.weight.mul_(ratio)
        self.last.bias.mul_(ratio).add_((float(self.offset) - offset) / spread)
        self.offset.fill_(offset)
        self.spread.fill_(spread)


@dataclass(frozen=True)
class Read:
    """A chain and the hidden states (R, H) of its rows; ``final`` is V after a truncated end."""

    chain: Chain
    features: Tensor
    final: float = 0.0


class HeadFit:
    """A head with its optimizer; ``fits`` counts how often it was fitted."""

    def __init__(self, width: int, settings: CriticSettings) -> None:
        self.settings = settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.head = ValueHead(width, settings.hidden)
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.fits = 0
        self.anchor: ValueHead | None = None
        """The head before the last fit, where a value clip is set."""

    def fit(self, reads: Sequence[Read], *, epochs: int, seed: int) -> float:
        """Fit on these chains; returns the last epoch's mean loss, in units of the returns."""
        return self.train(self.prepare(reads), epochs=epochs, seed=seed) if reads else 0.0

    def prepare(self, reads: Sequence[Read]) -> list[Read]:
        """Adjust the units to these chains, and note V after their truncated ends."""
        self.adjust(reads)
        ends = [read.features[-1] for read in reads if read.chain.final]
        known = iter(self.values(torch.stack(ends)).tolist() if ends else [])
        return [replace(read, final=next(known)) if read.chain.final else read for read in reads]

    def train(self, reads: Sequence[Read], *, epochs: int, seed: int) -> float:
        """The passes of a fit over prepared chains."""
        clip = self.settings.value_clip if self.fits else None
        self.anchor = anchor = self.copy().head if clip is not None else None
        generator = torch.Generator().manual_seed(seed)
        loss = 0.0
        for _ in range(epochs):
            rows, target, weight = lessons(draw(reads, generator), self.values)
            old = None if anchor is None else _no_grad(anchor, rows)
            size = max(_SMALLEST_BATCH, len(rows) // _BATCHES)
            losses: list[Tensor] = []
            for batch in torch.randperm(len(rows), generator=generator).split(size):
                bound = None if old is None else old[batch]
                step = self.loss(self.head(rows[batch]), target[batch], weight[batch], bound)
                self.step(step)
                losses.append(step.detach() * len(batch))
            loss = float(torch.stack(losses).sum()) / len(rows)
        self.fits += epochs > 0
        return loss

    def adjust(self, reads: Sequence[Read]) -> None:
        """Units from these chains: the features' in the first fit, the returns' in every fit.

        A head that was fitted before also loses its mean error, so that returns that rose as a
        whole need no learning.
        """
        returns = torch.tensor([g for read in reads for g in rewards_to_go(read.chain.links)])
        low, high = returns.min(), returns.max()
        self.head.low.copy_(torch.minimum(self.head.low, low) if self.fits else low)
        self.head.high.copy_(torch.maximum(self.head.high, high) if self.fits else high)
        offset, spread = float(returns.mean()), max(float(returns.std(correction=0)), 1e-4)
        if self.fits:
            self.head.rescale(offset, max(spread, float(self.head.spread) / 2))
            self._remove_mean_error(reads, returns)
            return
        self.head.standardise(torch.cat([_lesson_rows(read) for read in reads]))
        self.head.offset.fill_(offset)
        self.head.spread.fill_(spread)

    @torch.no_grad()
    def _remove_mean_error(self, reads: Sequence[Read], returns: Tensor) -> None:
        places = torch.cat([read.features[: read.chain.places] for read in reads])
        values = _no_grad(self.head, places)
        weight = torch.tensor([w for read in reads for w in read.chain.weight_P()])
        error = (weight * (returns - values)).sum() / weight.sum()
        self.head.last.bias.add_(error / self.head.spread)

    def loss(self, value: Tensor, target: Tensor, weight: Tensor, old: Tensor | None) -> Tensor:
        """Weighted Huber loss of values (N,), in units of the returns."""
        unit = self.head.spread
        loss = nn.functional.huber_loss(value / unit, target / unit, reduction="none")
        clip = self.settings.value_clip
        if old is not None and clip is not None:
            near = old + (value - old).clamp(-clip * float(unit), clip * float(unit))
            bounded = nn.functional.huber_loss(near / unit, target / unit, reduction="none")
            loss = torch.maximum(loss, bounded)
        return (weight * loss).mean()

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()

    def values(self, features: Tensor) -> Tensor:
        """V (N,) of features (N, H), without gradients, within the returns seen."""
        return self.bounded(_no_grad(self.head, features))

    def bounded(self, value: Tensor) -> Tensor:
        return value.clamp(self.head.low, self.head.high)

    def copy(self) -> HeadFit:
        twin = HeadFit(self.head.mean.shape[0], self.settings)
        twin.load_state(self.state())
        return twin

    def state(self) -> dict[str, Tensor]:
        """Head, Adam's moments by the head's tensor names, and the number of fits."""
        out = {name: tensor.clone() for name, tensor in self.head.state_dict().items()}
        out |= adam_state(self.optimizer, dict(self.head.named_parameters()))
        return out | {"fits": torch.tensor(self.fits)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state.

        Raises:
            ConfigError: when it is another head's; nothing is changed then.
        """
        parameters = dict(self.head.named_parameters())
        expected = {name: t.shape for name, t in self.head.state_dict().items()}
        expected |= {"fits": torch.Size(())}
        moments = adam_shapes(parameters) if int(state.get("fits", torch.tensor(0))) else {}
        require_shapes(state, expected | moments)
        self.head.load_state_dict({name: state[name] for name in self.head.state_dict()})
        load_adam_state(self.optimizer, parameters, state)
        self.fits = int(state["fits"])


def _no_grad(head: ValueHead, features: Tensor) -> Tensor:
    with torch.no_grad():
        return head(features)


def _lesson_rows(read: Read) -> Tensor:
    """The rows that have a target: all but the state after a truncated end."""
    return read.features[:-1] if read.chain.final else read.features


def draw(reads: Sequence[Read], generator: torch.Generator) -> list[Read]:
    """The chains of one epoch: all of them, or a random part of about ``_EPOCH`` rows."""
    if sum(read.chain.rows for read in reads) <= _EPOCH:
        return list(reads)
    out: list[Read] = []
    rows = 0
    for i in torch.randperm(len(reads), generator=generator).tolist():
        if rows >= _EPOCH:
            break
        out.append(reads[i])
        rows += reads[i].chain.rows
    return out


def targets(chain: Chain, values: Sequence[float], final: float) -> tuple[list[float], list[float]]:
    """Target and weight of every row that has one, from the current values of all rows."""
    target = lambda_returns(chain.links, values[: chain.places], final)
    weight = chain.weight_P()
    if chain.opened:
        starts = chain.starts()
        target += [target[p] for p in starts]
        weight += [1.0] * len(starts)
    return target, weight


def lessons(
    reads: Sequence[Read], values: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Features (N, H), targets (N,) and weights (N,), of mean 1, of all rows with a target."""
    current: list[float] = values(torch.cat([read.features for read in reads])).tolist()
    target: list[float] = []
    weight: list[float] = []
    start = 0
    for read in reads:
        t, w = targets(read.chain, current[start : start + read.chain.rows], read.final)
        target += t
        weight += w
        start += read.chain.rows
    weights = torch.tensor(weight)
    rows = torch.cat([_lesson_rows(read) for read in reads])
    return rows, torch.tensor(target), weights / weights.mean()
