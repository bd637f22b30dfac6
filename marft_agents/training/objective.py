"""The loss of one pack of turns, and what to tell of it.

Invariant: every denominator (rows of a full block, mean reply length of the adapter's batch) is
fixed before the step, so the gradient does not depend on how rows fall into packs, micro-batches or
processes: their sum is the loss of the block.

    awr  -Σ_b w_b · (1/L_b) Σ_j log π(w_{b,j}) / B
    ppo  -Σ_b ω_b · min(rho_b Â'_b, clip(rho_b) Â'_b) / B            action level
         -Σ_{b,j} ω_{b,j} · min(rho_{b,j} Â'_{b,j}, clip(...)) / (B · mean L)      token level
         - c_H · H + β · KL(π ‖ π_ref), both means over tokens in the same way
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from marft_agents.training.batch import Batch
from marft_agents.training.config import MarftConfig
from marft_agents.training.losses import (
    action_log_ratio,
    clip_fractions,
    clipped_surrogate,
    importance_weights,
    kl_to_reference,
)
from marft_agents.training.scoring import Scores


@dataclass(frozen=True)
class Scale:
    """What a block's sums are divided by."""

    rows: int
    """B, rows of a full block."""
    mean_length: float
    """Mean L over the adapter's rows of the batch."""


@dataclass
class PackLoss:
    """Loss of a pack, and sums over its tokens for the block's metrics."""

    loss: Tensor
    sums: dict[str, tuple[float, float]]
    """Name to (sum, count)."""


def awr_pack(batch: Batch, rows: Sequence[int], scores: Scores, scale: Scale) -> PackLoss:
    """Advantage-weighted regression; a token-level weight stands beside its token."""
    logp_T, row_T = scores.logp_T, scores.row_T
    length_B = _lengths(batch, rows, logp_T)
    weight_T = _spread(batch, rows, "weight_L", logp_T)
    weighted_B = action_log_ratio(weight_T * logp_T, row_T, length_B)
    mean_B = action_log_ratio(logp_T.detach(), row_T, length_B)
    sums = {
        "logp": (float(mean_B.sum()), len(rows)),
        "weight_mean": (sum(batch.rows[i].weight for i in rows), len(rows)),
        **_entropy(scores),
    }
    return PackLoss(-weighted_B.sum() / scale.rows, sums)


def ppo_pack(
    batch: Batch,
    rows: Sequence[int],
    scores: Scores,
    scale: Scale,
    config: MarftConfig,
    epsilon: tuple[float, float],
) -> PackLoss:
    """The clipped surrogate with compounding, correction for the sampler, entropy and KL."""
    logp_T, row_T = scores.logp_T, scores.row_T
    old_T = _tensor(chain.from_iterable(batch.old[i] for i in rows), logp_T)
    behaviour_T = _tensor(chain.from_iterable(batch.rows[i].behaviour_L for i in rows), logp_T)
    omega_T = importance_weights(
        old_T,
        behaviour_T,
        row_T,
        len(rows),
        mode=config.importance_sampling_mode,
        clip_max=config.importance_sampling_clip_max,
        clip_min=config.importance_sampling_clip_min,
    )
    against_T = behaviour_T if config.importance_sampling_mode == "none" else old_T
    factor_B = _tensor((batch.factor.get(i, 1.0) for i in rows), logp_T)
    advantage_T = _spread(batch, rows, "advantage_L", logp_T) * factor_B[row_T]
    log_ratio, advantage, omega = logp_T - against_T, advantage_T, omega_T
    tokens = total = scale.rows * scale.mean_length
    if config.level != "token":
        length_B = _lengths(batch, rows, logp_T)
        log_ratio = action_log_ratio(log_ratio, row_T, counts(batch, rows, config, logp_T))
        advantage = action_log_ratio(advantage_T, row_T, length_B)
        omega = action_log_ratio(omega_T, row_T, length_B)
        total = float(scale.rows)
    surrogate = clipped_surrogate(log_ratio, advantage, *epsilon)
    loss = -(surrogate * omega).sum() / total
    sums = {**_ratio_sums(log_ratio, advantage, epsilon, omega_T), **_entropy(scores)}
    if config.entropy_coef and scores.entropy_T is not None:
        loss = loss - config.entropy_coef * scores.entropy_T.sum() / tokens
    if config.beta:
        reference_T = _tensor(chain.from_iterable(batch.reference[i] for i in rows), logp_T)
        kl_T = kl_to_reference(logp_T, reference_T)
        loss = loss + config.beta * kl_T.sum() / tokens
        sums["kl_reference"] = (float(kl_T.detach().sum()), kl_T.numel())
    moved_T = kl_to_reference(logp_T.detach(), old_T)
    sums["kl"] = (float(moved_T.sum()), moved_T.numel())
    return PackLoss(loss, sums)


def counts(batch: Batch, rows: Sequence[int], config: MarftConfig, like: Tensor) -> Tensor:
    """n_b (B,) of ``action_norm``."""
    if config.action_norm == "token":
        return _lengths(batch, rows, like)
    if config.action_norm == "word":
        return _tensor((float(batch.rows[i].words) for i in rows), like)
    return torch.ones(len(rows), dtype=like.dtype, device=like.device)


def _ratio_sums(
    log_ratio: Tensor, advantage: Tensor, epsilon: tuple[float, float], omega_T: Tensor
) -> dict[str, tuple[float, float]]:
    count = log_ratio.numel()
    down, up = clip_fractions(log_ratio.detach(), advantage, *epsilon)
    ratio = log_ratio.detach().clamp(-20, 20).exp()
    return {
        "ratio": (float(ratio.sum()), count),
        "clip_ratio/low_mean": (down * count, count),
        "clip_ratio/high_mean": (up * count, count),
        "advantage": (float(advantage.sum()), count),
        "sampling/importance_sampling_ratio": (float(omega_T.sum()), omega_T.numel()),
    }


def _entropy(scores: Scores) -> dict[str, tuple[float, float]]:
    if scores.entropy_T is None:
        return {}
    return {"entropy": (float(scores.entropy_T.detach().sum()), scores.entropy_T.numel())}


def _tensor(values: object, like: Tensor) -> Tensor:
    return torch.tensor(list(values), dtype=like.dtype, device=like.device)  # pyright: ignore[reportArgumentType, reportUnknownArgumentType] an iterable of numbers


def _lengths(batch: Batch, rows: Sequence[int], like: Tensor) -> Tensor:
    return _tensor((float(len(batch.rows[i].token_ids)) for i in rows), like)


def _spread(batch: Batch, rows: Sequence[int], name: str, like: Tensor) -> Tensor:
    """A row's one number beside each of its tokens, or its numbers as they are, (T,)."""
    out: list[float] = []
    for i in rows:
        values: Sequence[float] = getattr(batch.rows[i], name)
        out += list(values) * len(batch.rows[i].token_ids) if len(values) == 1 else list(values)
    return _tensor(out, like)
