"""Linear layers: the exact one, and packed fp16 weights for x86 CPUs. The format is picked once.

The packed product keeps fp32 activations and accumulates in fp32; only weights are half precision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

logger = logging.getLogger(__name__)

FP16_MAX = 65504.0


class Linear(Protocol):
    """y = x W^T + b over the last axis."""

    def __call__(self, x_TD: Tensor) -> Tensor: ...

    @property
    def nbytes(self) -> int: ...


LinearFormat = Callable[[Tensor, Tensor | None], Linear]


class DenseLinear:
    """Weights as they are: the exact path."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.contiguous()
        self.bias = bias

    def __call__(self, x_TD: Tensor) -> Tensor:
        return linear(x_TD, self.weight, self.bias)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class PackedFp16Linear:
    """FBGEMM's packed fp16 weights: half the bytes of fp32, and more rows cost little."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed: Any = _prepack(weight.float(), None if bias is None else bias.float())
        self._nbytes = weight.numel() * 2
        self._multiple = row_multiple()

    def __call__(self, x_TD: Tensor) -> Tensor:
        num_rows = x_TD.shape[0]
        extra = -num_rows % self._multiple
        if not extra:
            return _packed_product(x_TD, self._packed)
        return _packed_product(pad(x_TD, (0, 0, 0, extra)), self._packed)[:num_rows]

    @property
    def nbytes(self) -> int:
        return self._nbytes


def _prepack(weight: Tensor, bias: Tensor | None) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(weight, bias)


# Resolved once: an attribute walk through torch.ops costs as much as a small product.
_packed_product: Any = getattr(torch.ops.quantized, "linear_dynamic_fp16", None)


def dense(dtype: torch.dtype, device: torch.device) -> LinearFormat:
    def make(weight: Tensor, bias: Tensor | None) -> Linear:
        moved = None if bias is None else bias.to(device, dtype)
        return DenseLinear(weight.to(device, dtype), moved)

    return make


def packed_fp16(weight: Tensor, bias: Tensor | None) -> Linear:
    """Packed where fp16 can hold the weights; fp32 for the rare matrix beyond its range."""
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if not largest <= FP16_MAX:
        logger.warning(
            "a %s weight reaches %.3g, beyond fp16's %.0f; this layer runs in fp32",
            tuple(weight.shape),
            largest,
            FP16_MAX,
        )
        return DenseLinear(weight.float(), None if bias is None else bias.float())
    return PackedFp16Linear(weight, bias)


@cache
def packed_fp16_works() -> bool:
    """True where this torch build and CPU have FBGEMM's fp16 product (x86 with AVX2)."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    try:
        torch.backends.quantized.engine = "fbgemm"
        out = _packed_product(torch.ones(3, 8), _prepack(torch.ones(8, 8), None))
    except (RuntimeError, AttributeError, TypeError):
        return False
    return bool((out == 8).all())


@cache
def row_multiple() -> int:
    """Row counts that give every row the same bits whatever its neighbours: 1, or else 3.

    On AVX2 a tail of one or two rows goes through another kernel with other rounding; on AVX-512
    all counts agree. Asked of the machine rather than of a table.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 160, generator=generator)
    rows = torch.randn(42, 160, generator=generator)
    packed = _prepack(weight, None)
    whole = _packed_product(rows, packed)
    for count in range(1, 43):
        if not torch.equal(_packed_product(rows[:count].contiguous(), packed), whole[:count]):
            return 3
    return 1
