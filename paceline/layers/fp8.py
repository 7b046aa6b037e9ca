"""Linear layers with e4m3 weights. Rows are rounded to e4m3 when they arrive (kernels/fp8)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.kernels import table
from paceline.kernels.fp8.reference import Fp8Weight, dequantised
from paceline.kernels.table import has_numba
from paceline.layers.linear import (
    DenseLinear,
    Linear,
    LinearFormat,
    packed_fp16,
    packed_fp16_works,
    panels,
)

# Arguments: the weight and the bias.
Fp8Format = Callable[[Fp8Weight, Tensor | None], Linear]


class Fp8Linear:
    """Codes and scales as they are, on a GPU; in tests also on the CPU."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, out_dtype: torch.dtype) -> None:
        self.weight = weight
        self.bias = bias
        self.out_dtype = out_dtype
        self._quantise = table.quantise_rows.on(weight.codes_NK.device)
        self._multiply = table.fp8_linear.on(weight.codes_NK.device)

    def __call__(self, x_TD: Tensor) -> Tensor:
        rows = self._quantise(x_TD, self.weight.is_blocked)
        return self._multiply(rows, self.weight, self.bias, self.out_dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class RoundedLinear:
    """On the CPU: rows are rounded, and the product is that of a wider type.

    Half precision holds every code. With `scale_N`, `inner` holds codes, and results are scaled;
    without, it holds the dequantised numbers of blocks.
    """

    def __init__(
        self, inner: Linear, scale_N: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        self._inner = inner
        self._scale_N = scale_N
        self._bias = bias
        device = torch.device("cpu")
        self._round, self._scale = table.round_rows.on(device), table.scale_outputs.on(device)

    def __call__(self, x_TD: Tensor) -> Tensor:
        out_TN = self._inner(self._round(x_TD, self._scale_N is None))
        return out_TN if self._scale_N is None else self._scale(out_TN, self._scale_N, self._bias)

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes + (0 if self._scale_N is None else self._scale_N.nbytes)


class JoinedLinear:
    """Products of the same rows, side by side: projections whose weights are of several kinds."""

    def __init__(self, parts: list[Linear]) -> None:
        self.parts = parts

    def __call__(self, x_TD: Tensor) -> Tensor:
        return torch.cat([part(x_TD) for part in self.parts], dim=1)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.parts)


def fp8_linear(dtype: torch.dtype, device: torch.device) -> Fp8Format:
    """`dtype`: of results."""

    def make(weight: Fp8Weight, bias: Tensor | None) -> Linear:
        codes, scale, is_blocked = weight
        moved = Fp8Weight(codes.to(device).contiguous(), scale.to(device).contiguous(), is_blocked)
        return Fp8Linear(moved, None if bias is None else bias.to(device, dtype), dtype)

    return make


def rounded_linear(linear: LinearFormat) -> Fp8Format:
    """`linear`: the format of dequantised blocks."""

    def make(weight: Fp8Weight, bias: Tensor | None) -> Linear:
        if weight.is_blocked:
            return RoundedLinear(linear(dequantised(weight), bias))
        bias = None if bias is None else bias.float().contiguous()
        return RoundedLinear(_of_codes(weight.codes_NK), weight.scale.flatten(), bias)

    return make


def _of_codes(codes_NK: Tensor) -> Linear:
    if has_numba(codes_NK.device):
        return panels(codes_NK.bfloat16(), None)
    if packed_fp16_works():
        return packed_fp16(codes_NK.half(), None)
    return DenseLinear(codes_NK.float(), None)
