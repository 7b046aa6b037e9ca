"""Choices of many rows in blocks by expert, laid out on the device for `products`.

An entry is one choice of one row. Multiplies nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.triton import dependent, wait_for_input

COUNTED = 1024  # entries that a program looks at at once


class Blocks(NamedTuple):
    """Entries by expert, each expert's in separate blocks; -1 fills the last one."""

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


@triton.jit(do_not_specialize=["num_entries"])
def _count_kernel(chosen_P, count_E, num_entries, CHUNK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    wait_for_input(IS_DEPENDENT)
    expert = tl.program_id(0)
    count = tl.zeros((CHUNK,), dtype=tl.int32)
    for start in range(0, num_entries, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        chosen = tl.load(chosen_P + entry, mask=entry < num_entries, other=-1)
        count += (chosen == expert).to(tl.int32)
    tl.store(count_E + expert, tl.sum(count, 0))


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
