"""Paged attention for rows of many queries: prompts and chunks of them.

A program is one KV head for one tile of a row's queries, times the heads of the group; it walks KV
from position 0 in blocks, so a query's bits depend on its position and its sequence alone. Blocks
of what this step adds are also rows of qkv_TD, whence the copy engine fetches them whole; what came
before is fetched from the pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.kernels.attention.reference import AttentionBatch, AttentionWork
from paceline.kernels.attention.triton.spans import LOG2_E, pages_at, row_offsets
from paceline.kernels.attention.triton.work import TILE_ROWS, PagedHeads
from paceline.kernels.kv_codes.triton import numbers, scaled
from paceline.kernels.linear.tiles import BUCKETS

# Products of so few rows put their keys and values into the pages alone (linear/triton).
MOST_FUSED_ROWS = BUCKETS[-1]


class PrefillTiles(NamedTuple):
    """How the kernel is built: by type and head size, never by the batch."""

    rows: int  # of TILE_ROWS that a program takes
    block: int  # KV positions at once
    num_warps: int
    num_stages: int
    is_copied: bool = False  # the copy engine fetches keys and values where it can


def prefill_tiles(dtype: torch.dtype, padded_size: int) -> PrefillTiles:
    if dtype == torch.float32:  # no tensor cores: small tiles, for tests and tiny models
        is_wide = padded_size > 64
        return PrefillTiles(16 if is_wide else 32, 16 if is_wide else 32, 4, num_stages=2)
    if padded_size > 128:
        return PrefillTiles(rows=64, block=64, num_warps=8, num_stages=2)
    # Small enough that a multiprocessor has several: one weighs while another multiplies.
    return PrefillTiles(rows=64, block=64, num_warps=4, num_stages=3, is_copied=True)


def attend_tiles(
    qkv_TD: Tensor,
    pages: PagedHeads,
    batch: AttentionBatch,
    work: AttentionWork,
    scale: float,
    out_TD: Tensor,
) -> None:
    """Fill the outputs of long rows.

    With more than MOST_FUSED_ROWS entries, those of a row hold their keys and values behind the
    queries, bit for bit what is in the pages unless these are fp8.
    """
    num_kv_heads, _, head_size = pages.key_NSH.shape
    padded_size = max(16, triton.next_power_of_2(head_size))
    tiles = prefill_tiles(qkv_TD.dtype, padded_size)
    num_parts = TILE_ROWS // tiles.rows
    is_fp8 = pages.key_scale_N is not None
    own_blocks = None if is_fp8 else _own_blocks(qkv_TD, head_size, batch, tiles)
    _prefill_kernel[(num_kv_heads * num_parts, len(work.tile_E8))](
        *(qkv_TD, own_blocks, *pages, out_TD),
        *(work.tile_E8, work.count_2, batch.table_SP, scale * LOG2_E),
        *(qkv_TD.stride(0), pages.key_NSH.stride(0), batch.table_SP.stride(0)),
        batch.table_SP.shape[1] * batch.page_size,
        KV_HEADS=num_kv_heads,
        GROUP=batch.group_size,
        HEAD=head_size,
        PADDED=padded_size,
        PAGE=batch.page_size,
        PARTS=num_parts,
        ROWS=tiles.rows,
        BLOCK=tiles.block,
        WINDOW=batch.window or 0,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _own_blocks(
    qkv_TD: Tensor, head_size: int, batch: AttentionBatch, tiles: PrefillTiles
) -> TensorDescriptor | None:
    """A block of keys or values among the step's own entries; None where pages have them alone."""
    is_exact = head_size == max(16, triton.next_power_of_2(head_size))
    if not tiles.is_copied or not is_exact or batch.window or len(qkv_TD) <= MOST_FUSED_ROWS:
        return None
    return TensorDescriptor.from_tensor(qkv_TD, [tiles.block, head_size])


@triton.jit
def _prefill_kernel(  # noqa: PLR0913
    qkv_TD,
    own_blocks,
    key_NSH,
    value_NSH,
    key_scale_N,
    value_scale_N,
    out_TD,
    tile_E8,
    count_2,
    table_SP,
    scale,
    qkv_stride,
    cache_stride,
    table_stride,
    table_length,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    tile_at = tile_E8 + tl.program_id(1) * 8
    if tl.program_id(1) >= tl.load(count_2 + 1):
        return
    head = tl.program_id(0) // PARTS
    first_row = tl.program_id(0) % PARTS * ROWS
    num_queries = tl.load(tile_at + 1)
    if first_row >= num_queries * GROUP:
        return
    entry = tl.load(tile_at).to(tl.int64)
    first_position = tl.load(tile_at + 2)
    table = table_SP + tl.load(tile_at + 3).to(tl.int64) * table_stride
    row = first_row + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    position = first_position + row // GROUP
    inside = (row < num_queries * GROUP)[:, None] & (column < HEAD)[None, :]
    offset = head * GROUP * HEAD + (row % GROUP)[:, None] * HEAD + column[None, :]
    query_at = qkv_TD + (entry + row // GROUP)[:, None] * qkv_stride + offset
    query = tl.load(query_at, mask=inside, other=0.0)
    key = key_NSH + head.to(tl.int64) * cache_stride
    value = value_NSH + head.to(tl.int64) * cache_stride
    scale = scaled(scale, key_scale_N, head)

    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    result = tl.zeros((ROWS, PADDED), dtype=tl.float32)
    last_query = tl.minimum(num_queries - 1, (first_row + ROWS - 1) // GROUP)
    end = tl.minimum(first_position + last_query + 1, table_length)
    first = first_position + first_row // GROUP
    full_end = tl.minimum((first + 1) // BLOCK * BLOCK, end)
    begin, full_begin, last = 0, 0, first_position + last_query
    if WINDOW > 0:
        begin = tl.maximum(first + 1 - WINDOW, 0) // BLOCK * BLOCK
        full_begin = tl.cdiv(tl.maximum(last + 1 - WINDOW, 0), BLOCK) * BLOCK
        full_begin = tl.minimum(full_begin, full_end)
    # What is fetched from the pages ends here, before whole blocks of the step's own entries; all
    # of the diagonal, which is short, if it begins before them.
    full_cut, diagonal_cut = full_end, end
    if own_blocks is not None:
        paged_end = tl.cdiv(tl.load(tile_at + 4), BLOCK) * BLOCK
        full_cut = tl.minimum(full_end, paged_end)
        diagonal_cut = tl.where(full_end < paged_end, end, full_end)
    # Blocks where the window begins, blocks that every query sees whole, those on the diagonal.
    for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
        part_begin = begin if part == 0 else (full_begin if part == 1 else full_end)
        part_end = full_begin if part == 0 else (full_cut if part == 1 else diagonal_cut)
        if part_begin < part_end:  # see _walk
            top, total, result = _walk(
                *(top, total, result, query, key, value, table, position),
                *(part_begin, part_end, scale, part != 1, HEAD, PADDED, PAGE, BLOCK, WINDOW),
            )
    if own_blocks is not None:
        top, total, result = _walk_own(
            *(top, total, result, query, own_blocks, position),
            *(entry.to(tl.int32) - first_position, (KV_HEADS * GROUP + head) * HEAD),
            *(full_cut, full_end, diagonal_cut, end, scale, KV_HEADS * HEAD, BLOCK),
        )
    out_at = out_TD + (entry + row // GROUP)[:, None] * (KV_HEADS * GROUP * HEAD) + offset
    result /= total[:, None]
    result = scaled(result, value_scale_N, head)
    tl.store(out_at, result.to(out_TD.dtype.element_ty), mask=inside)


@triton.jit
def _walk_own(  # noqa: PLR0913
    top,
    total,
    result,
    query,
    own_blocks,
    position,
    shift,
    key_column,
    begin,
    full_end,
    diagonal_begin,
    end,
    scale,
    TO_VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As `_walk`, over blocks of positions whose entries are the positions plus `shift`."""
    for is_masked in tl.static_range(2):
        part_begin = diagonal_begin if is_masked else begin
        part_end = end if is_masked else full_end
        if part_begin < part_end:
            for first in range(part_begin, part_end, BLOCK):
                keys = own_blocks.load([shift + first, key_column])
                score = tl.dot(query, tl.trans(keys), input_precision="ieee")
                at = first + tl.arange(0, BLOCK)
                if is_masked:
                    score = tl.where(at[None, :] <= position[:, None], score, float("-inf"))
                values = own_blocks.load([shift + first, key_column + TO_VALUES])
                if is_masked:  # entries of others, NaN perhaps, which no weight of 0 takes away
                    values = tl.where((at < end)[:, None], values, 0.0)
                top, total, result = _weigh(top, total, result, score, values, scale, False)
    return top, total, result


@triton.jit
def _weigh(top, total, result, score, values, scale, HAS_WINDOW: tl.constexpr):
    """A block into the running softmax."""
    new_top = tl.maximum(top, tl.max(score, 1) * scale)
    shift = new_top
    if HAS_WINDOW:
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet
    weight = tl.exp2(score * scale - shift[:, None])
    keep = tl.exp2(top - shift)
    total = total * keep + tl.sum(weight, 1)
    result *= keep[:, None]
    result = tl.dot(weight.to(values.dtype), values, result, input_precision="ieee")
    return new_top, total, result


@triton.jit
def _walk(  # noqa: PLR0913
    top,
    total,
    result,
    query,
    key,
    value,
    table,
    position,
    begin,
    end,
    scale,
    IS_MASKED: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Blocks of KV into the running softmax. Position 0 is in the first, and every query sees it,
    if there is no window.

    There is one block at least, and callers say so by a branch: on a way around the loop, sums
    would be moved while products are under way, and ptxas then makes every single one be waited
    for.
    """
    column = tl.arange(0, PADDED)
    page = pages_at(table, begin + tl.arange(0, BLOCK), end, PAGE)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        offset = row_offsets(page, at, PAGE, HEAD)[:, None] + column[None, :]
        # One block ahead, so that no load of keys waits for a load of pages.
        page = pages_at(table, at + BLOCK, end, PAGE)
        is_key = at < end
        if WINDOW > 0:
            is_key = is_key & (at > tl.min(position, 0) - WINDOW)
        keys = _load_rows(key + offset, is_key, column < HEAD, IS_MASKED, HEAD, PADDED)
        keys = numbers(keys, query.dtype)
        score = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if IS_MASKED:
            is_seen = at[None, :] <= position[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (at[None, :] > position[:, None] - WINDOW)
            score = tl.where(is_seen, score, float("-inf"))
        values = _load_rows(value + offset, is_key, column < HEAD, IS_MASKED, HEAD, PADDED)
        values = numbers(values, query.dtype)
        top, total, result = _weigh(top, total, result, score, values, scale, WINDOW > 0)
    return top, total, result


@triton.jit
def _load_rows(
    pointers,
    is_row,
    is_column,
    IS_MASKED: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Past the end there may be NaN, which no weight of 0 takes away."""
    if IS_MASKED:
        return tl.load(pointers, mask=is_row[:, None] & is_column[None, :], other=0)
    elif HEAD != PADDED:
        return tl.load(pointers, mask=is_column[None, :], other=0)
    else:
        return tl.load(pointers)
