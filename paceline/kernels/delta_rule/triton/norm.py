"""The norm behind the gated delta rule, with its gate, on the GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.triton import dependent, wait_for_input

_NUMBERS = 1024  # of a program


def gated_norm(
    out_TV: Tensor, gate_TV: Tensor, norm_V: Tensor, eps: float, is_sigmoid: bool
) -> Tensor:
    rows, width = out_TV.shape
    size = len(norm_V)
    padded, num_heads = triton.next_power_of_2(size), width // size
    heads = min(max(_NUMBERS // padded, 1), triton.next_power_of_2(num_heads))
    normed_TV = gate_TV.new_empty(rows, width)
    _gated_norm_kernel[(rows, triton.cdiv(num_heads, heads))](
        *(out_TV, gate_TV, norm_V, normed_TV, out_TV.stride(0), gate_TV.stride(0), eps),
        NUM_HEADS=num_heads,
        SIZE=size,
        HEADS=heads,
        PADDED=padded,
        IS_SIGMOID=is_sigmoid,
        num_warps=4,
        **dependent(),
    )
    return normed_TV


@triton.jit
def _gated_norm_kernel(  # noqa: PLR0913
    out_TV,
    gate_TV,
    norm_V,
    normed_TV,
    out_stride,
    gate_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    index = tl.arange(0, PADDED)[None, :]
    inside = (head < NUM_HEADS) & (index < SIZE)
    column = head * SIZE + index
    # The weight does not wait for the row.
    weight = tl.load(norm_V + index, mask=index < SIZE, other=0.0).to(tl.float32)
    wait_for_input(IS_DEPENDENT)
    x = tl.load(out_TV + row * out_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_TV + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-gate))
    if not IS_SIGMOID:
        factor *= gate
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None]
    normed = (x * scale * weight * factor).to(normed_TV.dtype.element_ty)
    tl.store(normed_TV + row * (NUM_HEADS * SIZE) + column, normed, mask=inside)
