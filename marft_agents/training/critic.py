"""The centralised critic V_φ(s_k): a small value head on the frozen base.

Invariants: one causal pass over an episode's joint transcript gives the features at all its
borders; the base is frozen, so they are computed once. Values that advantages are built on are
*cross-fitted*: they come from a head that never saw the episode, because a head that has seen a
reward predicts it and leaves no advantage to learn from.

    target  R̂_k = Â_k + V_k   (λ-returns, computed anew each epoch)
    loss    Huber(V_φ(s_k), R̂_k), at the border with and without the next speaker's name
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from marft_agents.credit import action_gae
from marft_agents.training.dataset import EpisodeView
from marft_agents.training.features import EpisodeFeatures

_BATCH = 64


@dataclass(frozen=True)
class CriticSettings:
    """How a value head is fitted."""

    hidden: int
    epochs: int
    learning_rate: float
    weight_decay: float
    folds: int
    gamma: float
    lam: float
    seed: int


class ValueHead(nn.Module):
    """MLP on standardised features, in units of the returns it was fitted on; float32."""

    mean: Tensor
    scale: Tensor
    offset: Tensor
    spread: Tensor

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("offset", torch.zeros(()))
        self.register_buffer("spread", torch.ones(()))
        self.net = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, 1))
        last = self.net[2]
        nn.init.zeros_(last.weight)  # pyright: ignore[reportArgumentType] a Linear's weight
        nn.init.zeros_(last.bias)  # pyright: ignore[reportArgumentType] a Linear's bias

    def forward(self, features: Tensor) -> Tensor:
        """Values (N,) of features (N, H)."""
        x = (features - self.mean) / self.scale
        return self.offset + self.spread * self.net(x).squeeze(-1)


@dataclass(frozen=True)
class EpisodeValues:
    """V_k (K,) before each action and V_{K+1} (0 after a terminated end)."""

    values_K: list[float]
    final_value: float


@dataclass(frozen=True)
class FittedCritic:
    """Out-of-fold values per episode, and a head fitted on all episodes for later runs."""

    values: list[EpisodeValues]
    head: ValueHead
    explained_variance: float
    """Share of the returns' variance that the values explain, out of fold."""
    shrinkage: float
    """Factor by which values were pulled towards the mean return; 0: a constant baseline."""


def returns_to_go(episode: EpisodeView, gamma: float) -> list[float]:
    """Discounted rewards from each action on (K,); nothing is bootstrapped."""
    zeros = [0.0] * len(episode.reward_K)
    return action_gae(episode.reward_K, zeros, episode.steps_K, gamma=gamma, lam=1).return_K


def _values(head: ValueHead, episode: EpisodeView, at: EpisodeFeatures) -> EpisodeValues:
    with torch.no_grad():
        values_K: list[float] = head(at.named_K).tolist()
        final = float(head(at.final[None])[0]) if episode.truncated else 0.0
    return EpisodeValues(values_K, final)


def _targets(
    head: ValueHead,
    episodes: Sequence[EpisodeView],
    features: Sequence[EpisodeFeatures],
    settings: CriticSettings,
) -> Tensor:
    out: list[float] = []
    for episode, at in zip(episodes, features, strict=True):
        v = _values(head, episode, at)
        out += action_gae(
            episode.reward_K,
            v.values_K,
            episode.steps_K,
            gamma=settings.gamma,
            lam=settings.lam,
            final_value=v.final_value,
        ).return_K
    return torch.tensor(out)


def fit_head(
    episodes: Sequence[EpisodeView],
    features: Sequence[EpisodeFeatures],
    settings: CriticSettings,
) -> ValueHead:
    """A value head fitted on these episodes."""
    generator = torch.Generator().manual_seed(settings.seed)
    named = torch.cat([f.named_K for f in features])
    opened = torch.cat([f.open_K for f in features])
    returns = torch.tensor([g for e in episodes for g in returns_to_go(e, settings.gamma)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        head = ValueHead(named.shape[1], settings.hidden)
    both = torch.cat([named, opened])
    head.mean.copy_(both.mean(0))
    head.scale.copy_(both.std(0, correction=0).clamp_min(1e-4))
    head.offset.copy_(returns.mean())
    head.spread.copy_(returns.std(correction=0).clamp_min(1e-4))
    optimizer = torch.optim.AdamW(
        head.net.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    huber = nn.HuberLoss()
    for _ in range(settings.epochs):
        target = _targets(head, episodes, features, settings)
        for rows in torch.randperm(len(target), generator=generator).split(_BATCH):
            unit = head.spread
            loss = huber(head(named[rows]) / unit, target[rows] / unit)
            loss = loss + huber(head(opened[rows]) / unit, target[rows] / unit)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return head.requires_grad_(False)


def cross_fit(
    episodes: Sequence[EpisodeView],
    features: Sequence[EpisodeFeatures],
    settings: CriticSettings,
) -> list[EpisodeValues]:
    """Values of every episode from a head fitted on the other folds."""
    order = torch.randperm(
        len(episodes), generator=torch.Generator().manual_seed(settings.seed)
    ).tolist()
    folds = min(settings.folds, len(episodes))
    values = [EpisodeValues([], 0.0)] * len(episodes)
    for fold in range(folds):
        held_out = set(order[fold::folds])
        rest = [i for i in range(len(episodes)) if i not in held_out]
        head = fit_head([episodes[i] for i in rest], [features[i] for i in rest], settings)
        for i in held_out:
            values[i] = _values(head, episodes[i], features[i])
    return values


def fit_critic(
    episodes: Sequence[EpisodeView],
    features: Sequence[EpisodeFeatures],
    settings: CriticSettings,
) -> FittedCritic:
    """Cross-fitted values of every episode (at least two), and a head fitted on all of them."""
    values = cross_fit(episodes, features, settings)
    values, shrinkage, explained = _shrink(episodes, values, settings.gamma)
    return FittedCritic(values, fit_head(episodes, features, settings), explained, shrinkage)


def _shrink(
    episodes: Sequence[EpisodeView], values: Sequence[EpisodeValues], gamma: float
) -> tuple[list[EpisodeValues], float, float]:
    """V ← m + c (V - m) with the c in [0, 1] that fits the returns best, out of fold.

    A critic that learned nothing (c = 0) becomes the mean return, a baseline without noise.
    """
    returns = [g for e in episodes for g in returns_to_go(e, gamma)]
    guesses = [v for e in values for v in e.values_K]
    m = math.fsum(returns) / len(returns)
    cross = math.fsum((v - m) * (g - m) for v, g in zip(guesses, returns, strict=True))
    square = math.fsum((v - m) ** 2 for v in guesses)
    c = min(max(cross / square, 0.0), 1.0) if square > 1e-12 else 0.0
    shrunk = [
        EpisodeValues(
            [m + c * (v - m) for v in e.values_K],
            m + c * (e.final_value - m) if episode.truncated else 0.0,
        )
        for episode, e in zip(episodes, values, strict=True)
    ]
    total = math.fsum((g - m) ** 2 for g in returns)
    left = math.fsum(
        (g - v) ** 2 for g, v in zip(returns, (v for e in shrunk for v in e.values_K), strict=True)
    )
    return shrunk, c, 1 - left / total if total > 0 else 0.0
