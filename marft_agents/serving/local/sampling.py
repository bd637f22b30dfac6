"""From logits to tokens and the log-probabilities that are reported for them.

Invariant: the log-probability reported for a sampled token is that of the distribution it was drawn
from, after temperature, min-p, top-k and top-p, in that order. A greedy row reports the model's own
distribution, at temperature 1 and untruncated. A row depends on its own logits and generator only.

Axes: ``_N`` rows, ``_V`` vocabulary.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from marft_agents.serving.local.protocol import Settings

Top = list[tuple[int, float]]


def generator_for(seed: int | None) -> torch.Generator:
    """A generator of the row's own; without a seed, an unpredictable one."""
    generator = torch.Generator()
    generator.manual_seed(secrets.randbits(63) if seed is None else seed)
    return generator


def processed_logprobs(logits_NV: torch.Tensor, settings: Sequence[Settings]) -> torch.Tensor:
    """Log-probabilities (N, V) of each row's sampling distribution, float32."""
    scale = [1.0 if s.greedy else s.temperature for s in settings]
    scaled_NV = logits_NV.float()
    if any(value != 1.0 for value in scale):
        scaled_NV = scaled_NV / torch.tensor(scale, device=logits_NV.device)[:, None]
    cut = [row for row, s in enumerate(settings) if s.truncated]
    if cut:
        scaled_NV = scaled_NV.clone()
        scaled_NV[cut] = _truncate(scaled_NV[cut], [settings[row] for row in cut])
    return torch.log_softmax(scaled_NV, dim=-1)


def _truncate(scaled_NV: torch.Tensor, settings: Sequence[Settings]) -> torch.Tensor:
    device, size = scaled_NV.device, scaled_NV.shape[-1]
    minus_inf = float("-inf")
    if any(s.min_p > 0 for s in settings):
        floor = torch.tensor([s.min_p for s in settings], device=device)[:, None]
        probs_NV = scaled_NV.softmax(dim=-1)
        low_NV = probs_NV < floor * probs_NV.amax(dim=-1, keepdim=True)
        scaled_NV = scaled_NV.masked_fill(low_NV, minus_inf)
    ascending_NV, order_NV = scaled_NV.sort(dim=-1)
    keep = [size if s.top_k == 0 else min(s.top_k, size) for s in settings]
    kth = torch.tensor([size - k for k in keep], device=device)[:, None]
    ascending_NV = ascending_NV.masked_fill(ascending_NV < ascending_NV.gather(-1, kth), minus_inf)
    mass_NV = ascending_NV.softmax(dim=-1).cumsum(dim=-1)
    tail = torch.tensor([1.0 - s.top_p for s in settings], device=device)[:, None]
    outside_NV = (mass_NV <= tail) & (tail > 0)
    outside_NV[:, -1] = False
    ascending_NV = ascending_NV.masked_fill(outside_NV, minus_inf)
    return torch.empty_like(scaled_NV).scatter_(-1, order_NV, ascending_NV)


def draw(
    logprobs_NV: torch.Tensor,
    settings: Sequence[Settings],
    generators: Sequence[torch.Generator],
) -> torch.Tensor:
    """One token per row, (N,): the most likely one, or by inverting the cumulative distribution.

    One uniform number per row and token: the draw does not depend on the rest of the batch.
    """
    best_N = logprobs_NV.argmax(dim=-1)
    random = [row for row, s in enumerate(settings) if not s.greedy]
    if not random:
        return best_N
    uniform = [torch.rand((), generator=generators[row], dtype=torch.float64) for row in random]
    mass_RV = logprobs_NV[random].exp().cumsum(dim=-1, dtype=torch.float64)
    target_R = torch.stack(uniform).to(mass_RV.device)[:, None] * mass_RV[:, -1:]
    tokens_R = torch.searchsorted(mass_RV, target_R, right=True)[:, 0]
    best_N[random] = tokens_R.clamp_(max=logprobs_NV.shape[-1] - 1)
    return best_N


@dataclass(frozen=True)
class Sampled:
    """One token of one row."""

    token_id: int
    logprob: float
    top: Top


def sample(
    logits_NV: torch.Tensor,
    settings: Sequence[Settings],
    generators: Sequence[torch.Generator],
) -> list[Sampled | None]:
    """One token per row; None for a row whose logits are not numbers."""
    logprobs_NV = processed_logprobs(logits_NV, settings)
    tokens_N = draw(logprobs_NV, settings, generators)
    chosen_N = logprobs_NV.gather(-1, tokens_N[:, None])[:, 0]
    tops = [_top(logprobs_NV[row], s.top_logprobs) for row, s in enumerate(settings)]
    broken: list[bool] = chosen_N.isnan().tolist()
    return [
        None if bad else Sampled(token, logprob, top)
        for bad, token, logprob, top in zip(
            broken, tokens_N.tolist(), chosen_N.tolist(), tops, strict=True
        )
    ]


def _top(logprobs_V: torch.Tensor, count: int) -> Top:
    if not count:
        return []
    values, ids = logprobs_V.topk(min(count, logprobs_V.shape[-1]))
    return list(zip(ids.tolist(), values.tolist(), strict=True))


@dataclass(frozen=True)
class Scored:
    """One prompt token as the model saw it: at temperature 1, untruncated."""

    token_id: int
    logprob: float
    rank: int
    top: Top


def score(logits_NV: torch.Tensor, token_ids: Sequence[int], top: int) -> list[Scored]:
    """Raw log-probability and 1-based rank of each given token, with the ``top`` best beside it."""
    logprobs_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    chosen_N1 = logprobs_NV.gather(
        -1, torch.tensor(list(token_ids), device=logits_NV.device)[:, None]
    )
    rank_N = (logprobs_NV > chosen_N1).sum(dim=-1) + 1
    return [
        Scored(token, logprob, rank, _top(logprobs_NV[row], top))
        for row, (token, logprob, rank) in enumerate(
            zip(token_ids, chosen_N1[:, 0].tolist(), rank_N.tolist(), strict=True)
        )
    ]
