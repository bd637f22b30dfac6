"""Losses as pure functions of tensors.

AWR (offline):  L = -E_b[ w_b · (1/L_b) Σ_j log π(w_{b,j}) ],   w_b = min(exp(Â_b / τ), w_max)
"""

from __future__ import annotations

from torch import Tensor


def awr_loss(mean_logp_B: Tensor, weight_B: Tensor, batch_size: int) -> Tensor:
    """Sum over the rows at hand, divided by the rows of a full batch.

    Dividing by the full batch keeps every row's share equal, however rows fall into batches.
    """
    return -(weight_B * mean_logp_B).sum() / batch_size
