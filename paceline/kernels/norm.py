"""RMS norm and its fusions: torch references with the signatures of their Triton twins.

Never allocates state; a residual is updated in place where the name says so.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, in fp32; the result has the weight's type."""
    return torch.rms_norm(x_TD, (x_TD.shape[-1],), weight_D, eps).to(weight_D.dtype)


def add_rms_norm(residual_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """residual += delta in place, then its norm: the pair that opens every block."""
    residual_TD.add_(delta_TD)
    return rms_norm(residual_TD, weight_D, eps)
