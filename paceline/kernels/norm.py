"""RMS norm and its fusions: torch references with the signatures of their Triton twins.

Never allocates state; a residual is updated in place where the name says so.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, computed in fp32."""
    return torch.rms_norm(x_TD, (x_TD.shape[-1],), weight_D, eps)


def add_rms_norm(residual_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """residual += delta in place, then its norm: the pair that opens every block."""
    residual_TD.add_(delta_TD)
    return torch.rms_norm(residual_TD, (residual_TD.shape[-1],), weight_D, eps)
