"""Cuts a pass's attention into work items, on the device, for all layers at once.

Rows of few queries become spans of KV, rows of many become query tiles. Only lengths are read here,
never keys or values. How finely rows are cut depends on how much there is to do; their results do
not (attention_span_triton).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kernels.attention import AttentionBatch, AttentionWork

BLOCK = 64  # KV positions that are weighed at once: the smallest span
STRETCH = 1024  # positions whose blocks are merged before they meet others: the usual span
SHORT = 16  # rows of at most so many queries are cut along KV
TILE_ROWS = 128  # queries times group of a tile, where rows are cut along queries
# Spans whose results wait for others. A row that finds no room is one span: by then there is work
# for every multiprocessor.
MOST_PARTIALS = 512
# Rows are cut into blocks while this many items, counting heads, would be enough for all of them.
MOST_FINE_ITEMS = 1024
ENTRIES_AT_ONCE = 128


def span_rows(group_size: int) -> int:
    """Rows of a span's query tile: some four queries, one of a large group, what a dot needs."""
    some, one = triton.next_power_of_2(4 * group_size), triton.next_power_of_2(group_size)
    return max(16, one, min(some, 32))


def make_work(batch: AttentionBatch, num_entries: int, num_kv_heads: int) -> AttentionWork:
    """Shapes come from the batch's shapes alone, contents from its lengths."""
    num_rows, num_pages = len(batch.slot_B), batch.table_SP.shape[1]
    row_start_B, query_len_B = batch.row_start_B, batch.query_len_B
    if query_len_B is None:
        query_len_B = row_start_B[1:] - row_start_B[:-1]
    longest = batch.max_query_len or num_entries
    span_queries = span_rows(batch.group_size) // batch.group_size
    tile_queries = TILE_ROWS // batch.group_size
    num_short_tiles = num_rows * triton.cdiv(min(longest, SHORT), span_queries)
    num_blocks = num_short_tiles * triton.cdiv(num_pages * batch.page_size, BLOCK)
    num_long = 0 if longest <= SHORT else min(num_rows, num_entries // (SHORT + 1))
    num_tiles = num_entries // tile_queries + num_long if num_long else 1
    num_partials = min(num_blocks, MOST_PARTIALS)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=row_start_B.device)

    work = AttentionWork(
        span_E8=integers(num_partials + num_short_tiles, 8),
        tile_E4=integers(num_tiles, 4),
        count_2=integers(2),
        merge_T4=integers(num_entries, 4),
        num_partials=num_partials,
    )
    _work_kernel[(num_rows + triton.cdiv(num_entries, ENTRIES_AT_ONCE),)](
        *(row_start_B, query_len_B, batch.length_B, batch.slot_B),
        *(work.span_E8, work.tile_E4, work.count_2, work.merge_T4),
        *(num_rows, num_entries, num_pages * batch.page_size),
        LONGEST_SHORT=SHORT,
        SPAN_QUERIES=span_queries,
        TILE_QUERIES=tile_queries,
        FINE=BLOCK,
        COARSE=STRETCH,
        PARTIALS=MOST_PARTIALS,
        FINE_ITEMS=min(MOST_FINE_ITEMS // num_kv_heads, MOST_PARTIALS),
        GROUP=batch.group_size,
        ENTRIES=ENTRIES_AT_ONCE,
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
    tile_E4,
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
    PARTIALS: tl.constexpr,
    FINE_ITEMS: tl.constexpr,
    GROUP: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """One program per row, and some for the entries that no row owns."""
    row = tl.program_id(0)
    if row >= num_rows:
        block = row - num_rows
        _mark_dead(row_start_B, query_len_B, merge_T4, block, num_rows, num_entries, ENTRIES)
        return
    num_blocks = _count_blocks(
        query_len_B, length_B, num_rows, table_length, LONGEST_SHORT, SPAN_QUERIES, FINE
    )
    span = tl.where(num_blocks <= FINE_ITEMS, FINE, COARSE)
    first_item, num_items, first_tile, num_tiles, is_cut = _place_row(
        query_len_B,
        length_B,
        row,
        num_rows,
        table_length,
        span,
        LONGEST_SHORT,
        SPAN_QUERIES,
        TILE_QUERIES,
        PARTIALS,
    )
    if row == 0:
        tl.store(count_2, num_items)
        tl.store(count_2 + 1, num_tiles)
    start = tl.load(row_start_B + row).to(tl.int32)
    query_len = tl.load(query_len_B + row).to(tl.int32)
    length = tl.load(length_B + row).to(tl.int32)
    slot = tl.load(slot_B + row).to(tl.int32)
    is_cut = (is_cut > 0) & (query_len <= LONGEST_SHORT)
    num_spans = tl.where(is_cut, tl.cdiv(tl.minimum(length, table_length), span), 1)
    if query_len > LONGEST_SHORT:
        _write_tiles(tile_E4, first_tile, start, query_len, length, slot, TILE_QUERIES)
    else:
        _write_spans(
            span_E8,
            first_item,
            start,
            query_len,
            length,
            slot,
            num_spans,
            span,
            table_length,
            SPAN_QUERIES,
        )
    for first in range(0, query_len, 64):
        query = first + tl.arange(0, 64)
        merge_at = merge_T4 + (start + query) * 4
        inside = query < query_len
        piece = query // SPAN_QUERIES
        tl.store(merge_at, first_item + piece * num_spans, mask=inside)
        tl.store(merge_at + 1, tl.where(num_spans > 1, num_spans, 0 * query), mask=inside)
        tl.store(merge_at + 2, tl.where(span == FINE, 1, 0 * query), mask=inside)
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


@triton.jit
def _short_tiles(
    query_len_B, row, num_rows, LONGEST_SHORT: tl.constexpr, SPAN_QUERIES: tl.constexpr
):
    """Queries of rows, and the query tiles of those that are cut along KV."""
    query_len = tl.load(query_len_B + row, mask=row < num_rows, other=0).to(tl.int32)
    tiles = tl.where(query_len <= LONGEST_SHORT, tl.cdiv(query_len, SPAN_QUERIES), 0)
    return query_len, tiles


@triton.jit
def _count_blocks(
    query_len_B,
    length_B,
    num_rows,
    table_length,
    LONGEST_SHORT: tl.constexpr,
    SPAN_QUERIES: tl.constexpr,
    FINE: tl.constexpr,
):
    """Items if every row were cut into blocks."""
    count = 0
    for first in range(0, num_rows, 256):
        row = first + tl.arange(0, 256)
        _, tiles = _short_tiles(query_len_B, row, num_rows, LONGEST_SHORT, SPAN_QUERIES)
        length = tl.load(length_B + row, mask=row < num_rows, other=0).to(tl.int32)
        count += tl.sum(tiles * tl.cdiv(tl.minimum(length, table_length), FINE))
    return count


@triton.jit
def _place_row(  # noqa: PLR0913
    query_len_B,
    length_B,
    my_row,
    num_rows,
    table_length,
    span,
    LONGEST_SHORT: tl.constexpr,
    SPAN_QUERIES: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Where a row's items begin in the two lists, how long the lists are, and whether it is cut.

    Rows are cut until partial results have no room; the others are one span per query tile.
    """
    first_item, num_items, first_tile, num_tiles, is_cut, num_wanted = 0, 0, 0, 0, 0, 0
    for first in range(0, num_rows, 256):
        row = first + tl.arange(0, 256)
        query_len, pieces = _short_tiles(query_len_B, row, num_rows, LONGEST_SHORT, SPAN_QUERIES)
        length = tl.load(length_B + row, mask=row < num_rows, other=0).to(tl.int32)
        tiles = tl.where(query_len > LONGEST_SHORT, tl.cdiv(query_len, TILE_QUERIES), 0)
        wanted = pieces * tl.cdiv(tl.minimum(length, table_length), span)
        fits = num_wanted + tl.cumsum(wanted) <= PARTIALS
        items = tl.where(fits, wanted, pieces)
        is_before = row < my_row
        first_item += tl.sum(tl.where(is_before, items, 0))
        first_tile += tl.sum(tl.where(is_before, tiles, 0))
        num_items += tl.sum(items)
        num_tiles += tl.sum(tiles)
        num_wanted += tl.sum(wanted)
        is_cut += tl.sum(tl.where(row == my_row, fits, False).to(tl.int32))
    return first_item, num_items, first_tile, num_tiles, is_cut


@triton.jit
def _write_tiles(tile_E4, first_tile, start, query_len, length, slot, TILE_QUERIES: tl.constexpr):
    """The tiles with the longest way through KV come first: the short ones fill up the end."""
    num_tiles = tl.cdiv(query_len, TILE_QUERIES)
    for first in range(0, num_tiles, 64):
        index = first + tl.arange(0, 64)
        query = (num_tiles - 1 - index) * TILE_QUERIES
        inside = index < num_tiles
        tile_at = tile_E4 + (first_tile + index) * 4
        tl.store(tile_at, start + query, mask=inside)
        tl.store(tile_at + 1, tl.minimum(query_len - query, TILE_QUERIES), mask=inside)
        tl.store(tile_at + 2, length - query_len + query, mask=inside)
        tl.store(tile_at + 3, tl.broadcast_to(slot, (64,)), mask=inside)


@triton.jit
def _write_spans(  # noqa: PLR0913
    span_E8,
    first_item,
    start,
    query_len,
    length,
    slot,
    num_spans,
    span,
    table_length,
    SPAN_QUERIES: tl.constexpr,
):
    num_items = tl.cdiv(query_len, SPAN_QUERIES) * num_spans
    for first in range(0, num_items, 64):
        index = first + tl.arange(0, 64)
        query = index // num_spans * SPAN_QUERIES
        num_queries = tl.minimum(query_len - query, SPAN_QUERIES)
        position = length - query_len + query
        begin = index % num_spans * span
        end = tl.minimum(position + num_queries, table_length)
        end = tl.where(num_spans > 1, tl.minimum(begin + span, end), end)
        inside = index < num_items
        item_at = span_E8 + (first_item + index) * 8
        tl.store(item_at, start + query, mask=inside)
        tl.store(item_at + 1, num_queries, mask=inside)
        tl.store(item_at + 2, position, mask=inside)
        tl.store(item_at + 3, begin, mask=inside)
        tl.store(item_at + 4, end, mask=inside)
        tl.store(item_at + 5, tl.broadcast_to(slot, (64,)), mask=inside)
        # Where the partial result goes: -1 if it is the whole.
        tl.store(item_at + 6, tl.where(num_spans > 1, first_item + index, -1), mask=inside)
