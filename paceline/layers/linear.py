"""Linear layers: plain, CUDA, panels for vector kernels, FBGEMM's packed fp16. Chosen at load.

On the CPU activations and sums are fp32; only weights are narrower.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from paceline.kernels import table
from paceline.kernels.linear.reference import Product
from paceline.kernels.linear.tiles import pick_tile
from paceline.kernels.panels.reference import BLOCK_BYTES, PanelWeight, pack_blocks, pack_dense
from paceline.kernels.table import has_numba
from paceline.parallel.collectives import Group

logger = logging.getLogger(__name__)

FP16_MAX = 65504.0
# The inputs of a panel come in multiples of this.
PANEL_INPUTS = 4


class Linear(Protocol):
    """y = x W^T + b over the last axis."""

    def __call__(self, x_TD: Tensor) -> Tensor: ...

    @property
    def nbytes(self) -> int: ...


LinearFormat = Callable[[Tensor, Tensor | None], Linear]
# Arguments: type of the GGUF blocks, rows of blocks, bias. None: dequantise them instead.
BlockFormat = Callable[[str, Tensor, Tensor | None], Linear | None]


class DenseLinear:
    """Weights as stored: the exact path."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.contiguous()
        self.bias = bias

    def __call__(self, x_TD: Tensor) -> Tensor:
        return linear(x_TD, self.weight, self.bias)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class CudaLinear:
    """Weights on a GPU: few rows are multiplied by our kernels, many by cuBLAS."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.contiguous()
        self.bias = bias
        self.out_dtype: torch.dtype | None = None  # None: the weight's
        self.product = Product(self.weight, bias)
        self._few_rows = pick_few_rows(weight.device)

    def __call__(self, x_TD: Tensor) -> Tensor:
        weight = self.weight
        shape = (*weight.shape, x_TD.shape[0])
        if pick_tile("plain", *shape, weight.dtype, weight.device) is None:
            return self.multiply(x_TD)
        return self._few_rows(x_TD.to(weight.dtype), self.product, self.out_dtype)

    def multiply(self, x_TD: Tensor) -> Tensor:
        """torch's product, even if the table prefers our kernel."""
        x_TD = x_TD.to(self.weight.dtype)
        out_dtype = self.out_dtype
        if out_dtype is None or out_dtype == self.weight.dtype:
            return linear(x_TD, self.weight, self.bias)
        if x_TD.is_cuda and self.bias is None:
            return torch.mm(x_TD, self.weight.t(), out_dtype=out_dtype)
        return linear(x_TD, self.weight, self.bias).to(out_dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class PanelLinear:
    """Weights in panels, as narrow as in the checkpoint: few bytes to read, cheap extra rows."""

    def __init__(self, weight: PanelWeight) -> None:
        self.weight = weight
        self._matmul = table.matmul.on(torch.device("cpu"))

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self._matmul(x_TD, self.weight)

    @property
    def nbytes(self) -> int:
        return self.weight.data.nbytes


class PackedFp16Linear:
    """FBGEMM's packed fp16 weights: half the bytes of fp32, cheap extra rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed: Any = _prepack(weight.float(), None if bias is None else bias.float())
        self._nbytes = weight.numel() * 2
        self._multiple = row_multiple()

    def __call__(self, x_TD: Tensor) -> Tensor:
        num_rows = x_TD.shape[0]
        extra = -num_rows % self._multiple
        rows = pad(x_TD, (0, 0, 0, extra)) if extra else x_TD
        out_TN: Tensor = _packed_product(rows, self._packed)
        return out_TN[:num_rows] if extra else out_TN

    @property
    def nbytes(self) -> int:
        return self._nbytes


class Reduced:
    """A linear whose inputs are divided over ranks: results are summed over the group."""

    def __init__(self, part: Linear, group: Group) -> None:
        self.part = part
        self._group = group

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self._group.all_reduce(self.part(x_TD))

    @property
    def nbytes(self) -> int:
        return self.part.nbytes


def _prepack(weight: Tensor, bias: Tensor | None) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(weight, bias)


# Resolved once: looking it up in torch.ops costs as much as a small product.
_packed_product: Any = getattr(torch.ops.quantized, "linear_dynamic_fp16", None)


def dense(
    dtype: torch.dtype, device: torch.device, kind: LinearFormat = DenseLinear
) -> LinearFormat:
    """Weights converted to a type and moved to a device."""

    def make(weight: Tensor, bias: Tensor | None) -> Linear:
        moved = None if bias is None else bias.to(device, dtype)
        return kind(weight.to(device, dtype), moved)

    return make


def cuda_linear(dtype: torch.dtype, device: torch.device) -> LinearFormat:
    return dense(dtype, device, CudaLinear)


def for_logits(head: Linear) -> Linear:
    """The same linear with fp32 results: logits rounded to bf16 have many ties."""
    if isinstance(head, CudaLinear):
        head.out_dtype = torch.float32
    return head


def pick_few_rows(
    device: torch.device,
) -> Callable[[Tensor, Product, torch.dtype | None], Tensor]:
    """The product of few rows on this device."""
    if device.type == "cuda":
        from paceline.kernels.linear.triton.products import tickets

        tickets(device)  # before any graph is captured
    return table.linear.on(device)


def panels(weight: Tensor, bias: Tensor | None) -> Linear:
    """fp16, bf16 and fp32 weights in their own type."""
    if weight.shape[1] % PANEL_INPUTS:
        return DenseLinear(weight.float(), None if bias is None else bias.float())
    return PanelLinear(pack_dense(weight, bias))


def narrow_panels(weight: Tensor, bias: Tensor | None) -> Linear:
    """Half precision: bf16 stays as it is; fp32 (dequantised) is rounded to fp16 if it fits."""
    fits = weight.dtype == torch.bfloat16 or _fits_fp16(weight)
    is_wide = weight.dtype not in (torch.bfloat16, torch.float16)
    return panels(weight.half() if fits and is_wide else weight, bias)


def block_panels(kind: str, rows: Tensor, bias: Tensor | None) -> Linear | None:
    """Quantised blocks as stored in the GGUF, if there are panels of that type."""
    return PanelLinear(pack_blocks(kind, rows, bias)) if kind in BLOCK_BYTES else None


def packed_fp16(weight: Tensor, bias: Tensor | None) -> Linear:
    """Packed fp16, or fp32 for the rare matrix with values beyond the range of fp16."""
    if not _fits_fp16(weight):
        return DenseLinear(weight.float(), None if bias is None else bias.float())
    return PackedFp16Linear(weight, bias)


def _fits_fp16(weight: Tensor) -> bool:
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if largest <= FP16_MAX:
        return True
    logger.warning(
        "a %s weight reaches %.3g, beyond fp16's %.0f; this layer runs in fp32",
        tuple(weight.shape),
        largest,
        FP16_MAX,
    )
    return False


def exact_linear(device: torch.device) -> LinearFormat:
    """fp32 weights for fp32 results."""
    return panels_fp32 if has_numba(device) else dense(torch.float32, device)


def panels_fp32(weight: Tensor, bias: Tensor | None) -> Linear:
    return panels(weight.float(), bias)


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
    """Row counts are padded to a multiple of this, so that a row's bits do not depend on the
    number of rows: 1 or 3.

    On AVX2 a remainder of one or two rows runs another kernel with other rounding; on AVX-512 all
    counts give the same bits. This is measured, not looked up.
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
