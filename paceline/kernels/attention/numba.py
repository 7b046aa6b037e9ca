"""Paged attention on the CPU's vector units.

A tile is one KV head for a group of queries of one row. KV is read through the page table in spans
of 256 positions that begin at multiples of 256: softmax within a span, then spans are merged in
order. So a query's bits depend on its position and its sequence alone: not on the other queries of
its row, not on other rows, not on how a prompt was cut into chunks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.attention import reference as attention
from paceline.kernels.attention.reference import AttentionBatch
from paceline.kernels.elementwise.numba import copy_row, page_addresses, scale_addresses
from paceline.kernels.kv_codes.reference import KvScales
from paceline.kernels.vector.jit import c_function, jit
from paceline.kernels.vector.simd import (
    add,
    call_at,
    exp,
    first,
    first_lane,
    float_bits,
    fused,
    larger,
    largest,
    load,
    load_codes,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    mul,
    packed,
    splat,
    store,
    store_f32,
    total,
    transpose,
)
from paceline.kernels.vector.team import run_tiles, team
from paceline.kernels.vector.tile import ADD_PRODUCT, MOST_ROWS

_SPAN = 256
# Query rows (queries times heads of the group) of a tile, and the largest head.
_TILE_ROWS = 96
MOST_HEAD_SIZE = 256
MOST_GROUP_SIZE = _TILE_ROWS
_LOWEST = float("-inf")

# The thread's scratch, in bytes. Head sizes are padded to whole pairs of vectors.
_ROW_BYTES = 4 * MOST_HEAD_SIZE
_QUERY = 0
_RESULT = _QUERY + _TILE_ROWS * _ROW_BYTES
_PARTIAL = _RESULT + _TILE_ROWS * _ROW_BYTES
_SCORES = _PARTIAL + MOST_ROWS * _ROW_BYTES
# For each row, the highest score so far and the sum of weights; likewise of one span.
_STATE = _SCORES + MOST_ROWS * _SPAN * 4
_SPAN_STATE = _STATE + _TILE_ROWS * 8
_BLOCK = _SPAN_STATE + 128  # MOST_ROWS states, and whole cache lines
_KEYS = _BLOCK + 16 * _ROW_BYTES  # [span / 32][H][32]
_VALUES = _KEYS + _SPAN * _ROW_BYTES  # [span][padded H], where pages cannot be read in place

# Table row, page size, head size, and the bytes of a number: 4, or 1 where pages hold fp8 codes.
_Pages = tuple[int, int, int, int]


@jit
def _position_bytes(pages: _Pages, position: int) -> int:
    """Where a position lies among a head's pages."""
    table, page_size, size, item = pages
    # A row without a page here attends to nothing that counts; it must not leave the cache.
    page: int = max(load_i32(table + 4 * (position // page_size)), 0)
    return (page * page_size + position % page_size) * item * size


@jit
def _decode(source: int, target: int, size: int) -> None:
    """What fp8 codes stand for."""
    whole = size // 16 * 16
    for i in range(0, whole, 16):
        store(target + 4 * i, load_codes(source + i, 16))
    for i in range(whole, size):
        store_f32(target + 4 * i, first_lane(load_codes(source + i, 1)))


@jit
def _decode_rows(
    rows: int, target: int, pages: _Pages, begin: int, end: int, row_size: int
) -> None:
    """fp8 keys or values of positions begin..end, in rows of `row_size` numbers."""
    _, page_size, size, _ = pages
    while begin < end:
        source = rows + _position_bytes(pages, begin)
        run = min(page_size - begin % page_size, end - begin)
        if row_size == size:
            _decode(source, target, run * size)
        else:
            for i in range(run):
                _decode(source + i * size, target + 4 * i * row_size, size)
        target += 4 * run * row_size
        begin += run


@jit
def _clear(target: int, size: int) -> None:
    zero = splat(0.0)
    for i in range(0, size, 16):
        store(target + 4 * i, zero)


@jit
def _transpose_keys(scratch: int, keys: int, pages: _Pages, begin: int, end: int) -> None:
    """Keys of positions begin..end, 32 positions side by side for each number of the head.

    Lanes past the end hold whatever is there; their scores are never used.
    """
    _, page_size, size, item = pages
    for position in range(begin, end, 16):
        source = keys + _position_bytes(pages, position)
        if item == 1:
            source = scratch + _BLOCK
            _decode_rows(keys, source, pages, position, min(position + 16, end), size)
        elif page_size % 16 != 0:
            for i in range(min(16, end - position)):
                at = keys + _position_bytes(pages, position + i)
                copy_row(at, size, scratch + _BLOCK + 4 * i * size)
            source = scratch + _BLOCK
        offset = position - begin
        target = scratch + _KEYS + offset // 32 * 128 * size + offset % 32 * 4
        whole = size // 16 * 16
        for i in range(0, whole, 16):
            transpose(source + 4 * i, 4 * size, target + 128 * i, 128)
        for i in range(whole, size):
            for lane in range(16):
                number = load_f32(source + 4 * (lane * size + i))
                store_f32(target + 128 * i + 4 * lane, number)


@jit
def _soften(scores: int, count: int, width: int, peak: float) -> float:
    """Scores -> e^(score - peak), 0 from `count` to `width`; the sum of them."""
    shift, zero, minus = splat(peak), splat(0.0), splat(-1.0)
    sums = zero
    for i in range(0, width, 16):
        weights = first(count - i, exp(fused(shift, minus, load(scores + 4 * i))), zero)
        store(scores + 4 * i, weights)
        sums = add(sums, weights)
    result: float = total(sums)
    return result


@jit
def _peak(scores: int, count: int) -> float:
    """The highest of the first `count` scores."""
    lowest = splat(_LOWEST)
    best = lowest
    for i in range(0, count, 16):
        best = larger(best, first(count - i, load(scores + 4 * i), lowest))
    result: float = largest(best)
    return result


@jit
def _scores(product: int, scratch: int, size: int, first_row: int, count: int, width: int) -> None:
    """scores[count, width] = queries keys^T, for keys that are in scratch."""
    padded = -(-size // 32) * 32
    for column in range(0, width, 32):
        out = scratch + _SCORES + 4 * column
        for i in range(count):
            _clear(out + 4 * i * _SPAN, 32)
        query = scratch + _QUERY + 4 * first_row * padded
        keys = scratch + _KEYS + 4 * column * size
        call_at(product, (query, 4 * padded, count, keys, 128, size, out, 4 * _SPAN))


@jit
def _weigh_values(
    product: int,
    scratch: int,
    values: int,
    pages: _Pages,
    begin: int,
    count: int,
    width: int,
) -> None:
    """partial[count, size] = weights[count, width] values[width, size], run by run of pages."""
    _, page_size, size, item = pages
    padded = -(-size // 32) * 32
    _clear(scratch + _PARTIAL, count * padded)
    done = 0
    while done < width:
        position = begin + done
        if item == 1:  # all of them are decoded
            source, run = scratch + _VALUES, width
        else:
            source = values + _position_bytes(pages, position)
            run = page_size - position % page_size
            while done + run < width and source + 4 * run * size == values + _position_bytes(
                pages, position + run
            ):
                run += page_size
            run = min(run, width - done)
            if padded != size:
                for i in range(run):
                    copy_row(source + 4 * i * size, size, scratch + _VALUES + 4 * i * padded)
                source = scratch + _VALUES
        weights = scratch + _SCORES + 4 * done
        for column in range(0, padded, 32):
            columns, out = source + 4 * column, scratch + _PARTIAL + 4 * column
            numbers = (weights, 4 * _SPAN, count, columns, 4 * padded, run, out, 4 * padded)
            call_at(product, numbers)
        done += run


@jit
def _merge(scratch: int, row: int, partial: int, padded: int, peak: float, weight: float) -> None:
    """The row's result so far and the result of one more span become one."""
    state = scratch + _STATE + 8 * row
    result = scratch + _RESULT + 4 * row * padded
    before = load_f32(state)
    top = max(before, peak)
    old, new = exp(splat(before - top)), exp(splat(peak - top))
    for i in range(0, padded, 16):
        merged = fused(load(partial + 4 * i), new, mul(load(result + 4 * i), old))
        store(result + 4 * i, merged)
    sums = fused(splat(weight), new, mul(splat(load_f32(state + 4)), old))
    store_f32(state, top)
    store_f32(state + 4, first_lane(sums))


@jit
def _attend_span(
    product: int,
    scratch: int,
    values: int,
    pages: _Pages,
    begin: int,
    rows: tuple[int, int, int, int, int],
) -> None:
    """Up to MOST_ROWS rows of the tile over the span whose keys are in scratch.

    `rows`: first row, how many, heads of the group, position of the tile's first query, and what
    every query sees: 0 if that ends with its own position.
    """
    first_row, count, group_size, first_position, length = rows
    size = pages[2]
    padded = -(-size // 32) * 32
    # Positions ascend with rows: the last row sees the most.
    last = first_position + (first_row + count - 1) // group_size + 1
    width = min(_SPAN, max(last, length) - begin)
    _scores(product, scratch, size, first_row, count, width)
    for i in range(count):
        scores, state = scratch + _SCORES + 4 * i * _SPAN, scratch + _SPAN_STATE + 8 * i
        end = max(first_position + (first_row + i) // group_size + 1, length)
        seen = min(_SPAN, end - begin)
        peak = _peak(scores, seen)
        store_f32(state, peak)
        store_f32(state + 4, _soften(scores, seen, width, peak))
    _weigh_values(product, scratch, values, pages, begin, count, width)
    for i in range(count):
        partial, state = scratch + _PARTIAL + 4 * i * padded, scratch + _SPAN_STATE + 8 * i
        peak, weight = load_f32(state), load_f32(state + 4)
        if begin > 0:
            _merge(scratch, first_row + i, partial, padded, peak, weight)
        else:
            copy_row(partial, padded, scratch + _RESULT + 4 * (first_row + i) * padded)
            store_f32(scratch + _STATE + 8 * (first_row + i), peak)
            store_f32(scratch + _STATE + 8 * (first_row + i) + 4, weight)


@jit
def _take_queries(
    scratch: int, query: int, strides: tuple[int, int], count: int, group_size: int, scale: float
) -> None:
    """Queries of the tile, scaled, one row for each head of each query."""
    token_bytes, size = strides
    padded = -(-size // 32) * 32
    factor = splat(scale)
    whole = size // 16 * 16
    for token in range(count):
        for head in range(group_size):
            source = query + token * token_bytes + 4 * head * size
            target = scratch + _QUERY + 4 * (token * group_size + head) * padded
            for i in range(0, whole, 16):
                store(target + 4 * i, mul(load(source + 4 * i), factor))
            for i in range(whole, size):
                store_f32(target + 4 * i, load_f32(source + 4 * i) * np.float32(scale))


@jit
def _give_results(
    scratch: int, out: int, strides: tuple[int, int], count: int, group_size: int, scale: np.float32
) -> None:
    token_bytes, size = strides
    padded = -(-size // 32) * 32
    whole = size // 16 * 16
    for row in range(count * group_size):
        source = scratch + _RESULT + 4 * row * padded
        target = out + row // group_size * token_bytes + 4 * (row % group_size) * size
        inverse = scale / load_f32(scratch + _STATE + 8 * row + 4)
        factor = splat(inverse)
        for i in range(0, whole, 16):
            store(target + 4 * i, mul(load(source + 4 * i), factor))
        for i in range(whole, size):
            store_f32(target + 4 * i, load_f32(source + 4 * i) * inverse)


@jit
def _attend_tile(
    product: int,
    scratch: int,
    kv: tuple[int, int],
    pages: _Pages,
    first_position: int,
    num_queries: int,
    group_size: int,
    length: int,
) -> None:
    num_rows = num_queries * group_size
    end = max(first_position + num_queries, length)
    for begin in range(0, end, _SPAN):
        last = min(begin + _SPAN, end)
        _transpose_keys(scratch, kv[0], pages, begin, last)
        if pages[3] == 1:
            _decode_rows(kv[1], scratch + _VALUES, pages, begin, last, -(-pages[2] // 32) * 32)
        # Rows before this one end before the span begins.
        row = 0 if length else max(0, begin - first_position) * group_size
        while row < num_rows:
            count = min(MOST_ROWS, num_rows - row)
            rows = (row, count, group_size, first_position, length)
            _attend_span(product, scratch, kv[1], pages, begin, rows)
            row += count


def _attend(arguments: int, tile: int, scratch: int) -> None:
    """Arguments: see `launch_attention`."""
    query, query_bytes = load_i64(arguments), load_i64(arguments + 8)
    keys, values = load_i64(arguments + 16), load_i64(arguments + 24)
    head_bytes, out = load_i64(arguments + 32), load_i64(arguments + 40)
    row_start, length = load_i64(arguments + 48), load_i64(arguments + 56)
    slots, table = load_i64(arguments + 64), load_i64(arguments + 72)
    table_bytes = load_i64(arguments + 80)
    page_size, group_size = load_i64(arguments + 88), load_i64(arguments + 96)
    num_kv, size = load_i64(arguments + 104), load_i64(arguments + 112)
    scale, value_scale = load_f64(arguments + 120), np.float32(1.0)
    # Which row, which KV head, which of its queries.
    most_queries = _TILE_ROWS // group_size
    row = 0
    while True:
        start = load_i64(row_start + 8 * row)
        row_queries = load_i64(row_start + 8 * row + 8) - start
        num_tiles = num_kv * -(-row_queries // most_queries)
        if tile < num_tiles:
            break
        tile -= num_tiles
        row += 1
    # Later queries see more: they go first, so that threads finish together.
    part, head = num_tiles // num_kv - 1 - tile // num_kv, tile % num_kv
    first = part * most_queries
    num_queries = min(most_queries, row_queries - first)
    row_length = load_i64(length + 8 * row)
    position = row_length - row_queries + first
    all_seen = 0 if load_i64(arguments + 136) else row_length
    at = 4 * head * group_size * size
    out_bytes = 4 * num_kv * group_size * size
    source = query + (start + first) * query_bytes + at
    item, scales = 4, load_i64(arguments + 144)
    if scales:  # of keys, then of values
        item, scale = 1, scale * load_f32(scales + 4 * head)
        value_scale = load_f32(load_i64(arguments + 152) + 4 * head)
    _take_queries(scratch, source, (query_bytes, size), num_queries, group_size, scale)
    pages = (table + load_i64(slots + 8 * row) * table_bytes, page_size, size, item)
    kv = (keys + head * head_bytes, values + head * head_bytes)
    product = load_i64(arguments + 128)
    _attend_tile(product, scratch, kv, pages, position, num_queries, group_size, all_seen)
    target = out + (start + first) * out_bytes + at
    strides = (out_bytes, size)
    _give_results(scratch, target, strides, num_queries, group_size, value_scale)


ATTEND = c_function(_attend, 3)


@jit
def launch_attention(
    team: int,
    bodies: tuple[int, int],
    query: tuple[int, int, int],
    pages: tuple[int, int, int, int, int, int],
    rows: tuple[int, int, int, int],
    table: tuple[int, int],
    heads: tuple[int, int, int, int],
    scale: float,
) -> None:
    body, product = bodies
    at, token_bytes, out = query
    keys, values, head_bytes, page_size, key_scales, value_scales = pages
    row_start, length, slots, num_rows = rows
    group_size, num_kv, size, is_causal = heads
    most_queries = _TILE_ROWS // group_size
    num_tiles = 0
    for row in range(num_rows):
        queries = load_i64(row_start + 8 * row + 8) - load_i64(row_start + 8 * row)
        num_tiles += num_kv * -(-queries // most_queries)
    arguments = packed(
        (
            *(at, token_bytes, keys, values, head_bytes, out, row_start, length, slots),
            *(*table, page_size, group_size, num_kv, size, float_bits(scale), product, is_causal),
            *(key_scales, value_scales),
        )
    )
    run_tiles(team, body, arguments, num_tiles)


def paged_attention(
    qkv_TD: Tensor,
    key_NSH: Tensor,
    value_NSH: Tensor,
    batch: AttentionBatch,
    scale: float,
    scales: KvScales | None = None,
) -> Tensor:
    """See kernels/attention/reference. Batches with a window run there."""
    if batch.window is not None:
        return attention.paged_attention(qkv_TD, key_NSH, value_NSH, batch, scale, scales)
    num_kv, _, size = key_NSH.shape
    num_tokens, width = qkv_TD.shape
    out_TD = torch.empty(num_tokens, num_kv * batch.group_size * size)
    table_SP, rows = batch.table_SP, batch.row_start_B.data_ptr()
    launch_attention(
        team.address,
        (ATTEND, ADD_PRODUCT),
        (qkv_TD.data_ptr(), 4 * width, out_TD.data_ptr()),
        (*page_addresses(key_NSH, value_NSH), batch.page_size, *scale_addresses(scales)),
        (rows, batch.length_B.data_ptr(), batch.slot_B.data_ptr(), batch.slot_B.shape[0]),
        (table_SP.data_ptr(), 4 * table_SP.stride(0)),
        (batch.group_size, num_kv, size, int(batch.is_causal)),
        scale,
    )
    return out_TD
