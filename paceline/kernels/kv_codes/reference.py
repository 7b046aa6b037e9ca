"""fp8 pages: how a key or a value becomes an e4m3 code, and back. In torch.

Pages hold codes as uint8, which torch can index and Triton can read on every GPU. A number is
code * scale; a scale belongs to a KV head and never changes, so the codes of a token do not depend
on other tokens. numba (vector/simd) and Triton encode to the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.e4m3 import DTYPE, MOST

PAGE_DTYPE = torch.uint8


class KvScales(NamedTuple):
    """fp32, one for each KV head. Latent attention has one row for both: the same tensor twice."""

    key_N: Tensor
    value_N: Tensor


def encode(x: Tensor, scale: Tensor) -> Tensor:
    """Codes of x / scale, to nearest even. Beyond the range: the largest number. NaN stays NaN."""
    return (x.float() / scale).clamp(-MOST, MOST).to(DTYPE).view(PAGE_DTYPE)


def decode(codes: Tensor) -> Tensor:
    """Exactly what the codes stand for, before the scale."""
    return _numbers(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


@cache
def _numbers(device: torch.device) -> Tensor:
    """By code. On a CPU this is twenty times as fast as torch's conversion."""
    return torch.arange(256, dtype=PAGE_DTYPE).view(DTYPE).float().to(device)
