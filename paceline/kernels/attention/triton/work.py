"""Cuts a pass's attention into work items, on the device, for all layers at once.

Rows of few queries become spans of KV, rows of many become query tiles. Only lengths are read here,
never keys or values. How finely rows are cut depends on how much there is to do; their results do
not (`spans`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.attention.reference import AttentionBatch, AttentionWork
from paceline.kernels.gpu.device import num_multiprocessors

BLOCK = 64  # KV positions that are weighed at once: the smallest span
STRETCH = 256  # positions whose blocks are merged before they meet others
# Stretches are merged within reaches before they meet others. A reach of a very long row is longer,
# so that its reaches run all at once.
REACH = 1024
PROGRAMS_PER_SM = 3
SHORT = 16  # rows of at most this many queries are cut along KV
TILE_ROWS = 128  # queries times group of a tile, where rows are cut along queries
# While there is little to do (items, counting heads, if rows were cut so): rows of few blocks are
# cut into blocks, others into stretches. Else rows of few stretches are one span, and others are
# cut into reaches.
LITTLE = 512
MOST_BLOCKS = 8
MOST_UNCUT_STRETCHES = 4
# How a row was cut: word 2 of `merge_T4`. Stretches also have the number of stretches between the
# beginning of a reach and the row's first one, times 4.
REACHES, BLOCKS, STRETCHES = 0, 1, 2
# Spans whose results wait for others. A row that finds no room is one span: by then there is work
# for every multiprocessor.
MOST_PARTIALS = 1024
ENTRIES_AT_ONCE = 128
BEFORE = tl.constexpr(64)  # see _write_spans; more than SHORT


class PagedHeads(NamedTuple):
    """Pages of one layer, and the scales of fp8 ones."""

    key_NSH: Tensor
    value_NSH: Tensor
    key_scale_N: Tensor | None
    value_scale_N: Tensor | None


def span_rows(group_size: int) -> int:
    """Rows of a span's query tile: some four queries, one of a large group, what a dot needs."""
    some, one = triton.next_power_of_2(4 * group_size), triton.next_power_of_2(group_size)
    return max(16, one, min(some, 32))


def most_reaches(device: torch.device, num_kv_heads: int, programs_per_sm: int) -> int:
    """Of a row: as many as there are programs at once for each of its heads."""
    return max(num_multiprocessors(device) * programs_per_sm // num_kv_heads, 1)


def make_work(
    batch: AttentionBatch,
    num_entries: int,
    num_kv_heads: int,
    *,
    block: int = BLOCK,
    reach: int = REACH,
    rows: int | None = None,
    programs_per_sm: int = PROGRAMS_PER_SM,
) -> AttentionWork:
    """Shapes come from the batch's shapes alone, contents from its lengths.

    `block` is the smallest span, `rows` those of a span's query tile, `reach` the shortest reach:
    of rows that have more of them than `programs_per_sm` lets run at once, reaches are longer.
    """
    num_rows, num_pages = len(batch.slot_B), batch.table_SP.shape[1]
    row_start_B, query_len_B = batch.row_start_B, batch.query_len_B
    if query_len_B is None:
        query_len_B = row_start_B[1:] - row_start_B[:-1]
    longest = batch.max_query_len or num_entries
    span_queries = (rows or span_rows(batch.group_size)) // batch.group_size
    tile_queries = TILE_ROWS // batch.group_size
    num_short_tiles = num_rows * triton.cdiv(min(longest, SHORT), span_queries)
    num_blocks = num_short_tiles * triton.cdiv(num_pages * batch.page_size, block)
    num_long = 0 if longest <= SHORT else min(num_rows, num_entries // (SHORT + 1))
    num_tiles = num_entries // tile_queries + num_long if num_long else 1
    # Blocks and stretches are no more than little work, reaches than run at once (a window may
    # begin inside one). Latent attention has a program for each, and empty ones cost time.
    most = most_reaches(batch.slot_B.device, num_kv_heads, programs_per_sm)
    num_cut = max(LITTLE // num_kv_heads, num_short_tiles * (most + 1))
    num_partials = min(num_blocks, MOST_PARTIALS, num_cut)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=row_start_B.device)

    work = AttentionWork(
        span_E8=integers(num_partials + num_short_tiles, 8),
        tile_E8=integers(num_tiles, 8),
        count_2=integers(2),
        merge_T4=integers(num_entries, 4),
        num_partials=num_partials,
    )
    _work_kernel[(num_rows + triton.cdiv(num_entries, ENTRIES_AT_ONCE),)](
        *(row_start_B, query_len_B, batch.length_B, batch.slot_B),
        *(work.span_E8, work.tile_E8, work.count_2, work.merge_T4),
        *(num_rows, num_entries, num_pages * batch.page_size),
        LONGEST_SHORT=SHORT,
        SPAN_QUERIES=span_queries,
        TILE_QUERIES=tile_queries,
        FINE=block,
        COARSE=STRETCH,
        WIDE=reach,
        MOST_REACHES=most,
        MOST_FINE=MOST_BLOCKS,
        MOST_UNCUT=MOST_UNCUT_STRETCHES,
        LITTLE_WORK=LITTLE // num_kv_heads,
        PARTIALS=MOST_PARTIALS,
        GROUP=batch.group_size,
        ENTRIES=ENTRIES_AT_ONCE,
        WINDOW=batch.window or 0,
        IS_CAUSAL=batch.is_causal,
        HAS_ROW_WINDOW=batch.has_row_window,
        num_warps=4,
    )
    return work


@triton.jit(
    do_not_specialize=["num_rows", "num_entries"],
    do_not_specialize_on_alignment=["row_start_B", "query_len_B", "length_B", "slot_B"],
)
def _work_kernel(  # noqa: PLR0913
    row_start_B,
    query_len_B,
    length_B,
    slot_B,
    span_E8,
    tile_E8,
    count_2,
    merge_T4,
    num_rows,
    num_entries,
    table_length,
    LONGEST_SHORT: tl.constexpr,
    SPAN_QUERIES: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    FINE: tl.constexpr,
    COARSE: tl.constexpr,
    WIDE: tl.constexpr,
    MOST_REACHES: tl.constexpr,
    MOST_FINE: tl.constexpr,
    MOST_UNCUT: tl.constexpr,
    LITTLE_WORK: tl.constexpr,
    PARTIALS: tl.constexpr,
    GROUP: tl.constexpr,
    ENTRIES: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_ROW_WINDOW: tl.constexpr,
):
    """One program per row, and some for the entries that no row owns."""
    row = tl.program_id(0)
    if row >= num_rows:
        block = row - num_rows
        _mark_dead(row_start_B, query_len_B, merge_T4, block, num_rows, num_entries, ENTRIES)
        return
    # Twice over all rows: how much there is to do if they are cut finely, then where they lie.
    is_fine = True
    num_items, num_tiles, my_spans, my_item, my_partial, my_tile = 0, 0, 0, 0, 0, 0
    for turn in tl.static_range(2):
        num_items, num_tiles, my_spans, my_item, my_partial, my_tile = _place_row(
            query_len_B,
            length_B,
            row,
            num_rows,
            table_length,
            is_fine,
            LONGEST_SHORT,
            SPAN_QUERIES,
            TILE_QUERIES,
            FINE,
            COARSE,
            WIDE,
            MOST_REACHES,
            MOST_FINE,
            MOST_UNCUT,
            PARTIALS,
            WINDOW,
        )
        if turn == 0:
            is_fine = num_items <= LITTLE_WORK
    if row == 0:
        tl.store(count_2, num_items)
        tl.store(count_2 + 1, num_tiles)
    start = tl.load(row_start_B + row).to(tl.int32)
    query_len = tl.load(query_len_B + row).to(tl.int32)
    length = tl.load(length_B + row).to(tl.int32)
    slot = tl.load(slot_B + row).to(tl.int32)
    base = _first_seen(length, query_len, COARSE, WINDOW)
    seen = tl.minimum(length, table_length) - base
    reach = _reach(seen, FINE, COARSE, WIDE, MOST_REACHES, WINDOW)
    span, how = _cut(seen, base, reach, is_fine & (reach == WIDE), FINE, COARSE, MOST_FINE)
    if query_len > LONGEST_SHORT:
        _write_tiles(tile_E8, my_tile, start, query_len, length, slot, TILE_QUERIES)
    else:
        _write_spans(
            *(span_E8, my_item, my_partial, start, query_len, length, slot, my_spans),
            *(span, reach, base, table_length, SPAN_QUERIES, IS_CAUSAL, HAS_ROW_WINDOW),
        )
    merge_at = merge_T4 + start * 4
    _write_merges(merge_at, query_len, my_partial, my_spans, how, SPAN_QUERIES, GROUP)


@triton.jit
def _write_merges(
    merge_T4,
    query_len,
    first_partial,
    num_spans,
    how,
    SPAN_QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
):
    for first in range(0, query_len, 64):
        query = first + tl.arange(0, 64)
        merge_at = merge_T4 + query * 4
        inside = query < query_len
        tl.store(merge_at, first_partial + query // SPAN_QUERIES * num_spans, mask=inside)
        tl.store(merge_at + 1, tl.where(num_spans > 1, num_spans, 0 * query), mask=inside)
        tl.store(merge_at + 2, how + 0 * query, mask=inside)
        tl.store(merge_at + 3, query % SPAN_QUERIES * GROUP, mask=inside)


@triton.jit
def _mark_dead(
    row_start_B,
    query_len_B,
    merge_T4,
    block,
    num_rows,
    num_entries,
    ENTRIES: tl.constexpr,
):
    """Rows come in any order, so every entry asks every row."""
    entry = block * ENTRIES + tl.arange(0, ENTRIES)
    owners = tl.zeros((ENTRIES,), dtype=tl.int32)
    for first in range(0, num_rows, 32):
        row = first + tl.arange(0, 32)
        start = tl.load(row_start_B + row, mask=row < num_rows, other=0).to(tl.int32)
        query_len = tl.load(query_len_B + row, mask=row < num_rows, other=0).to(tl.int32)
        offset = entry[:, None] - start[None, :]
        owners += tl.sum(((offset >= 0) & (offset < query_len[None, :])).to(tl.int32), axis=1)
    is_dead = (entry < num_entries) & (owners == 0)
    tl.store(merge_T4 + entry * 4 + 1, tl.full((ENTRIES,), -1, dtype=tl.int32), mask=is_dead)
    tl.store(merge_T4 + entry * 4 + 2, tl.zeros((ENTRIES,), dtype=tl.int32), mask=is_dead)


@triton.jit
def _place_row(  # noqa: PLR0913
    query_len_B,
    length_B,
    my_row,
    num_rows,
    table_length,
    is_fine,
    LONGEST_SHORT: tl.constexpr,
    SPAN_QUERIES: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    FINE: tl.constexpr,
    COARSE: tl.constexpr,
    WIDE: tl.constexpr,
    MOST_REACHES: tl.constexpr,
    MOST_FINE: tl.constexpr,
    MOST_UNCUT: tl.constexpr,
    PARTIALS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """How long the lists are; a row's spans, first item, first partial result and first tile.

    Rows that are one span come first: they may be long, and short items fill up the end.
    """
    num_whole, whole_before, num_cut, cut_before, num_tiles, tiles_before = 0, 0, 0, 0, 0, 0
    my_spans, num_wanted = 0, 0
    for first in range(0, num_rows, 256):
        row = first + tl.arange(0, 256)
        query_len = tl.load(query_len_B + row, mask=row < num_rows, other=0).to(tl.int32)
        length = tl.load(length_B + row, mask=row < num_rows, other=0).to(tl.int32)
        base = _first_seen(length, query_len, COARSE, WINDOW)
        end = tl.minimum(length, table_length)
        blocks, stretches = tl.cdiv(end - base, FINE), tl.cdiv(end - base, COARSE)
        fine_spans = tl.where(blocks <= MOST_FINE, blocks, stretches)
        reach = _reach(end - base, FINE, COARSE, WIDE, MOST_REACHES, WINDOW)
        reaches = tl.where(stretches <= MOST_UNCUT, 1, tl.cdiv(end, reach) - base // reach)
        spans = tl.where(is_fine & (reach == WIDE), fine_spans, reaches)
        is_long = query_len > LONGEST_SHORT
        pieces = tl.where(is_long, 0, tl.cdiv(query_len, SPAN_QUERIES))
        tiles = tl.where(is_long, tl.cdiv(query_len, TILE_QUERIES), 0)
        wanted = tl.where(spans > 1, pieces * spans, 0)
        # Once a row finds no room, those after it find none either.
        is_cut = (wanted > 0) & (num_wanted + tl.cumsum(wanted) <= PARTIALS)
        whole = tl.where(is_cut, 0, pieces)
        cut = tl.where(is_cut, wanted, 0)
        is_before = row < my_row
        whole_before += tl.sum(tl.where(is_before, whole, 0))
        cut_before += tl.sum(tl.where(is_before, cut, 0))
        tiles_before += tl.sum(tl.where(is_before, tiles, 0))
        my_spans += tl.sum(tl.where((row == my_row) & is_cut, spans, 0))
        num_wanted += tl.sum(wanted)
        num_whole += tl.sum(whole)
        num_cut += tl.sum(cut)
        num_tiles += tl.sum(tiles)
    my_item = tl.where(my_spans > 0, num_whole + cut_before, whole_before)
    return (
        num_whole + num_cut,
        num_tiles,
        tl.maximum(my_spans, 1),
        my_item,
        cut_before,
        tiles_before,
    )


@triton.jit
def _first_seen(length, query_len, COARSE: tl.constexpr, WINDOW: tl.constexpr):
    """Where a row's spans begin: with the stretch that holds the first key of its first query.

    Stretches lie where they would without a window, so that they are merged in the same way.
    """
    if WINDOW == 0:
        return 0 * length
    else:
        return tl.maximum(length - query_len + 1 - WINDOW, 0) // COARSE * COARSE


@triton.jit
def _reach(
    seen,
    FINE: tl.constexpr,
    COARSE: tl.constexpr,
    WIDE: tl.constexpr,
    MOST_REACHES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """As few reaches as run at once, as equal as blocks allow; the last stretch of a reach may be
    shorter. A row with a window may begin at any stretch, so its reaches are whole stretches.

    Only rows with the shortest reach are cut into stretches or blocks: merges know no other.
    """
    step: tl.constexpr = COARSE if WINDOW > 0 else FINE
    return tl.maximum(tl.cdiv(seen, MOST_REACHES * step) * step, WIDE)


@triton.jit
def _cut(
    seen,
    base,
    reach,
    is_fine,
    FINE: tl.constexpr,
    COARSE: tl.constexpr,
    MOST_FINE: tl.constexpr,
):
    """The size of a row's spans, and how they are merged."""
    has_blocks = seen <= FINE * MOST_FINE
    # Stretches that are reaches are merged one by one.
    fine_how = tl.where(reach > COARSE, base % reach // COARSE * 4 + 2, 0)
    span = tl.where(has_blocks, FINE, COARSE)
    how = tl.where(has_blocks, 1, fine_how)
    return tl.where(is_fine, span, reach), tl.where(is_fine, how, 0)


@triton.jit
def _write_tiles(tile_E8, first_tile, start, query_len, length, slot, TILE_QUERIES: tl.constexpr):
    """The tiles with the longest way through KV come first: the short ones fill up the end."""
    num_tiles = tl.cdiv(query_len, TILE_QUERIES)
    for first in range(0, num_tiles, 64):
        index = first + tl.arange(0, 64)
        query = (num_tiles - 1 - index) * TILE_QUERIES
        inside = index < num_tiles
        tile_at = tile_E8 + (first_tile + index) * 8
        tl.store(tile_at, start + query, mask=inside)
        tl.store(tile_at + 1, tl.minimum(query_len - query, TILE_QUERIES), mask=inside)
        tl.store(tile_at + 2, length - query_len + query, mask=inside)
        tl.store(tile_at + 3, tl.broadcast_to(slot, (64,)), mask=inside)
        # The row's first position in this step.
        tl.store(tile_at + 4, tl.broadcast_to(length - query_len, (64,)), mask=inside)


@triton.jit
def _write_spans(  # noqa: PLR0913
    span_E8,
    first_item,
    first_partial,
    start,
    query_len,
    length,
    slot,
    num_spans,
    span,
    reach,
    base,
    table_length,
    SPAN_QUERIES: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_ROW_WINDOW: tl.constexpr,
):
    num_items = tl.cdiv(query_len, SPAN_QUERIES) * num_spans
    for first in range(0, num_items, 64):
        index = first + tl.arange(0, 64)
        query = index // num_spans * SPAN_QUERIES
        num_queries = tl.minimum(query_len - query, SPAN_QUERIES)
        position = length - query_len + query
        # A reach that begins before the first key that is seen is cut there.
        begin = base // span * span + index % num_spans * span
        end = tl.minimum(position + num_queries if IS_CAUSAL else length, table_length)
        end = tl.where(num_spans > 1, tl.minimum(begin + span, end), end)
        begin = tl.maximum(begin, base)
        inside = index < num_items
        item_at = span_E8 + (first_item + index) * 8
        tl.store(item_at, start + query, mask=inside)
        # Behind the number of queries, those of the row before them: the window begins there.
        before = query * BEFORE if HAS_ROW_WINDOW else 0 * query
        tl.store(item_at + 1, num_queries + before, mask=inside)
        tl.store(item_at + 2, position, mask=inside)
        tl.store(item_at + 3, begin, mask=inside)
        tl.store(item_at + 4, end, mask=inside)
        tl.store(item_at + 5, tl.broadcast_to(slot, (64,)), mask=inside)
        # Where the partial result goes: -1 if it is the whole.
        tl.store(item_at + 6, tl.where(num_spans > 1, first_partial + index, -1), mask=inside)
        tl.store(item_at + 7, tl.broadcast_to(reach, (64,)), mask=inside)
