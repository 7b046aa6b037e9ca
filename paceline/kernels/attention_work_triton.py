"""Cuts a pass's attention into pieces of bounded size, on the device, for all layers at once.

Rows of few queries become spans of KV, rows of many become query tiles. Only lengths are read here,
never keys or values; where a cut falls depends on nothing but positions in the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kernels.attention import AttentionBatch, AttentionWork

SPAN = 256  # KV positions of a span; spans begin at multiples of it
UNCUT = 1  # rows of at most so many spans are walked by one program per head
SHORT = 16  # rows of at most so many queries are cut along KV
TILE_ROWS = 128  # queries times group of a tile, where rows are cut along queries
# Spans whose results wait for their neighbours. Rows that find no room are walked by one program
# each, with the same bits: by then there is work for everybody.
MOST_PARTIALS = 1024
MOST_KV_HEADS = 128
ENTRIES_AT_ONCE = 128


def span_rows(group_size: int) -> int:
    """Rows of a span's query tile: some four queries, one of a large group, what a dot needs."""
    some, one = triton.next_power_of_2(4 * group_size), triton.next_power_of_2(group_size)
    return max(16, one, min(some, 32))


def make_work(batch: AttentionBatch, num_entries: int) -> AttentionWork:
    """Shapes come from the batch's shapes alone, contents from its lengths."""
    num_rows, num_pages = len(batch.slot_B), batch.table_SP.shape[1]
    row_start_B = batch.row_start_B
    query_len_B = batch.query_len_B
    if query_len_B is None:
        query_len_B = row_start_B[1:] - row_start_B[:-1]
    longest = batch.max_query_len or num_entries
    span_queries = span_rows(batch.group_size) // batch.group_size
    tile_queries = TILE_ROWS // batch.group_size
    num_tiles = num_rows * triton.cdiv(min(longest, SHORT), span_queries)
    num_spans = num_tiles * triton.cdiv(num_pages * batch.page_size, SPAN)
    num_long = 0 if longest <= SHORT else min(num_rows, num_entries // (SHORT + 1))
    num_long_tiles = num_entries // tile_queries + num_long if num_long else 0
    num_partials = min(num_spans, MOST_PARTIALS)
    device = row_start_B.device
    work = AttentionWork(
        split_E8=torch.empty(num_partials + num_tiles, 8, dtype=torch.int32, device=device),
        tile_E4=torch.empty(max(num_long_tiles, 1), 4, dtype=torch.int32, device=device),
        count_2=torch.empty(2, dtype=torch.int32, device=device),
        is_dead_T=torch.empty(num_entries, dtype=torch.int8, device=device),
        ticket_EN=torch.empty(num_partials, MOST_KV_HEADS, dtype=torch.int32, device=device),
        num_partials=num_partials,
    )
    _work_kernel[(num_rows + triton.cdiv(num_entries, ENTRIES_AT_ONCE),)](
        *(row_start_B, query_len_B, batch.length_B, batch.slot_B),
        *(work.split_E8, work.tile_E4, work.count_2, work.is_dead_T, work.ticket_EN),
        *(num_rows, num_entries, num_pages * batch.page_size),
        LONGEST_SHORT=SHORT,
        SPAN_QUERIES=span_queries,
        TILE_QUERIES=tile_queries,
        SPAN_LENGTH=SPAN,
        MOST_UNCUT=UNCUT,
        PARTIALS=MOST_PARTIALS,
        HEADS=MOST_KV_HEADS,
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
    split_E8,
    tile_E4,
    count_2,
    is_dead_T,
    ticket_EN,
    num_rows,
    num_entries,
    table_length,
    LONGEST_SHORT: tl.constexpr,
    SPAN_QUERIES: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    SPAN_LENGTH: tl.constexpr,
    MOST_UNCUT: tl.constexpr,
    PARTIALS: tl.constexpr,
    HEADS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= num_rows:
        _mark_dead(
            row_start_B, query_len_B, is_dead_T, row - num_rows, num_rows, num_entries, ENTRIES
        )
        return
    first_item, num_items, first_tile, num_tiles, is_split = _place_row(
        query_len_B,
        length_B,
        row,
        num_rows,
        table_length,
        LONGEST_SHORT,
        SPAN_QUERIES,
        TILE_QUERIES,
        SPAN_LENGTH,
        MOST_UNCUT,
        PARTIALS,
    )
    if row == 0:
        tl.store(count_2, num_items)
        tl.store(count_2 + 1, num_tiles)
    start = tl.load(row_start_B + row).to(tl.int32)
    query_len = tl.load(query_len_B + row).to(tl.int32)
    length = tl.load(length_B + row).to(tl.int32)
    slot = tl.load(slot_B + row).to(tl.int32)
    if query_len > LONGEST_SHORT:
        _write_tiles(tile_E4, first_tile, start, query_len, length, slot, TILE_QUERIES)
    elif query_len > 0:
        _write_spans(
            split_E8,
            ticket_EN,
            first_item,
            start,
            query_len,
            length,
            slot,
            is_split,
            table_length,
            SPAN_QUERIES,
            SPAN_LENGTH,
            HEADS,
        )


@triton.jit
def _mark_dead(
    row_start_B,
    query_len_B,
    is_dead_T,
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
    tl.store(is_dead_T + entry, (owners == 0).to(tl.int8), mask=entry < num_entries)


@triton.jit
def _place_row(  # noqa: PLR0913
    query_len_B,
    length_B,
    my_row,
    num_rows,
    table_length,
    LONGEST_SHORT: tl.constexpr,
    SPAN_QUERIES: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    SPAN_LENGTH: tl.constexpr,
    MOST_UNCUT: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Where a row's pieces begin in the two lists, how long the lists are, and whether it is cut.

    Rows are cut until partial results have no room; the others take one piece per query tile.
    """
    first_item, num_items, first_tile, num_tiles, is_split, num_wanted = 0, 0, 0, 0, 0, 0
    for first in range(0, num_rows, 256):
        row = first + tl.arange(0, 256)
        query_len = tl.load(query_len_B + row, mask=row < num_rows, other=0).to(tl.int32)
        length = tl.load(length_B + row, mask=row < num_rows, other=0).to(tl.int32)
        is_short = query_len <= LONGEST_SHORT
        pieces = tl.where(is_short, tl.cdiv(query_len, SPAN_QUERIES), 0)
        tiles = tl.where(is_short, 0, tl.cdiv(query_len, TILE_QUERIES))
        spans = tl.cdiv(tl.minimum(length, table_length), SPAN_LENGTH)
        wanted = tl.where(spans > MOST_UNCUT, pieces * spans, pieces)
        fits = (num_wanted + tl.cumsum(wanted) <= PARTIALS) & (spans > MOST_UNCUT)
        items = tl.where(fits, wanted, pieces)
        is_before = row < my_row
        first_item += tl.sum(tl.where(is_before, items, 0))
        first_tile += tl.sum(tl.where(is_before, tiles, 0))
        num_items += tl.sum(items)
        num_tiles += tl.sum(tiles)
        num_wanted += tl.sum(wanted)
        is_split += tl.sum(tl.where(row == my_row, fits, False).to(tl.int32))
    return first_item, num_items, first_tile, num_tiles, is_split


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
    split_E8,
    ticket_EN,
    first_item,
    start,
    query_len,
    length,
    slot,
    is_split,
    table_length,
    SPAN_QUERIES: tl.constexpr,
    SPAN_LENGTH: tl.constexpr,
    HEADS: tl.constexpr,
):
    seen = tl.minimum(length, table_length)
    num_spans = tl.where(is_split > 0, tl.cdiv(seen, SPAN_LENGTH), 1)
    num_items = tl.cdiv(query_len, SPAN_QUERIES) * num_spans
    for first in range(0, num_items, 64):
        index = first + tl.arange(0, 64)
        query = index // num_spans * SPAN_QUERIES
        span = index % num_spans
        num_queries = tl.minimum(query_len - query, SPAN_QUERIES)
        position = length - query_len + query
        begin = span * SPAN_LENGTH
        end = tl.minimum(position + num_queries, table_length)
        end = tl.where(is_split > 0, tl.minimum(begin + SPAN_LENGTH, end), end)
        inside = index < num_items
        item_at = split_E8 + (first_item + index) * 8
        tl.store(item_at, start + query, mask=inside)
        tl.store(item_at + 1, num_queries, mask=inside)
        tl.store(item_at + 2, position, mask=inside)
        tl.store(item_at + 3, begin, mask=inside)
        tl.store(item_at + 4, end, mask=inside)
        tl.store(item_at + 5, tl.broadcast_to(slot, (64,)), mask=inside)
        tl.store(item_at + 6, tl.broadcast_to(num_spans, (64,)), mask=inside)
        tl.store(item_at + 7, first_item + index - span, mask=inside)
    if num_spans > 1:
        for item in range(first_item, first_item + num_items, num_spans):
            head = tl.arange(0, HEADS)
            tl.store(ticket_EN + item * HEADS + head, tl.zeros((HEADS,), dtype=tl.int32))
