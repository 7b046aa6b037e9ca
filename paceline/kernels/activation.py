"""Gate activations: torch references with the signatures of their Triton twins."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul(gate_up_TI: Tensor) -> Tensor:
    """silu(first half) * second half of the fused gate-up projection; overwrites its input."""
    gate, up = gate_up_TI.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate, inplace=True).mul_(up)
