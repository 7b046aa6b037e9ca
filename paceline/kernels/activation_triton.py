"""Gate activations on the GPU; twins of kernels/activation. Unlike there, the input survives."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.triton_chain import dependent, wait_for_input

BLOCK = 1024


def silu_and_mul(gate_up_TI: Tensor) -> Tensor:
    rows, width = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    out_TI = gate_up_TI.new_empty(rows, width)
    grid = (rows, triton.cdiv(width, BLOCK))
    _silu_and_mul_kernel[grid](
        *(gate_up_TI, out_TI, gate_up_TI.stride(0)),
        WIDTH=width,
        BLOCK=BLOCK,
        num_warps=4,
        **dependent(),
    )
    return out_TI


@triton.jit
def _silu_and_mul_kernel(
    gate_up_TI,
    out_TI,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_input(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate_at = gate_up_TI + row * stride + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_TI + row * WIDTH + column, out.to(out_TI.dtype.element_ty), mask=inside)
