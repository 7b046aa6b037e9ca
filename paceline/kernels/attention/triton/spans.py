"""Paged attention for rows of few queries: decode tokens and verify windows.

A work item is one KV head over one span of a row's KV; the queries of the row times the heads of
the group are the rows of its tile. KV is weighed in blocks of 64 positions. Blocks are merged in
order within stretches of 256, stretches within reaches of 1024 or more, reaches with each other.
A span is one of these or the whole row, and every way of cutting merges in the same order: a
query's bits depend on its own sequence alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.attention.reference import AttentionBatch, AttentionWork
from paceline.kernels.attention.triton.work import (
    BEFORE,
    BLOCK,
    PROGRAMS_PER_SM,
    REACH,
    STRETCH,
    PagedHeads,
    span_rows,
)
from paceline.kernels.gpu.device import num_multiprocessors
from paceline.kernels.gpu.triton import dependent, wait_for_input
from paceline.kernels.kv_codes.triton import numbers, scaled

LOG2_E = 1.4426950408889634
PARTS = STRETCH // BLOCK  # of a stretch, and of a reach
assert REACH // STRETCH == PARTS
PARTIALS_AT_ONCE = 16  # that are loaded together, if they fit in registers
MANY_RESULTS = 1024  # entries times KV heads for which there is no longer a program each


class SpanTiles(NamedTuple):
    """How the kernel is built and how much of the GPU it takes."""

    num_warps: int
    num_stages: int
    programs_per_sm: int
    most_registers: int | None = None  # per thread, so that `programs_per_sm` programs fit


def span_tiles(dtype: torch.dtype, padded_size: int, tiles_per_sm: float) -> SpanTiles:
    """By the shared memory that keys and values of a few blocks take, and by how many query tiles
    there may be for a multiprocessor: bits do not depend on any of it."""
    num_bytes = 2 * BLOCK * padded_size * dtype.itemsize
    if num_bytes > 2**15:
        num_warps = 8 if dtype == torch.float32 else 4  # no tensor cores: many registers
        return SpanTiles(num_warps, num_stages=2 if num_bytes <= 2**16 else 1, programs_per_sm=1)
    # Products behind them need what they leave of shared memory: with three blocks of 128 numbers
    # on their way, those of few rows ran at half their rate (bench/h200_kernels.md).
    few = SpanTiles(
        4,
        num_stages=3 if num_bytes <= 2**14 else 2,
        programs_per_sm=PROGRAMS_PER_SM,
        most_registers=168,
    )
    if tiles_per_sm <= few.programs_per_sm:
        return few
    # They would have to go around twice: one more at once is worth more than registers.
    return SpanTiles(4, num_stages=2, programs_per_sm=4, most_registers=128)


def attend_spans(
    qkv_TD: Tensor,
    pages: PagedHeads,
    batch: AttentionBatch,
    work: AttentionWork,
    scale: float,
    out_TD: Tensor,
    launch: dict[str, Any],
) -> None:
    """Fill the outputs of short rows; entries that belong to no row get zeros."""
    num_kv_heads, _, head_size = pages.key_NSH.shape
    group = batch.group_size
    padded_size = max(16, triton.next_power_of_2(head_size))
    rows = span_rows(group)
    most_tiles = (len(work.span_E8) - work.num_partials) * num_kv_heads
    num_sms = num_multiprocessors(qkv_TD.device)
    tiles = span_tiles(qkv_TD.dtype, padded_size, most_tiles / num_sms)
    partial_rows = (min(batch.max_query_len or rows, rows // group)) * group
    shape = (work.num_partials, num_kv_heads, partial_rows)
    sums = torch.empty((*shape, head_size), dtype=torch.float32, device=qkv_TD.device)
    states = torch.empty((*shape, 2), dtype=torch.float32, device=qkv_TD.device)
    # As many as run at once: they share the items, whose number only the device knows.
    most_programs = num_sms * tiles.programs_per_sm
    _span_kernel[(min(most_programs, len(work.span_E8) * num_kv_heads),)](
        *(qkv_TD, *pages, out_TD, sums, states),
        *(work.span_E8, work.count_2, batch.table_SP, scale * LOG2_E),
        *(qkv_TD.stride(0), pages.key_NSH.stride(0), batch.table_SP.stride(0), partial_rows),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD=head_size,
        PADDED=padded_size,
        PAGE=batch.page_size,
        ROWS=rows,
        SIZE=BLOCK,
        STRETCH_SIZE=STRETCH,
        WINDOW=batch.window or 0,
        IS_CAUSAL=batch.is_causal,
        HAS_ROW_WINDOW=batch.has_row_window,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.most_registers,
        **launch,
    )
    at_once = _entries_at_once(len(qkv_TD) * num_kv_heads)
    size = triton.next_power_of_2(group) * padded_size  # of a partial result, held in registers
    _merge_kernel[(triton.cdiv(len(qkv_TD), at_once), num_kv_heads)](
        *(out_TD, sums, states, work.merge_T4, pages.value_scale_N, partial_rows, len(qkv_TD)),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD=head_size,
        PADDED_GROUP=triton.next_power_of_2(group),
        PADDED=padded_size,
        PARTS=PARTS,
        AT_ONCE=min(PARTIALS_AT_ONCE, max(PARTS, PARTIALS_AT_ONCE * 1024 // size)),
        ENTRIES=at_once,
        num_warps=min(max(4, size // 512), 16),
        **dependent(),
    )


def _entries_at_once(num_results: int) -> int:
    """Entries that one program merges. The more entries there are, the fewer need merging."""
    if num_results < MANY_RESULTS:
        return 1
    return 4 if num_results < 8 * MANY_RESULTS else 8


@triton.jit(do_not_specialize=["partial_rows"])
def _span_kernel(  # noqa: PLR0913
    qkv_TD,
    key_NSH,
    value_NSH,
    key_scale_N,
    value_scale_N,
    out_TD,
    sums_ENRH,
    states_ENR2,
    span_E8,
    count_2,
    table_SP,
    scale,
    qkv_stride,
    cache_stride,
    table_stride,
    partial_rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    STRETCH_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_ROW_WINDOW: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    # The lists are older than the kernel in front, so they need not wait for it.
    num_items = tl.load(count_2) * KV_HEADS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    # A program's next item is on its way while it works on one; the first may not exist.
    record = _load_item(span_E8, tl.program_id(0) // KV_HEADS, tl.program_id(0) < num_items)
    next_page = _first_pages(table_SP, table_stride, record, PAGE, SIZE)
    wait_for_input(IS_DEPENDENT)
    for index in range(tl.program_id(0), num_items, tl.num_programs(0)):
        head = index % KV_HEADS
        entry, num_queries, first_position, begin, end, slot, partial, reach = record
        position = first_position + row // GROUP
        window_at = position
        if HAS_ROW_WINDOW:
            window_at = first_position - num_queries // BEFORE + 0 * row
            num_queries = num_queries % BEFORE
        after = index + tl.num_programs(0)
        record = _load_item(span_E8, after // KV_HEADS, after < num_items)
        page = next_page
        next_page = _first_pages(table_SP, table_stride, record, PAGE, SIZE)
        entry = entry.to(tl.int64)
        inside = (row < num_queries * GROUP)[:, None] & (column < HEAD)[None, :]
        # The heads of a group lie side by side in a query's entry.
        offset = head * GROUP * HEAD + (row % GROUP)[:, None] * HEAD + column[None, :]
        query_at = qkv_TD + (entry + row // GROUP)[:, None] * qkv_stride + offset
        query = tl.load(query_at, mask=inside, other=0.0)
        top, total, result = _walk(
            query,
            key_NSH + cache_stride.to(tl.int64) * head,
            value_NSH + cache_stride.to(tl.int64) * head,
            table_SP + slot.to(tl.int64) * table_stride,
            page,
            position,
            window_at,
            begin,
            end,
            reach,
            scaled(scale, key_scale_N, head),
            HEAD,
            PADDED,
            PAGE,
            ROWS,
            SIZE,
            STRETCH_SIZE,
            WINDOW,
            IS_CAUSAL,
        )
        if partial < 0:
            out_at = out_TD + (entry + row // GROUP)[:, None] * (KV_HEADS * GROUP * HEAD) + offset
            # A query that sees no key at all gets 0; NaN stays.
            result /= tl.where(total == 0.0, 1.0, total)[:, None]
            result = scaled(result, value_scale_N, head)
            tl.store(out_at, result.to(out_TD.dtype.element_ty), mask=inside)
        else:
            place = (partial * KV_HEADS + head) * partial_rows + row.to(tl.int64)
            tl.store(states_ENR2 + place * 2, top, mask=row < num_queries * GROUP)
            tl.store(states_ENR2 + place * 2 + 1, total, mask=row < num_queries * GROUP)
            tl.store(sums_ENRH + place[:, None] * HEAD + column[None, :], result, mask=inside)


@triton.jit
def _load_item(span_E8, item, exists):
    """The words of a work item, as `work` writes them."""
    at = span_E8 + item * 8
    return (
        tl.load(at, mask=exists, other=0),
        tl.load(at + 1, mask=exists, other=0),
        tl.load(at + 2, mask=exists, other=0),
        tl.load(at + 3, mask=exists, other=0),
        tl.load(at + 4, mask=exists, other=0),
        tl.load(at + 5, mask=exists, other=0),
        tl.load(at + 6, mask=exists, other=0),
        tl.load(at + 7, mask=exists, other=1),
    )


@triton.jit
def _first_pages(table_SP, table_stride, record, PAGE: tl.constexpr, SIZE: tl.constexpr):
    """The pages of an item's first block."""
    _, _, _, begin, end, slot, _, _ = record
    table = table_SP + slot.to(tl.int64) * table_stride
    return pages_at(table, begin + tl.arange(0, SIZE), end, PAGE)


@triton.jit
def pages_at(table, at, end, PAGE: tl.constexpr):
    """The pages of positions; page 0 where there is none, and its values are masked."""
    page = tl.load(table + at.to(tl.uint32) // PAGE, mask=at < end, other=0)
    return tl.maximum(page, 0)


@triton.jit
def row_offsets(page, at, PAGE: tl.constexpr, HEAD: tl.constexpr):
    """Where positions lie among a head's keys or values."""
    return (page * PAGE + (at.to(tl.uint32) % PAGE).to(tl.int32)) * HEAD


@triton.jit
def _walk(  # noqa: PLR0913
    query,
    key,
    value,
    table,
    page,
    position,
    window_at,
    begin,
    end,
    reach,
    scale,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    STRETCH_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """Highest score, sum of weights and weighted values of a span, by query row.

    `page` holds the pages of the first block.
    """
    column = tl.arange(0, PADDED)
    top, total, result = _nothing(ROWS, PADDED)
    far_top, far_total, far_result = _nothing(ROWS, PADDED)
    run_top, run_total, run_result = _nothing(ROWS, PADDED)
    into_reach = begin % reach
    # Triton 3.6 takes a lower bound that an outer loop changes for a constant: begin at 0.
    for passed in range(0, end - begin, SIZE):
        at = begin + passed + tl.arange(0, SIZE)
        # What lies past the end, or behind the window, may be NaN: no weight of 0 takes it away.
        is_key = at < end
        if WINDOW > 0:
            is_key = is_key & (at > tl.min(window_at, 0) - WINDOW)
        inside = is_key[:, None] & (column < HEAD)[None, :]
        offset = row_offsets(page, at, PAGE, HEAD)[:, None] + column[None, :]
        # One block ahead, so that no load of keys waits for a load of pages.
        page = pages_at(table, at + SIZE, end, PAGE)
        # Both at once: values are under way while scores are weighed.
        keys = numbers(tl.load(key + offset, mask=inside, other=0), query.dtype)
        values = numbers(tl.load(value + offset, mask=inside, other=0), query.dtype)
        score = tl.dot(query, tl.trans(keys), input_precision="ieee")
        is_seen = (at < end)[None, :] & ((at[None, :] <= position[:, None]) | (not IS_CAUSAL))
        if WINDOW > 0:
            is_seen = is_seen & (at[None, :] > window_at[:, None] - WINDOW)
        score = tl.where(is_seen, score * scale, float("-inf"))
        block_top = tl.max(score, 1)
        weight = tl.exp2(score - _base(block_top)[:, None])
        block_total = tl.sum(weight, 1)
        block_result = tl.dot(weight.to(values.dtype), values, input_precision="ieee")
        run_top, run_total, run_result = _merge(
            run_top, run_total, run_result, block_top, block_total, block_result
        )
        # Spans begin where stretches do, or are shorter.
        into_reach += SIZE
        is_stretch = (into_reach % STRETCH_SIZE == 0) | (into_reach == reach)
        if is_stretch & (passed + SIZE < end - begin):
            far_top, far_total, far_result = _merge(
                far_top, far_total, far_result, run_top, run_total, run_result
            )
            run_top, run_total, run_result = _nothing(ROWS, PADDED)
            if into_reach == reach:
                top, total, result = _merge(top, total, result, far_top, far_total, far_result)
                far_top, far_total, far_result = _nothing(ROWS, PADDED)
                into_reach -= reach
    # Nothing merged with something is that something: short spans save the merges.
    if end - begin > STRETCH_SIZE:
        run_top, run_total, run_result = _merge(
            far_top, far_total, far_result, run_top, run_total, run_result
        )
        if begin // reach != (end - 1) // reach:
            run_top, run_total, run_result = _merge(
                top, total, result, run_top, run_total, run_result
            )
    return run_top, run_total, run_result


@triton.jit
def _nothing(ROWS: tl.constexpr, PADDED: tl.constexpr):
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    return top, tl.zeros((ROWS,), dtype=tl.float32), tl.zeros((ROWS, PADDED), dtype=tl.float32)


@triton.jit
def _base(top):
    """What to take off scores: not infinity where a row has seen nothing yet."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _merge(top, total, result, other_top, other_total, other_result):
    """What was merged so far and what comes next, always in this order. Nothing changes no bit."""
    new_top = tl.maximum(top, other_top)
    base = _base(new_top)
    keep, take = tl.exp2(top - base), tl.exp2(other_top - base)
    total = total * keep + other_total * take
    result = result * keep[:, None] + other_result * take[:, None]
    return new_top, total, result


@triton.jit(do_not_specialize=["partial_rows", "num_entries"])
def _merge_kernel(  # noqa: PLR0913
    out_TD,
    sums_ENRH,
    states_ENR2,
    merge_T4,
    value_scale_N,
    partial_rows,
    num_entries,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ENTRIES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Merge partial results of entries and a KV head; entries of no row get zeros."""
    first = tl.program_id(0) * ENTRIES
    entry = first + tl.arange(0, ENTRIES)
    num_spans = tl.load(merge_T4 + entry * 4 + 1, mask=entry < num_entries, other=0)
    wait_for_input(IS_DEPENDENT)
    if tl.max(tl.abs(num_spans), 0) > 0:
        for i in range(ENTRIES):
            _merge_entry(
                *(out_TD, sums_ENRH, states_ENR2, merge_T4, value_scale_N),
                *(partial_rows, num_entries, first + i, tl.program_id(1)),
                *(KV_HEADS, GROUP, HEAD, PADDED_GROUP, PADDED, PARTS, AT_ONCE),
            )


@triton.jit
def _merge_entry(  # noqa: PLR0913
    out_TD,
    sums_ENRH,
    states_ENR2,
    merge_T4,
    value_scale_N,
    partial_rows,
    num_entries,
    entry,
    head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    merge_at = merge_T4 + entry * 4
    exists = entry < num_entries
    num_spans = tl.load(merge_at + 1, mask=exists, other=0)
    if num_spans != 0:
        first, how, first_row = tl.load(merge_at), tl.load(merge_at + 2), tl.load(merge_at + 3)
        row = tl.arange(0, PADDED_GROUP)
        column = tl.arange(0, PADDED)
        inside = (row < GROUP)[:, None] & (column < HEAD)[None, :]
        stride = KV_HEADS * partial_rows
        place = first.to(tl.int64) * stride + head * partial_rows + first_row + row
        state_at = states_ENR2 + place * 2
        sum_at = sums_ENRH + place[:, None] * HEAD + column[None, :]
        is_row = row < GROUP
        top, total, result = _nothing(PADDED_GROUP, PADDED)
        if how == 0:  # reaches
            for first_span in range(0, num_spans, AT_ONCE):
                parts = _load_partials(
                    *(state_at, sum_at, first_span, num_spans, stride, is_row, HEAD, AT_ONCE)
                )
                if are_loaded(first, first_span):
                    for i in tl.static_range(AT_ONCE):
                        top, total, result = _merge(top, total, result, *parts[i])
        else:  # blocks of stretches, or stretches of reaches
            before = how // 4  # stretches that the first reach lacks
            few: tl.constexpr = max(AT_ONCE // 2, PARTS)
            for first_span in range(-before, num_spans, few):
                parts = _load_partials(
                    *(state_at, sum_at, first_span, num_spans, stride, is_row, HEAD, few)
                )
                if are_loaded(first, first_span):
                    for first_part in tl.static_range(0, few, PARTS):
                        run_top, run_total, run_result = _nothing(PADDED_GROUP, PADDED)
                        for i in tl.static_range(PARTS):
                            run_top, run_total, run_result = _merge(
                                run_top, run_total, run_result, *parts[first_part + i]
                            )
                        top, total, result = _merge(
                            top, total, result, run_top, run_total, run_result
                        )
        result /= tl.where(total == 0.0, 1.0, total)[:, None]
        result = scaled(result, value_scale_N, head)
        width = KV_HEADS * GROUP * HEAD
        out_at = out_TD + entry.to(tl.int64) * width + head * GROUP * HEAD
        out_at += row[:, None] * HEAD + column[None, :]
        tl.store(out_at, result.to(out_TD.dtype.element_ty), mask=inside)


@triton.jit
def are_loaded(first, first_span):
    """True, which no compiler knows: loads stay in front of the branch, all on their way at once.

    Else the assembler puts them between the merges, two or three ahead, and every partial result
    costs the latency of the L2 cache.
    """
    return first + first_span > -(1 << 20)


@triton.jit
def _load_partials(
    state_at, sum_at, first, num_spans, stride, is_row, HEAD: tl.constexpr, COUNT: tl.constexpr
):
    parts = ()
    for i in tl.static_range(COUNT):
        loaded = _load_partial(state_at, sum_at, first + i, num_spans, stride, is_row, HEAD)
        parts = parts + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
    return parts


@triton.jit
def _load_partial(state_at, sum_at, span, num_spans, stride, is_row, HEAD: tl.constexpr):
    """A partial result; nothing where there is none."""
    exists = is_row & (span >= 0) & (span < num_spans)
    top = tl.load(state_at + span * stride * 2, mask=exists, other=float("-inf"))
    total = tl.load(state_at + span * stride * 2 + 1, mask=exists, other=0.0)
    column = tl.arange(0, sum_at.shape[1])
    inside = exists[:, None] & (column < HEAD)[None, :]
    return top, total, tl.load(sum_at + span * stride * HEAD, mask=inside, other=0.0)
