"""The products of chosen experts on the GPU; twin of kernels/experts.

Two products by expert over the rows that chose it, then a sum by row; no float atomics. Few rows:
one program per expert and block of outputs finds its rows by itself. Many: they are counted and
laid out in blocks by expert first, on the device. An entry is one choice of one row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.experts import ExpertWeights
from paceline.kernels.triton_chain import dependent, wait_for_input

FEW_ROWS = 64  # up to here every program looks through all entries
SCANNED = 64  # entries that it looks at at once
COUNTED = 1024  # the same, where entries are laid out


class ExpertTiles(NamedTuple):
    """How a product is cut: by type and by few or many rows, never by the batch."""

    rows: int
    gate_up: int  # inner values of a program; it reads the rows of gate and of up
    down: int  # outputs of a program
    inputs: int  # at once
    num_warps: int
    num_stages: int


def expert_tiles(dtype: torch.dtype, *, is_few: bool) -> ExpertTiles:
    if dtype == torch.float32:  # no tensor cores: small tiles, for tests and tiny models
        return ExpertTiles(16 if is_few else 32, 32, 32, 32, 4, num_stages=2)
    if is_few:
        return ExpertTiles(16, 32, 32, 128, 4, num_stages=4)
    return ExpertTiles(64, 64, 128, 64, 4, num_stages=3)


def apply_experts(
    x_TD: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    experts: ExpertWeights,
    shared_TD: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    gate_up_EIH, down_EHI = experts
    num_experts, width, inner = down_EHI.shape
    x_TD = x_TD.to(down_EHI.dtype)
    num_rows, num_chosen = chosen_TK.shape
    rows: Tensor | Blocks = chosen_TK
    if num_rows > FEW_ROWS:
        tiles = expert_tiles(x_TD.dtype, is_few=False)
        rows = lay_out(chosen_TK, num_experts, tiles.rows)
    inner_PI = x_TD.new_empty(chosen_TK.numel(), inner)
    share_PD = x_TD.new_empty((chosen_TK.numel(), width), dtype=torch.float32)
    _multiply_rows(x_TD, rows, None, gate_up_EIH, inner_PI, num_chosen)
    _multiply_rows(inner_PI, rows, weight_TK, down_EHI, share_PD, 1)
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


class Blocks(NamedTuple):
    """Entries by expert, each expert's in blocks of its own; -1 fills the last one."""

    entry: Tensor  # int32 [blocks * rows]
    expert: Tensor  # int32 [blocks]
    num_used: Tensor  # int32 [1]: blocks of this step


def lay_out(chosen_TK: Tensor, num_experts: int, rows: int) -> Blocks:
    """Shapes come from the shapes alone."""
    num_entries = chosen_TK.numel()
    most = num_entries // rows + min(num_experts, num_entries)

    def integers(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=chosen_TK.device)

    blocks = Blocks(integers(most * rows), integers(most), integers(1))
    counts = integers(num_experts)
    _count_kernel[(num_experts,)](
        chosen_TK, counts, num_entries, CHUNK=COUNTED, num_warps=4, **dependent()
    )
    _place_kernel[(num_experts,)](
        *(chosen_TK, counts, *blocks, num_entries, num_experts),
        EXPERTS=triton.next_power_of_2(num_experts),
        ROWS=rows,
        CHUNK=COUNTED,
        num_warps=4,
        **dependent(),
    )
    return blocks


def _multiply_rows(
    x_PK: Tensor,
    rows: Tensor | Blocks,
    weight_TK: Tensor | None,
    matrix_ENK: Tensor,
    out_PN: Tensor,
    share: int,
) -> None:
    """`rows` are the choices of few rows, or those of many, laid out. Without weights: gated."""
    tiles = expert_tiles(x_PK.dtype, is_few=isinstance(rows, Tensor))
    num_outputs = out_PN.shape[1]
    block = tiles.gate_up if weight_TK is None else tiles.down
    tensors = (x_PK if weight_TK is None else weight_TK, matrix_ENK, out_PN)
    shape = {"OUTPUTS": num_outputs, "INPUTS": x_PK.shape[1], "SHARE": share}
    cut = {"ROWS": tiles.rows, "BLOCK_N": block, "BLOCK_K": tiles.inputs}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, **dependent()}
    num_blocks = triton.cdiv(num_outputs, block)
    if isinstance(rows, Tensor):
        _few_kernel[(len(matrix_ENK), num_blocks)](
            *(x_PK, rows, *tensors, rows.numel(), x_PK.stride(0)),
            **shape,
            HAS_GATE=weight_TK is None,
            **cut,
            CHUNK=SCANNED,
            **options,
        )
    else:
        _many_kernel[(num_blocks, len(rows.expert))](
            *(x_PK, *rows, *tensors, x_PK.stride(0)),
            **shape,
            HAS_GATE=weight_TK is None,
            **cut,
            **options,
        )


@triton.jit(do_not_specialize=["num_entries"])
def _few_kernel(  # noqa: PLR0913
    x_PK,
    chosen_P,
    weight_P,
    matrix_ENK,
    out_PN,
    num_entries,
    x_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SHARE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_input(IS_DEPENDENT)
    expert = tl.program_id(0)
    # Most programs belong to experts that nobody chose: they end here.
    for first in range(0, _count_of(expert, chosen_P, num_entries, CHUNK), ROWS):
        _multiply(
            x_PK,
            _entries_of(expert, chosen_P, num_entries, first, ROWS, CHUNK),
            weight_P,
            matrix_ENK,
            out_PN,
            expert,
            tl.program_id(1),
            x_stride,
            OUTPUTS,
            INPUTS,
            SHARE,
            HAS_GATE,
            ROWS,
            BLOCK_N,
            BLOCK_K,
        )


@triton.jit
def _entries_of(expert, chosen_P, num_entries, first, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Entries number first … first + ROWS - 1 of an expert; -1 where it has no more."""
    wanted = first + tl.arange(0, ROWS)
    found = tl.full((ROWS,), -1, dtype=tl.int32)
    count = 0
    for start in range(0, num_entries, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        chosen = tl.load(chosen_P + entry, mask=entry < num_entries, other=-1)
        is_its = (chosen == expert).to(tl.int32)
        number = count + tl.cumsum(is_its, 0) - 1
        is_found = (is_its > 0)[None, :] & (number[None, :] == wanted[:, None])
        found = tl.maximum(found, tl.max(tl.where(is_found, entry[None, :], -1), 1))
        count += tl.sum(is_its, 0)
    return found


@triton.jit
def _many_kernel(  # noqa: PLR0913
    x_PK,
    block_entry,
    block_expert,
    block_count,
    weight_P,
    matrix_ENK,
    out_PN,
    x_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SHARE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_input(IS_DEPENDENT)
    block = tl.program_id(1)
    if block >= tl.load(block_count):
        return
    _multiply(
        x_PK,
        tl.load(block_entry + block * ROWS + tl.arange(0, ROWS)),
        weight_P,
        matrix_ENK,
        out_PN,
        tl.load(block_expert + block),
        tl.program_id(0),
        x_stride,
        OUTPUTS,
        INPUTS,
        SHARE,
        HAS_GATE,
        ROWS,
        BLOCK_N,
        BLOCK_K,
    )


@triton.jit
def _multiply(  # noqa: PLR0913
    x_PK,
    entry,
    weight_P,
    matrix_ENK,
    out_PN,
    expert,
    column_block,
    x_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SHARE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Some outputs of the entries' rows: gated, or times the entries' weights.

    SHARE entries lie behind each other for every row of x.
    """
    is_row = entry >= 0
    row = tl.maximum(entry, 0).to(tl.int64)
    column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < OUTPUTS
    x_at = x_PK + row // SHARE * x_stride
    num_matrix_rows: tl.constexpr = 2 * OUTPUTS if HAS_GATE else OUTPUTS
    first_at = matrix_ENK + expert.to(tl.int64) * num_matrix_rows * INPUTS + column * INPUTS
    total = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for first in range(0, INPUTS, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        is_input = at < INPUTS
        x_mask = is_row[:, None] & is_input[None, :]
        x = tl.load(x_at[:, None] + at[None, :], mask=x_mask, other=0.0)
        mask = is_column[:, None] & is_input[None, :]
        matrix_at = first_at[:, None] + at[None, :]
        matrix = tl.load(matrix_at, mask=mask, other=0.0)
        total = tl.dot(x, tl.trans(matrix), total, input_precision="ieee")
        if HAS_GATE:
            matrix = tl.load(matrix_at + OUTPUTS * INPUTS, mask=mask, other=0.0)
            up = tl.dot(x, tl.trans(matrix), up, input_precision="ieee")
    if HAS_GATE:
        total = total / (1.0 + tl.exp(-total)) * up
    else:
        total *= tl.load(weight_P + row, mask=is_row, other=0.0)[:, None]
    out_at = out_PN + row[:, None] * OUTPUTS + column[None, :]
    tl.store(out_at, total.to(out_PN.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_entries"])
def _count_kernel(chosen_P, count_E, num_entries, CHUNK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    wait_for_input(IS_DEPENDENT)
    expert = tl.program_id(0)
    tl.store(count_E + expert, _count_of(expert, chosen_P, num_entries, CHUNK))


@triton.jit
def _count_of(expert, chosen_P, num_entries, CHUNK: tl.constexpr):
    """How many entries an expert has."""
    count = tl.zeros((CHUNK,), dtype=tl.int32)
    for start in range(0, num_entries, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        chosen = tl.load(chosen_P + entry, mask=entry < num_entries, other=-1)
        count += (chosen == expert).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit(do_not_specialize=["num_entries"])
def _place_kernel(  # noqa: PLR0913
    chosen_P,
    count_E,
    block_entry,
    block_expert,
    block_count,
    num_entries,
    num_experts,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program per expert: its blocks come after those of the experts before it."""
    wait_for_input(IS_DEPENDENT)
    expert = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    count = tl.load(count_E + index, mask=index < num_experts, other=0)
    blocks = (count + ROWS - 1) // ROWS
    first_block = tl.sum(tl.where(index < expert, blocks, 0), 0)
    num_blocks = tl.sum(tl.where(index == expert, blocks, 0), 0)
    if expert == 0:
        tl.store(block_count, tl.sum(blocks, 0))
    for start in range(0, num_blocks, ROWS):
        block = start + tl.arange(0, ROWS)
        tl.store(block_expert + first_block + block, expert, mask=block < num_blocks)
    out = block_entry + first_block * ROWS
    number = 0
    for start in range(0, num_entries, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        chosen = tl.load(chosen_P + entry, mask=entry < num_entries, other=-1)
        is_its = (chosen == expert).to(tl.int32)
        tl.store(out + number + tl.cumsum(is_its, 0) - 1, entry, mask=is_its > 0)
        number += tl.sum(is_its, 0)
    rest = number + tl.arange(0, ROWS)
    tl.store(out + rest, -1, mask=rest < num_blocks * ROWS)


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
        # Nobody (-1) wrote nothing: what lies there is not a number of this step.
        is_there = inside & (tl.load(chosen_P + entry) >= 0)
        total += tl.load(share_PD + entry * WIDTH + column, mask=is_there, other=0.0)
    if HAS_SHARED:
        at = shared_TD + row * shared_stride + column
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_TD + row * WIDTH + column, total.to(out_TD.dtype.element_ty), mask=inside)
