"""The gate-up product of many rows with its activation: sums never leave the multiprocessor.

Taken where that pays: cuBLAS multiplies as fast, but then 57 KB a row of an 8B model are written,
and read again by the activation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.kernels.gpu.device import is_hopper, num_multiprocessors
from paceline.kernels.linear.reference import Product

# Rows of a tile, and its outputs (gate and up). It takes nearly all shared memory.
ROWS, OUTPUTS, INPUTS = 128, 128, 64
# Row tiles that stay in the L2 while the weights pass by.
GROUP = 16
# With fewer rows, or fewer tiles for a multiprocessor, cuBLAS finds better ones.
FEWEST_ROWS, FEWEST_TILES = 1024, 2.5

_IS_FAST = tl.constexpr(not triton.knobs.runtime.interpret)
# silu(gate) * up by the approximations of exp2 and 1 / x: within a bit of a float32.
_SILU_AND_MUL = tl.constexpr(
    "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
    " rcp.approx.ftz.f32 t, t; mul.f32 t, t, $1; mul.f32 $0, t, $2; }"
)


def is_faster(x_TK: Tensor, product: Product) -> bool:
    (num_rows, num_inputs), num_sums = x_TK.shape, len(product.weight_NK)
    num_tiles = triton.cdiv(num_rows, ROWS) * (num_sums // (2 * OUTPUTS))
    return (
        num_rows >= FEWEST_ROWS
        and num_tiles >= FEWEST_TILES * num_multiprocessors(x_TK.device)
        and num_inputs % INPUTS == 0
        and num_sums % (2 * OUTPUTS) == 0
        and product.bias_N is None
        and x_TK.dtype == product.weight_NK.dtype
        and x_TK.dtype in (torch.bfloat16, torch.float16)
        and is_hopper(x_TK.device)
    )


def linear_silu(x_TK: Tensor, product: Product) -> Tensor:
    """16-bit types, no bias; whole tiles of outputs and of inputs."""
    num_rows, num_inputs = x_TK.shape
    width = len(product.weight_NK) // 2
    out_TI = x_TK.new_empty(num_rows, width)
    tiles_t, tiles_i = triton.cdiv(num_rows, ROWS), width // OUTPUTS
    gate_and_up = product.weight_NK.view(2, width, num_inputs)
    _gated_kernel[(min(num_multiprocessors(x_TK.device), tiles_t * tiles_i),)](
        TensorDescriptor.from_tensor(x_TK, [ROWS, INPUTS]),
        TensorDescriptor.from_tensor(gate_and_up, [2, OUTPUTS, INPUTS]),
        TensorDescriptor.from_tensor(out_TI, [ROWS, OUTPUTS]),
        *(tiles_t, tiles_i),
        K=num_inputs,
        BLOCK_T=ROWS,
        BLOCK_I=OUTPUTS,
        BLOCK_K=INPUTS,
        TOGETHER=GROUP,
        num_warps=8,
        num_stages=4,
    )
    return out_TI


@triton.jit(do_not_specialize=["tiles_t", "tiles_i"])
def _gated_kernel(  # noqa: PLR0913
    x_TK,
    weight_2IK,
    out_TI,
    tiles_t,
    tiles_i,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Programs share the tiles. Flattened, so that the next tile is fetched while one is stored."""
    for tile in tl.range(tl.program_id(0), tiles_t * tiles_i, tl.num_programs(0), flatten=True):
        first = tile // (TOGETHER * tiles_i) * TOGETHER
        size = tl.minimum(tiles_t - first, TOGETHER)
        rest = tile % (TOGETHER * tiles_i)
        row, column = (first + rest % size) * BLOCK_T, rest // size * BLOCK_I
        sums = tl.zeros([BLOCK_T, 2 * BLOCK_I], tl.float32)
        for k in range(0, K, BLOCK_K):
            x = x_TK.load([row, k])
            # Gates in front of ups: a thread that has a gate's sum has its up's.
            weight = weight_2IK.load([0, column, k]).reshape(2 * BLOCK_I, BLOCK_K)
            sums = tl.dot(x, weight.T, sums)
        gate, up = sums.reshape(BLOCK_T, 2, BLOCK_I).permute(0, 2, 1).split()
        out_TI.store([row, column], _silu_and_mul(gate, up, out_TI.dtype))


@triton.jit
def _silu_and_mul(gate, up, dtype: tl.constexpr):
    """Both are rounded first, as a separate product would store them."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if _IS_FAST:
        out = tl.inline_asm_elementwise(
            _SILU_AND_MUL, "=f,f,f", [gate, up], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        out = gate / (1.0 + tl.exp(-gate)) * up
    return out.to(dtype)
