"""Paged attention for rows of few queries: decode tokens and verify windows.

A work item is one KV head over one span of a row's KV; the queries of the row times the heads of
the group are the rows of its tile. Who finishes a row's last span merges them all, in order of
their positions: results do not depend on who that is, nor on anything outside the row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.attention import AttentionBatch, AttentionWork
from paceline.kernels.attention_work_triton import MOST_KV_HEADS, SPAN, span_rows

LOG2_E = 1.4426950408889634


class SpanTiles(NamedTuple):
    """How the kernel is built and how much of the GPU it takes."""

    block: int  # KV positions at once
    num_warps: int
    num_stages: int
    programs_per_sm: int


def span_tiles(dtype: torch.dtype, padded_size: int) -> SpanTiles:
    if dtype == torch.float32:  # no tensor cores: small tiles, for tests and tiny models
        block = 32 if padded_size <= 128 else 16
        return SpanTiles(block, num_warps=4, num_stages=2, programs_per_sm=2)
    if padded_size > 128:
        return SpanTiles(block=32, num_warps=4, num_stages=3, programs_per_sm=2)
    return SpanTiles(block=64, num_warps=4, num_stages=3, programs_per_sm=2)


def attend_spans(
    qkv_TD: Tensor,
    key_NSH: Tensor,
    value_NSH: Tensor,
    batch: AttentionBatch,
    work: AttentionWork,
    scale: float,
    out_TD: Tensor,
) -> None:
    """Fill the outputs of short rows, and those of entries that nobody owns with zeros."""
    num_kv_heads, _, head_size = key_NSH.shape
    group = batch.group_size
    padded_size = max(16, triton.next_power_of_2(head_size))
    rows = span_rows(group)
    tiles = span_tiles(qkv_TD.dtype, padded_size)
    partial_rows = (min(batch.max_query_len or rows, rows // group)) * group
    shape = (work.num_partials, num_kv_heads, partial_rows)
    sums = torch.empty((*shape, head_size), dtype=torch.float32, device=qkv_TD.device)
    states = torch.empty((*shape, 2), dtype=torch.float32, device=qkv_TD.device)
    _span_kernel[(num_programs(qkv_TD.device, tiles, len(work.split_E8) * num_kv_heads),)](
        *(qkv_TD, key_NSH, value_NSH, out_TD, sums, states),
        *(work.split_E8, work.count_2, work.is_dead_T, work.ticket_EN, batch.table_SP),
        *(scale * LOG2_E, len(qkv_TD), qkv_TD.stride(0), key_NSH.stride(0)),
        *(batch.table_SP.stride(0), partial_rows),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD=head_size,
        PADDED=padded_size,
        PAGE=batch.page_size,
        SPAN_LENGTH=SPAN,
        ROWS=rows,
        BLOCK=tiles.block,
        TICKETS=MOST_KV_HEADS,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def num_programs(device: torch.device, tiles: SpanTiles, most_items: int) -> int:
    """As many as run at once: they share the items, whose number only the device knows."""
    if device.type != "cuda":  # the interpreter
        return min(3, most_items)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return min(num_sms * tiles.programs_per_sm, most_items)


@triton.jit(do_not_specialize=["num_entries", "partial_rows"])
def _span_kernel(  # noqa: PLR0913
    qkv_TD,
    key_NSH,
    value_NSH,
    out_TD,
    sums_ENRH,
    states_ENR2,
    split_E8,
    count_2,
    is_dead_T,
    ticket_EN,
    table_SP,
    scale,
    num_entries,
    qkv_stride,
    cache_stride,
    table_stride,
    partial_rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN_LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TICKETS: tl.constexpr,
):
    num_items = tl.load(count_2) * KV_HEADS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    # A program's next item is on its way while it works on one; the first may not exist.
    record = _load_item(split_E8, tl.program_id(0) // KV_HEADS, True)
    for index in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item, head = index // KV_HEADS, index % KV_HEADS
        entry, num_queries, first_position, begin, end, slot, num_spans, first_item = record
        after = index + tl.num_programs(0)
        record = _load_item(split_E8, after // KV_HEADS, after < num_items)
        entry = entry.to(tl.int64)
        position = first_position + row // GROUP
        table = table_SP + slot.to(tl.int64) * table_stride
        inside = (row < num_queries * GROUP)[:, None] & (column < HEAD)[None, :]
        # The heads of a group lie side by side in a query's entry.
        offset = head * GROUP * HEAD + (row % GROUP)[:, None] * HEAD + column[None, :]
        query_at = qkv_TD + (entry + row // GROUP)[:, None] * qkv_stride + offset
        query = tl.load(query_at, mask=inside, other=0.0)
        key = key_NSH + cache_stride.to(tl.int64) * head
        value = value_NSH + cache_stride.to(tl.int64) * head

        top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        result = tl.zeros((ROWS, PADDED), dtype=tl.float32)
        # One span, except where a row's partial results found no room. (Triton 3.6 takes a lower
        # bound that changes from item to item for a constant: so this loop begins at 0.)
        for passed in range(0, end - begin, SPAN_LENGTH):
            span = begin + passed
            span_top, span_total, span_result = _attend_span(
                query,
                key,
                value,
                table,
                position,
                span,
                tl.minimum(span + SPAN_LENGTH, end),
                scale,
                HEAD,
                PADDED,
                PAGE,
                ROWS,
                BLOCK,
            )
            top, total, result = _merge(top, total, result, span_top, span_total, span_result)

        is_last = True
        if num_spans > 1:
            partial = (item * KV_HEADS + head) * partial_rows + row.to(tl.int64)
            kept = row < num_queries * GROUP
            tl.store(states_ENR2 + partial * 2, top, mask=kept)
            tl.store(states_ENR2 + partial * 2 + 1, total, mask=kept)
            tl.store(sums_ENRH + partial[:, None] * HEAD + column[None, :], result, mask=inside)
            tl.debug_barrier()  # every thread's part is written before the ticket is drawn
            ticket = ticket_EN + first_item * TICKETS + head
            is_last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == num_spans - 1
            if is_last:
                tl.store(ticket, 0)
                partial = (first_item * KV_HEADS + head) * partial_rows + row.to(tl.int64)
                total, result = _merge_all(
                    states_ENR2 + partial * 2,
                    sums_ENRH + partial[:, None] * HEAD + column[None, :],
                    kept,
                    inside,
                    num_spans,
                    KV_HEADS * partial_rows,
                    HEAD,
                    ROWS,
                    PADDED,
                )
        if is_last:
            # A query that sees no key at all gets 0; NaN stays.
            result /= tl.where(total == 0.0, 1.0, total)[:, None]
            out_at = out_TD + (entry + row // GROUP)[:, None] * (KV_HEADS * GROUP * HEAD) + offset
            tl.store(out_at, result.to(out_TD.dtype.element_ty), mask=inside)
    _clear_dead(out_TD, is_dead_T, num_entries, KV_HEADS * GROUP * HEAD)


@triton.jit
def _load_item(split_E8, item, exists):
    """The eight words of a work item, as attention_work_triton writes them."""
    at = split_E8 + item * 8
    return (
        tl.load(at, mask=exists, other=0),
        tl.load(at + 1, mask=exists, other=0),
        tl.load(at + 2, mask=exists, other=0),
        tl.load(at + 3, mask=exists, other=0),
        tl.load(at + 4, mask=exists, other=0),
        tl.load(at + 5, mask=exists, other=0),
        tl.load(at + 6, mask=exists, other=0),
        tl.load(at + 7, mask=exists, other=0),
    )


@triton.jit
def _clear_dead(out_TD, is_dead_T, num_entries, WIDTH: tl.constexpr):
    """Zeros for entries without an owner; the last programs, which have least to do, begin."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    for first in range(program * 16, num_entries, tl.num_programs(0) * 16):
        entry = first + tl.arange(0, 16)
        is_dead = tl.load(is_dead_T + entry, mask=entry < num_entries, other=0) != 0
        if tl.max(is_dead.to(tl.int32)) > 0:
            for start in range(0, WIDTH, 128):
                column = start + tl.arange(0, 128)
                out_at = out_TD + entry.to(tl.int64)[:, None] * WIDTH + column[None, :]
                zeros = tl.zeros((16, 128), dtype=out_TD.dtype.element_ty)
                tl.store(out_at, zeros, mask=is_dead[:, None] & (column < WIDTH)[None, :])


@triton.jit
def pages_at(table, begin, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The page of each position of a block. Where there is none, any other does: nobody looks."""
    at = begin + tl.arange(0, BLOCK)
    page = tl.load(table + at.to(tl.uint32) // PAGE, mask=at < end, other=0)
    return tl.maximum(page, 0)


@triton.jit
def row_offsets(page, at, PAGE: tl.constexpr, HEAD: tl.constexpr):
    """Where positions lie among a head's keys or values."""
    return (page * PAGE + (at.to(tl.uint32) % PAGE).to(tl.int32)) * HEAD


@triton.jit
def _attend_span(  # noqa: PLR0913
    query,
    key,
    value,
    table,
    position,
    begin,
    end,
    scale,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Highest score, sum of weights and weighted values of one span, by query row."""
    column = tl.arange(0, PADDED)
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    result = tl.zeros((ROWS, PADDED), dtype=tl.float32)
    page = pages_at(table, begin, end, PAGE, BLOCK)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        # What lies past the end may be NaN, which no weight of 0 takes away.
        inside = (at < end)[:, None] & (column < HEAD)[None, :]
        offset = row_offsets(page, at, PAGE, HEAD)[:, None] + column[None, :]
        # One block ahead, so that no load of keys waits for a load of pages.
        page = pages_at(table, first + BLOCK, end, PAGE, BLOCK)
        keys = tl.load(key + offset, mask=inside, other=0.0)
        score = tl.dot(query, tl.trans(keys), input_precision="ieee")
        is_seen = (at[None, :] <= position[:, None]) & (at < end)[None, :]
        score = tl.where(is_seen, score * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that sees nothing yet
        weight = tl.exp2(score - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(weight, 1)
        values = tl.load(value + offset, mask=inside, other=0.0)
        result *= keep[:, None]
        result = tl.dot(weight.to(values.dtype), values, result, input_precision="ieee")
        top = new_top
    return top, total, result


@triton.jit
def _merge(top, total, result, span_top, span_total, span_result):
    """What was merged so far and one more span, always in this order."""
    new_top = tl.maximum(top, span_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep, take = tl.exp2(top - base), tl.exp2(span_top - base)
    total = total * keep + span_total * take
    result = result * keep[:, None] + span_result * take[:, None]
    return new_top, total, result


@triton.jit
def _merge_all(  # noqa: PLR0913
    state_at,
    sum_at,
    kept,
    inside,
    num_spans,
    stride,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """All spans of a row in order, four loads in flight at a time."""
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    result = tl.zeros((ROWS, PADDED), dtype=tl.float32)
    for first in range(0, num_spans, 4):
        for i in tl.static_range(4):
            span = first + i
            exists = kept & (span < num_spans)
            # Others wrote these: read them where all multiprocessors meet.
            at = state_at + span * stride * 2
            span_top = tl.load(at, mask=exists, other=float("-inf"), cache_modifier=".cg")
            span_total = tl.load(at + 1, mask=exists, other=0.0, cache_modifier=".cg")
            span_result = tl.load(
                sum_at + span * stride * HEAD,
                mask=inside & (span < num_spans),
                other=0.0,
                cache_modifier=".cg",
            )
            top, total, result = _merge(top, total, result, span_top, span_total, span_result)
    return total, result
