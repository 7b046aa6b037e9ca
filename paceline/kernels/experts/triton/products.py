"""The products of chosen experts on the GPU.

Two products by expert over the rows that chose it, then a sum by row; no float atomics. Weights are
the left operand and rows the right one: a row is a column of the matrix unit, whose sums depend on
nothing but it. Few rows: a tile has room for all of them, and a program finds out by itself which
experts are in use. Many: rows are laid out in blocks by expert first (`layout`). An
entry is one choice of one row, which chooses an expert once at most. For e4m3 weights a row is
rounded once, and what its experts made of it once more before the second product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.experts.reference import ExpertWeights
from paceline.kernels.experts.triton.layout import Blocks, lay_out
from paceline.kernels.fp8.reference import Fp8Rows
from paceline.kernels.fp8.triton.parts import (
    BLOCK,
    BLOCKS,
    CHANNELS,
    add_product,
    group_scales,
    scales_of,
)
from paceline.kernels.fp8.triton.rows import quantise_rows
from paceline.kernels.gpu.device import num_multiprocessors
from paceline.kernels.gpu.triton import dependent, prefetch_to_l2, wait_for_input

FEW_ROWS = 64  # up to here one tile has all rows of a step


class ExpertTile(NamedTuple):
    """How one product is cut. No sum depends on `rows`: more of them are more columns."""

    rows: int
    outputs: int  # rows of weights of a program; of a gated product, gate and up by halves
    inputs: int  # at once
    num_warps: int
    num_stages: int
    per_sm: int = 2  # programs that a multiprocessor has room for
    ahead: int = 0  # inputs of every output that are asked for while the kernel in front still runs


def expert_tile(
    dtype: torch.dtype, num_rows: int, *, is_gated: bool, is_blocked: bool = False
) -> ExpertTile:
    """By the number of rows of a step. Both products of many rows have blocks of as many."""
    is_few = num_rows <= FEW_ROWS
    rows = max(16, triton.next_power_of_2(num_rows)) if is_few else 128
    if dtype == torch.float32:  # no tensor cores: small tiles, for tests and tiny models
        return ExpertTile(min(rows, 64), 32, 32, 4, num_stages=2)
    is_e4m3 = dtype.itemsize == 1
    if is_few:
        ahead, stages = 0 if is_gated else 256, 4 if rows <= 32 else 3
        return ExpertTile(rows, 64, 128, 4, stages + 2 * is_e4m3, ahead=ahead)
    ahead, stages = 0 if is_gated else 512, 4 if is_e4m3 else 6
    rows = 64 if is_blocked else 128  # scaled products of blocks take registers
    return ExpertTile(rows, 128, 128 // dtype.itemsize, 8, stages, per_sm=1, ahead=ahead)


def apply_experts(
    x_TD: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    experts: ExpertWeights,
    shared_TD: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    gate_up_EIH, down_EHI, gate_up_scale, down_scale = experts
    num_experts, width, inner = down_EHI.shape
    x_TD = x_TD.to(down_EHI.dtype if down_scale is None else x_TD.dtype)
    num_rows, num_chosen = chosen_TK.shape
    is_blocked = scales_of(down_scale, width).value == BLOCKS.value
    gated, plain = (
        expert_tile(down_EHI.dtype, num_rows, is_gated=x, is_blocked=is_blocked)
        for x in (True, False)
    )
    rows: Tensor | Blocks = chosen_TK
    if num_rows > FEW_ROWS:
        rows = lay_out(chosen_TK, num_experts, gated.rows)
    inner_PI = x_TD.new_empty(chosen_TK.numel(), inner)
    share_PD = x_TD.new_empty((chosen_TK.numel(), width), dtype=torch.float32)
    how = rows, num_chosen
    x_rows = x_TD if gate_up_scale is None else quantise_rows(x_TD, is_blocked)
    multiply_rows(x_rows, *how, None, gate_up_EIH, inner_PI, gated, gate_up_scale)
    inner_rows = inner_PI if down_scale is None else quantise_rows(inner_PI, is_blocked)
    multiply_rows(inner_rows, *how, weight_TK, down_EHI, share_PD, plain, down_scale)
    out_TD = x_TD.new_empty((num_rows, width), dtype=out_dtype)
    block = min(triton.next_power_of_2(width), 1024)
    _sum_kernel[(num_rows, triton.cdiv(width, block))](
        *(share_PD, chosen_TK, out_TD if shared_TD is None else shared_TD, out_TD),
        0 if shared_TD is None else shared_TD.stride(0),
        WIDTH=width,
        CHOSEN=num_chosen,
        HAS_SHARED=shared_TD is not None,
        BLOCK=block,
        num_warps=4,
        **dependent(),
    )
    return out_TD


def multiply_rows(
    x: Tensor | Fp8Rows,
    rows: Tensor | Blocks,
    num_chosen: int,
    weight_TK: Tensor | None,
    matrix_ENK: Tensor,
    out_PN: Tensor,
    tile: ExpertTile,
    scale: Tensor | None = None,
) -> None:
    """`rows` are the choices of few rows, or those of many, laid out. Without weights: gated.

    The second product is launched right behind the first one (see `_begin`), or behind a kernel
    that has waited for it.
    """
    x_PK, x_scale = (x, None) if isinstance(x, Tensor) else x
    is_gated, num_inputs = weight_TK is None, x_PK.shape[1]
    num_blocks = triton.cdiv(out_PN.shape[1], tile.outputs // (2 if is_gated else 1))
    num_used = min(len(matrix_ENK), rows.numel()) if isinstance(rows, Tensor) else len(rows.expert)
    grid = (min(num_used * num_blocks, tile.per_sm * num_multiprocessors(x_PK.device)),)
    tensors = (x_PK if is_gated else weight_TK, matrix_ENK, out_PN)
    is_aligned = num_inputs * matrix_ENK.itemsize % 16 == 0
    scales = scales_of(scale, matrix_ENK.shape[1])
    assert scales.value != BLOCKS.value or BLOCK.value % tile.inputs == 0
    options = {
        "OUTPUTS": out_PN.shape[1],
        "INPUTS": num_inputs,
        "SHARE": num_chosen if is_gated else 1,
        "HAS_GATE": is_gated,
        "ROWS": tile.rows,
        "BLOCK_M": tile.outputs,
        "BLOCK_K": tile.inputs,
        "AHEAD": tile.ahead if tile.ahead <= num_inputs and is_aligned else 0,
        "SCALES": scales.value,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **dependent(),
    }
    if isinstance(rows, Tensor):
        _few_kernel[grid](
            *(x_PK, rows, *tensors, (x_scale, scale), x_PK.stride(0), len(rows)),
            CHOSEN=num_chosen,
            PADDED_CHOSEN=triton.next_power_of_2(num_chosen),
            WORDS=triton.next_power_of_2(triton.cdiv(len(matrix_ENK), 32)),
            **options,
        )
    else:
        _many_kernel[grid](*(x_PK, *rows, *tensors, (x_scale, scale), x_PK.stride(0)), **options)


@triton.jit(do_not_specialize=["num_rows"])
def _few_kernel(  # noqa: PLR0913
    x_PK,
    chosen_P,
    weight_P,
    matrix_ENK,
    out_PN,
    scales,
    x_stride,
    num_rows,
    CHOSEN: tl.constexpr,
    PADDED_CHOSEN: tl.constexpr,
    WORDS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SHARE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    SCALES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Programs share the output blocks of the experts that at least one token chose."""
    if HAS_GATE:
        wait_for_input(IS_DEPENDENT)
    row, k = tl.arange(0, ROWS), tl.arange(0, PADDED_CHOSEN)
    entry_TK = row[:, None] * CHOSEN + k[None, :]
    is_entry_TK = (row < num_rows)[:, None] & (k < CHOSEN)[None, :]
    chosen_at = chosen_P + entry_TK
    chosen_TK = tl.load(chosen_at, mask=is_entry_TK, other=-1, cache_modifier=".cg")
    is_used_E = _used(tl.reshape(chosen_TK, (ROWS * PADDED_CHOSEN,)), WORDS)
    # Number n of those in use is behind all places where no more than n are reached.
    reached_E = tl.cumsum(is_used_E, 0)
    blocks: tl.constexpr = (OUTPUTS * (HAS_GATE + 1) + BLOCK_M - 1) // BLOCK_M
    num_items = tl.sum(is_used_E, 0) * blocks
    if not HAS_GATE:
        item = tl.program_id(0)
        expert = tl.sum((reached_E <= item // blocks).to(tl.int32), 0)
        _begin(
            matrix_ENK,
            expert,
            item % blocks,
            item < num_items,
            OUTPUTS,
            INPUTS,
            BLOCK_M,
            AHEAD,
            IS_DEPENDENT,
        )
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        expert = tl.sum((reached_E <= item // blocks).to(tl.int32), 0)
        _multiply(
            x_PK,
            tl.max(tl.where(chosen_TK == expert, entry_TK, -1), 1),
            weight_P,
            matrix_ENK,
            out_PN,
            scales,
            expert,
            item % blocks,
            x_stride,
            OUTPUTS,
            INPUTS,
            SHARE,
            HAS_GATE,
            ROWS,
            BLOCK_M,
            BLOCK_K,
            SCALES,
            "evict_first",  # no other program reads these weights in this step
        )


@triton.jit
def _used(chosen_P, WORDS: tl.constexpr):
    """1 for every expert that a token chose, else 0: found as bits of words."""
    word = tl.arange(0, WORDS)[None, :]
    is_here = (chosen_P[:, None] // 32 == word) & (chosen_P >= 0)[:, None]
    bit_PW = tl.where(is_here, 1 << (chosen_P % 32)[:, None], 0)
    word_W = tl.reduce(bit_PW, 0, _or)
    return tl.reshape((word_W[:, None] >> tl.arange(0, 32)[None, :]) & 1, (WORDS * 32,))


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _many_kernel(  # noqa: PLR0913
    x_PK,
    block_entry,
    block_expert,
    block_count,
    weight_P,
    matrix_ENK,
    out_PN,
    scales,
    x_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SHARE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    SCALES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    if HAS_GATE:
        wait_for_input(IS_DEPENDENT)
    blocks: tl.constexpr = (OUTPUTS * (HAS_GATE + 1) + BLOCK_M - 1) // BLOCK_M
    num_items = tl.load(block_count, cache_modifier=".cg") * blocks
    if not HAS_GATE:
        item = tl.program_id(0)
        is_item = item < num_items
        expert_at = block_expert + item // blocks
        _begin(
            matrix_ENK,
            tl.load(expert_at, mask=is_item, other=0, cache_modifier=".cg"),
            item % blocks,
            is_item,
            OUTPUTS,
            INPUTS,
            BLOCK_M,
            AHEAD,
            IS_DEPENDENT,
        )
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        block = item // blocks
        _multiply(
            x_PK,
            tl.load(block_entry + block * ROWS + tl.arange(0, ROWS)),
            weight_P,
            matrix_ENK,
            out_PN,
            scales,
            tl.load(block_expert + block),
            item % blocks,
            x_stride,
            OUTPUTS,
            INPUTS,
            SHARE,
            HAS_GATE,
            ROWS,
            BLOCK_M,
            BLOCK_K,
            SCALES,
            "",
        )


@triton.jit
def _begin(  # noqa: PLR0913
    matrix_ENK,
    expert,
    block,
    is_item,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    AHEAD: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Ask for weights of the second product, and wait for the first one.

    The chosen experts were known before the first one began: it has waited for that, in all its
    programs, before this kernel could be launched. So it may be read before the wait; not from a
    cache of this multiprocessor, though (.cg), which may be older.
    """
    if IS_DEPENDENT and AHEAD > 0 and is_item:
        row = tl.minimum(block * BLOCK_M + tl.arange(0, BLOCK_M), OUTPUTS - 1)
        at = matrix_ENK + expert.to(tl.int64) * OUTPUTS * INPUTS + row * INPUTS
        at = at[:, None] + tl.arange(0, 2)[None, :] * (AHEAD // 2)
        size: tl.constexpr = AHEAD // 2 * matrix_ENK.dtype.element_ty.primitive_bitwidth // 8
        prefetch_to_l2(at, size)
    wait_for_input(IS_DEPENDENT)


@triton.jit
def _multiply(  # noqa: PLR0913
    x_PK,
    entry,
    weight_P,
    matrix_ENK,
    out_PN,
    scales,
    expert,
    block,
    x_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SHARE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALES: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Some outputs of the entries' rows: gated, or times the entries' weights.

    SHARE entries lie behind each other for every row of x. A tile of a gated product has eight rows
    of gate and the eight of up that belong to them in turn: one thread then holds both sums.
    """
    is_row = entry >= 0
    row = tl.maximum(entry, 0).to(tl.int64)
    x_row = row // SHARE
    x_at = x_PK + x_row * x_stride
    is_even: tl.constexpr = INPUTS % BLOCK_K == 0
    num_outputs: tl.constexpr = BLOCK_M // (HAS_GATE + 1)
    m = tl.arange(0, BLOCK_M)
    # Past the last output the last one is computed again, and not stored.
    if HAS_GATE:
        column = tl.minimum(block * num_outputs + m // 16 * 8 + m % 8, OUTPUTS - 1)
        matrix_row = column + m // 8 % 2 * OUTPUTS
    else:
        matrix_row = tl.minimum(block * num_outputs + m, OUTPUTS - 1)
    first_row = expert.to(tl.int64) * (OUTPUTS * (HAS_GATE + 1))
    matrix_at = matrix_ENK + first_row * INPUTS + matrix_row * INPUTS
    total = tl.zeros((BLOCK_M, ROWS), dtype=tl.float32)
    for first in range(0, INPUTS, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)[None, :]
        if is_even:
            matrix = tl.load(matrix_at[:, None] + at, eviction_policy=EVICTION)
            x = tl.load(x_at[:, None] + at, mask=is_row[:, None], other=0.0)
        else:
            matrix = tl.load(matrix_at[:, None] + at, mask=at < INPUTS, other=0.0)
            x_mask = is_row[:, None] & (at < INPUTS)
            x = tl.load(x_at[:, None] + at, mask=x_mask, other=0.0)
        pair = (0.0, 0.0)
        if SCALES == BLOCKS:
            height: tl.constexpr = (OUTPUTS * (HAS_GATE + 1) + BLOCK - 1) // BLOCK
            matrix_block = expert * height + matrix_row // BLOCK
            pair = (
                group_scales(scales[1], matrix_block, m >= 0, first, INPUTS),
                group_scales(scales[0], x_row, is_row, first, INPUTS),
            )
        total = add_product(matrix, tl.trans(x), total, pair, SCALES, BLOCK_K)
    if SCALES == CHANNELS:
        total *= tl.load(scales[0] + x_row, mask=is_row, other=0.0)[None, :]
        total *= tl.load(scales[1] + first_row + matrix_row)[:, None]
    if HAS_GATE:
        pairs = tl.reshape(total, (BLOCK_M // 16, 2, 8, ROWS))
        gate, up = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
        total = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, (num_outputs, ROWS))
    else:
        total *= tl.load(weight_P + row, mask=is_row, other=0.0)[None, :]
    output = block * num_outputs + tl.arange(0, num_outputs)
    out_at = out_PN + row[None, :] * OUTPUTS + output[:, None]
    is_output = is_row[None, :] & (output < OUTPUTS)[:, None]
    tl.store(out_at, total.to(out_PN.dtype.element_ty), mask=is_output)


@triton.jit
def _sum_kernel(  # noqa: PLR0913
    share_PD,
    chosen_P,
    shared_TD,
    out_TD,
    shared_stride,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_input(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(CHOSEN):
        entry = row * CHOSEN + k
        # An entry without an expert (-1) wrote nothing: its memory is stale.
        is_there = inside & (tl.load(chosen_P + entry) >= 0)
        total += tl.load(share_PD + entry * WIDTH + column, mask=is_there, other=0.0)
    if HAS_SHARED:
        at = shared_TD + row * shared_stride + column
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_TD + row * WIDTH + column, total.to(out_TD.dtype.element_ty), mask=inside)
