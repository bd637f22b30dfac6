"""Parts of the losses as pure functions of tensors.

Clipped policy gradient, per action or per token:

    rho_b = exp( (1/n_b) Σ_j log π(w_{b,j}) - log π_old(w_{b,j}) )     rho_{b,j}: of one token
    L = -E[ min(rho Â, clip(rho, 1-ε_low, 1+ε_high) Â) · ω ] - c_H H + β KL(π ‖ π_ref)

π_old is the adapter at the start of the update, ω corrects for the policy μ that sampled the call.
Tokens of all rows lie end to end (T,); ``row_T`` says whose they are. Logs of ratios are cut at
±20 before every exponential: a value and its gradient stay finite, NaN stays NaN for the guards.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from marft_agents.errors import TrainingError

_LARGEST_LOG = 20.0
_PLACEHOLDER = -9999.0


def action_log_ratio(delta_T: Tensor, row_T: Tensor, count_B: Tensor) -> Tensor:
    """(1/n_b) Σ_j delta_{b,j} per row (B,).

    ``delta_T`` is log π - log π_old of each token; ``count_B`` holds n_b: tokens, words or ones.
    """
    sum_B = torch.zeros(count_B.shape[0], dtype=delta_T.dtype, device=delta_T.device)
    return sum_B.index_add(0, row_T, delta_T) / count_B


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """min(rho Â, clip(rho, 1-low, 1+high) Â) per row or token; its mean is to be maximised."""
    ratio = _exp(log_ratio)
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def clip_fractions(
    log_ratio: Tensor, advantage: Tensor, low: float, high: float
) -> tuple[float, float]:
    """Shares of rows or tokens that clipping keeps from moving further down, and up."""
    if log_ratio.numel() == 0:
        return 0.0, 0.0
    ratio = _exp(log_ratio)
    down = (ratio < 1 - low) & (advantage < 0)
    up = (ratio > 1 + high) & (advantage > 0)
    return float(down.float().mean()), float(up.float().mean())


def kl_to_reference(logp_T: Tensor, ref_T: Tensor) -> Tensor:
    """e^d - d - 1 with d = log π_ref - log π per token (T,): never negative, 0 at equality.

    Its mean over tokens that π sampled is an unbiased estimate of KL(π ‖ π_ref).
    """
    difference = (ref_T.detach() - logp_T).clamp(-_LARGEST_LOG, _LARGEST_LOG)
    return torch.expm1(difference) - difference


@torch.no_grad()
def importance_weights(
    old_T: Tensor,
    behaviour_T: Tensor,
    row_T: Tensor,
    rows: int,
    *,
    mode: str,
    clip_max: float | None,
    clip_min: float | None = None,
) -> Tensor:
    """ω (T,): π_old / μ per token or per row's product, truncated or masked; names as in TRL.

    ``*_truncate`` cuts the weight to [clip_min, clip_max], ``*_mask`` makes one outside it 0,
    ``none`` gives ones. A log-probability of -inf or a placeholder counts as -9999: the weight is
    finite.

    Raises:
        TrainingError: when a log-probability is not a number.
    """
    if mode == "none":
        return torch.ones_like(old_T)
    difference_T = old_T.clamp(min=_PLACEHOLDER) - behaviour_T.clamp(min=_PLACEHOLDER)
    missing = int(difference_T.isnan().sum())
    if missing:
        raise TrainingError(
            f"{missing} of {difference_T.numel()} log-probabilities are not numbers, so these calls"
            " cannot be corrected for the policy that sampled them"
        )
    level, _, how = mode.partition("_")
    if level == "sequence":
        ones_B = torch.ones(rows, dtype=old_T.dtype, device=old_T.device)
        difference_T = action_log_ratio(difference_T, row_T, ones_B)[row_T]
    elif level != "token":
        raise ValueError(f"unknown correction {mode!r}")
    least = -math.inf if clip_min is None else clip_min
    most = math.inf if clip_max is None else clip_max
    weight_T = _exp(difference_T)
    if how == "truncate":
        return weight_T.clamp(least, most)
    if how == "mask":
        return weight_T.masked_fill((weight_T < least) | (weight_T > most), 0.0)
    raise ValueError(f"unknown correction {mode!r}")


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_LARGEST_LOG, _LARGEST_LOG).exp()
