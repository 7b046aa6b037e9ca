"""The kernels of latent attention: spans of KV, query tiles, and the merge of spans.

A block of KV is read once, as keys (latent and rotary key) and as values (the latent).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from paceline.kernels.attention.triton.spans import are_loaded, pages_at, row_offsets
from paceline.kernels.gpu.triton import wait_for_input
from paceline.kernels.kv_codes.triton import numbers, scaled


class LatentTiles(NamedTuple):
    """How a kernel is built: by type and number of heads, never by the batch."""

    group: int  # heads that a tile takes
    rows: int  # heads times queries of a tile
    block: int  # KV positions at once
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1


def span_tiles(dtype: torch.dtype, num_heads: int) -> LatentTiles:
    """Three sets of 512 sums by 16 rows fit in the registers that there are."""
    group = _group(num_heads, 16)
    if dtype == torch.float32:  # no tensor cores: small tiles, for tests and tiny models
        return LatentTiles(group, 16, block=16, num_warps=8, num_stages=1)
    return LatentTiles(group, 16, block=64, num_warps=8, num_stages=2)


def query_tiles(dtype: torch.dtype, num_heads: int) -> LatentTiles:
    """One set of 64 rows by 512 sums. Groups are those of spans: the lists know one."""
    group = _group(num_heads, 16)
    if dtype == torch.float32:
        return LatentTiles(group, 16, block=16, num_warps=4, num_stages=1)
    return LatentTiles(group, 64, block=32, num_warps=8, num_stages=2)


def _group(num_heads: int, most: int) -> int:
    return max(n for n in range(1, most + 1) if num_heads % n == 0)


@triton.jit
def _load_queries(  # noqa: PLR0913
    query_TNH,
    entry,
    row,
    first_head,
    num_rows,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
):
    latent_at = tl.arange(0, PADDED_LATENT)
    rope_at = tl.arange(0, PADDED_ROPE)
    head = (entry + row // GROUP) * HEADS + first_head + row % GROUP
    query_at = query_TNH + head[:, None] * (LATENT + ROPE)
    is_row = (row < num_rows)[:, None]
    latent = tl.load(
        query_at + latent_at[None, :], mask=is_row & (latent_at < LATENT)[None, :], other=0.0
    )
    rope = tl.load(
        query_at + LATENT + rope_at[None, :], mask=is_row & (rope_at < ROPE)[None, :], other=0.0
    )
    return latent, rope


@triton.jit
def _nothing(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    return top, tl.zeros((ROWS,), dtype=tl.float32), tl.zeros((ROWS, WIDTH), dtype=tl.float32)


@triton.jit
def _base(top):
    """What to take off scores: not infinity where a row has seen nothing yet."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _walk(  # noqa: PLR0913
    latent_query,
    rope_query,
    page_SH,
    table,
    position,
    begin,
    end,
    scale,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Highest score, sum of weights and weighted latents of positions begin to end, by row."""
    latent_at = tl.arange(0, PADDED_LATENT)
    rope_at = tl.arange(0, PADDED_ROPE)
    top, total, result = _nothing(ROWS, PADDED_LATENT)
    page = pages_at(table, begin + tl.arange(0, SIZE), end, PAGE)
    for passed in range(0, end - begin, SIZE):
        at = begin + passed + tl.arange(0, SIZE)
        row_at = page_SH + row_offsets(page, at, PAGE, LATENT + ROPE)[:, None]
        # One block ahead, so that no load of KV waits for a load of pages.
        page = pages_at(table, at + SIZE, end, PAGE)
        # What lies past the end may be NaN, which no weight of 0 takes away.
        is_there = (at < end)[:, None]
        latent = tl.load(
            row_at + latent_at[None, :], mask=is_there & (latent_at < LATENT)[None, :], other=0
        )
        rope = tl.load(
            row_at + LATENT + rope_at[None, :], mask=is_there & (rope_at < ROPE)[None, :], other=0
        )
        latent, rope = numbers(latent, rope_query.dtype), numbers(rope, rope_query.dtype)
        score = tl.dot(latent_query, tl.trans(latent), input_precision="ieee")
        score = tl.dot(rope_query, tl.trans(rope), score, input_precision="ieee")
        is_seen = (at[None, :] <= position[:, None]) & (at < end)[None, :]
        score = tl.where(is_seen, score * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        base = _base(new_top)
        weight = tl.exp2(score - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(weight, 1)
        result *= keep[:, None]
        result = tl.dot(weight.to(latent.dtype), latent, result, input_precision="ieee")
        top = new_top
    return top, total, result


@triton.jit
def _nothing_across(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    return top, tl.zeros((ROWS,), dtype=tl.float32), tl.zeros((WIDTH, ROWS), dtype=tl.float32)


@triton.jit
def _merge_across(top, total, result, next_top, next_total, next_result):
    """What was merged so far and what comes next, in this order, as `latent_merge_kernel` does."""
    new_top = tl.maximum(top, next_top)
    base = _base(new_top)
    keep, take = tl.exp2(top - base), tl.exp2(next_top - base)
    total = total * keep + next_total * take
    result = result * keep[None, :] + next_result * take[None, :]
    return new_top, total, result


@triton.jit
def _walk_span(  # noqa: PLR0913
    latent_query,
    rope_query,
    page_SH,
    table,
    position,
    begin,
    end,
    reach,
    scale,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Like `_walk`, the other way round: scores [SIZE, ROWS], weighted latents [LATENT, ROWS].

    Tensor cores want many rows and take few columns: few queries are columns here. Blocks are
    merged within reaches, and reaches with each other, so that spans may be either.
    """
    latent_at, rope_at = tl.arange(0, PADDED_LATENT), tl.arange(0, PADDED_ROPE)
    top, total, result = _nothing_across(ROWS, PADDED_LATENT)
    run_top, run_total, run_result = _nothing_across(ROWS, PADDED_LATENT)
    page = pages_at(table, begin + tl.arange(0, SIZE), end, PAGE)
    into_reach = begin % reach
    for passed in range(0, end - begin, SIZE):
        at = begin + passed + tl.arange(0, SIZE)
        row_at = page_SH + row_offsets(page, at, PAGE, LATENT + ROPE)[:, None]
        page = pages_at(table, at + SIZE, end, PAGE)
        is_there = (at < end)[:, None]
        latent = tl.load(
            row_at + latent_at[None, :], mask=is_there & (latent_at < LATENT)[None, :], other=0
        )
        rope = tl.load(
            row_at + LATENT + rope_at[None, :], mask=is_there & (rope_at < ROPE)[None, :], other=0
        )
        latent, rope = numbers(latent, rope_query.dtype), numbers(rope, rope_query.dtype)
        score = tl.dot(latent, tl.trans(latent_query), input_precision="ieee")
        score = tl.dot(rope, tl.trans(rope_query), score, input_precision="ieee")
        is_seen = (at[:, None] <= position[None, :]) & is_there
        score = tl.where(is_seen, score * scale, float("-inf"))
        block_top = tl.max(score, 0)
        weight = tl.exp2(score - _base(block_top)[None, :])
        block_result = tl.dot(tl.trans(latent), weight.to(latent.dtype), input_precision="ieee")
        run_top, run_total, run_result = _merge_across(
            *(run_top, run_total, run_result), *(block_top, tl.sum(weight, 0), block_result)
        )
        into_reach += SIZE
        if into_reach == reach:  # spans begin where reaches do, or are shorter
            top, total, result = _merge_across(
                *(top, total, result), *(run_top, run_total, run_result)
            )
            run_top, run_total, run_result = _nothing_across(ROWS, PADDED_LATENT)
            into_reach -= reach
    return _merge_across(top, total, result, run_top, run_total, run_result)


@triton.jit(do_not_specialize=["partial_rows"])
def latent_span_kernel(  # noqa: PLR0913
    query_TNH,
    page_SH,
    page_scale_1,
    out_TNL,
    sums_EPRL,
    states_EPR2,
    span_E8,
    count_2,
    table_SP,
    scale,
    table_stride,
    partial_rows,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """A part of the heads over one span: a block of KV, a reach, or all that a row has."""
    wait_for_input(IS_DEPENDENT)
    item, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    if item >= tl.load(count_2):
        return
    span_at = span_E8 + item * 8
    entry = tl.load(span_at).to(tl.int64)
    num_rows = tl.load(span_at + 1) * GROUP
    begin, end = tl.load(span_at + 3), tl.load(span_at + 4)
    table = table_SP + tl.load(span_at + 5).to(tl.int64) * table_stride
    partial, reach = tl.load(span_at + 6), tl.load(span_at + 7)
    row = tl.arange(0, ROWS)
    position = tl.load(span_at + 2) + row // GROUP
    latent_query, rope_query = _load_queries(
        *(query_TNH, entry, row, part * GROUP, num_rows),
        *(GROUP, PARTS * GROUP, LATENT, ROPE, PADDED_LATENT, PADDED_ROPE),
    )
    scale = scaled(scale, page_scale_1, 0)
    top, total, result = _walk_span(
        *(latent_query, rope_query, page_SH, table, position, begin, end, reach, scale),
        *(LATENT, ROPE, PADDED_LATENT, PADDED_ROPE, PAGE, ROWS, SIZE),
    )
    column = tl.arange(0, PADDED_LATENT)[:, None]
    inside = (row < num_rows)[None, :] & (column < LATENT)
    if partial < 0:
        head = (entry + row // GROUP) * (PARTS * GROUP) + part * GROUP + row % GROUP
        # A query that sees no key at all gets 0; NaN stays.
        result /= tl.where(total == 0.0, 1.0, total)[None, :]
        result = scaled(result, page_scale_1, 0)
        out_at = out_TNL + head[None, :] * LATENT + column
        tl.store(out_at, result.to(out_TNL.dtype.element_ty), mask=inside)
    else:
        place = (partial * PARTS + part) * partial_rows + row.to(tl.int64)
        tl.store(states_EPR2 + place * 2, top, mask=row < num_rows)
        tl.store(states_EPR2 + place * 2 + 1, total, mask=row < num_rows)
        tl.store(sums_EPRL + place[None, :] * LATENT + column, result, mask=inside)


@triton.jit(do_not_specialize=["partial_rows"])
def latent_merge_kernel(  # noqa: PLR0913
    out_TNL,
    sums_EPRL,
    states_EPR2,
    merge_T4,
    page_scale_1,
    partial_rows,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    LATENT: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCKS: tl.constexpr,
    FINE_SPANS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Partial results of some heads and columns of an entry; zeros at unused entries."""
    wait_for_input(IS_DEPENDENT)
    entry, part = tl.program_id(0), tl.program_id(1)
    merge_at = merge_T4 + entry * 4
    num_spans = tl.load(merge_at + 1)
    if num_spans == 0:
        return
    first, is_fine, first_row = tl.load(merge_at), tl.load(merge_at + 2), tl.load(merge_at + 3)
    row = tl.arange(0, PADDED_GROUP)
    column = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    stride = PARTS * partial_rows
    place = first.to(tl.int64) * stride + part * partial_rows + first_row + row
    state_at = states_EPR2 + place * 2
    sum_at = sums_EPRL + place[None, :] * LATENT + column[:, None]
    is_row = row < GROUP
    top, total, result = _nothing_across(PADDED_GROUP, PIECE)
    if is_fine == 0:
        for first_span in range(0, num_spans, FINE_SPANS):
            partials = _partials(
                *(state_at, sum_at, first_span, num_spans, stride, is_row, LATENT, FINE_SPANS)
            )
            if are_loaded(first, first_span):
                for i in tl.static_range(FINE_SPANS):
                    top, total, result = _merge_across(top, total, result, *partials[i])
    else:
        partials = _partials(*(state_at, sum_at, 0, num_spans, stride, is_row, LATENT, FINE_SPANS))
        if are_loaded(first, 0):
            for stretch in tl.static_range(0, FINE_SPANS, BLOCKS):
                run_top, run_total, run_result = _nothing_across(PADDED_GROUP, PIECE)
                for i in tl.static_range(BLOCKS):
                    run_top, run_total, run_result = _merge_across(
                        run_top, run_total, run_result, *partials[stretch + i]
                    )
                top, total, result = _merge_across(
                    *(top, total, result), *(run_top, run_total, run_result)
                )
    result /= tl.where(total == 0.0, 1.0, total)[None, :]
    result = scaled(result, page_scale_1, 0)
    head = entry.to(tl.int64) * (PARTS * GROUP) + part * GROUP + row
    out_at = out_TNL + head[None, :] * LATENT + column[:, None]
    tl.store(out_at, result.to(out_TNL.dtype.element_ty), mask=is_row[None, :])


@triton.jit
def _partials(
    state_at, sum_at, first, num_spans, stride, is_row, LATENT: tl.constexpr, COUNT: tl.constexpr
):
    found = ()
    for i in tl.static_range(COUNT):
        one = _partial(state_at, sum_at, first + i, num_spans, stride, is_row, LATENT)
        found = found + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _partial(state_at, sum_at, span, num_spans, stride, is_row, LATENT: tl.constexpr):
    """A partial result; nothing where there is none."""
    exists = is_row & (span < num_spans)
    top = tl.load(state_at + span * stride * 2, mask=exists, other=float("-inf"))
    total = tl.load(state_at + span * stride * 2 + 1, mask=exists, other=0.0)
    sums = tl.load(sum_at + span * stride * LATENT, mask=exists[None, :], other=0.0)
    return top, total, sums


@triton.jit
def latent_tile_kernel(  # noqa: PLR0913
    query_TNH,
    page_SH,
    page_scale_1,
    out_TNL,
    tile_E8,
    count_2,
    table_SP,
    scale,
    table_stride,
    table_length,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """A part of the heads for some queries of a long row, over all KV that they see."""
    wait_for_input(IS_DEPENDENT)
    if tl.program_id(1) >= tl.load(count_2 + 1):
        return
    tile_at = tile_E8 + tl.program_id(1) * 8
    part = tl.program_id(0) // TILES
    first_row = tl.program_id(0) % TILES * ROWS
    num_rows = tl.load(tile_at + 1) * GROUP
    if first_row >= num_rows:
        return
    entry = tl.load(tile_at).to(tl.int64)
    table = table_SP + tl.load(tile_at + 3).to(tl.int64) * table_stride
    row = first_row + tl.arange(0, ROWS)
    first_position = tl.load(tile_at + 2)
    last_row = tl.minimum(num_rows, first_row + ROWS) - 1
    latent_query, rope_query = _load_queries(
        *(query_TNH, entry, row, part * GROUP, num_rows),
        *(GROUP, PARTS * GROUP, LATENT, ROPE, PADDED_LATENT, PADDED_ROPE),
    )
    last_position = first_position + last_row // GROUP
    scale = scaled(scale, page_scale_1, 0)
    _, total, result = _walk(
        *(latent_query, rope_query, page_SH, table, first_position + row // GROUP),
        *(0, tl.minimum(last_position + 1, table_length), scale),
        *(LATENT, ROPE, PADDED_LATENT, PADDED_ROPE, PAGE, ROWS, SIZE),
    )
    column = tl.arange(0, PADDED_LATENT)
    inside = (row < num_rows)[:, None] & (column < LATENT)[None, :]
    head = (entry + row // GROUP) * (PARTS * GROUP) + part * GROUP + row % GROUP
    out_at = out_TNL + head[:, None] * LATENT + column[None, :]
    result /= total[:, None]
    result = scaled(result, page_scale_1, 0)
    tl.store(out_at, result.to(out_TNL.dtype.element_ty), mask=inside)
