"""RMS norm and residual add + RMS norm on the GPU; twins of kernels/norm.

One program per row, which it holds in registers from the only read to the only write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.triton_chain import dependent, wait_for_input


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    out_TD = torch.empty(x_TD.shape, dtype=weight_D.dtype, device=x_TD.device)
    _launch(x_TD, x_TD, weight_D, out_TD, eps, has_delta=False)
    return out_TD


def add_rms_norm(residual_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The residual may be wider than the weight, whose type the result has, and keeps its own."""
    out_TD = torch.empty(delta_TD.shape, dtype=weight_D.dtype, device=delta_TD.device)
    _launch(residual_TD, delta_TD, weight_D, out_TD, eps, has_delta=True)
    return out_TD


def _launch(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, out_TD: Tensor, eps: float, *, has_delta: bool
) -> None:
    rows, width = x_TD.shape
    block = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](
        *(x_TD, delta_TD, weight_D, out_TD),
        *(x_TD.stride(0), delta_TD.stride(0), eps),
        WIDTH=width,
        BLOCK=block,
        HAS_DELTA=has_delta,
        num_warps=min(max(block // 256, 1), 16),
        **dependent(),
    )


@triton.jit
def _norm_kernel(  # noqa: PLR0913
    x_TD,
    delta_TD,
    weight_D,
    out_TD,
    x_stride,
    delta_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    # The weight does not wait for the row.
    weight = tl.load(weight_D + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_input(IS_DEPENDENT)
    x_at = x_TD + row * x_stride + column
    x = tl.load(x_at, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_TD + row * delta_stride + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(x_at, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    out = (x * scale * weight).to(out_TD.dtype.element_ty)
    tl.store(out_TD + row * WIDTH + column, out, mask=inside)
