"""Step inputs on the GPU: one launch, one program per row and one for what no row owns.

Reads the packet where the host wrote it; every loop ends at a number that the device knows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.step_rows import (
    PACKET_APPENDS,
    PACKET_HAS_MARKS,
    PACKET_ROWS,
    PacketLayout,
    PaddedRows,
    Ring,
    SlotTensors,
)

_NUM_ROWS = tl.constexpr(PACKET_ROWS)
_NUM_APPENDS = tl.constexpr(PACKET_APPENDS)
_APPENDS_AT_ONCE = tl.constexpr(64)


def step_inputs(
    ring: Ring,
    layout: PacketLayout,
    state: SlotTensors,
    padded: PaddedRows,
    page_size: int,
    padding_slot: int,
) -> None:
    shape = padded.shape
    _step_inputs_kernel[(shape.rows + 1,)](
        *(ring, layout, state, state.sizes),
        *(padded.batch, padded.rows, padded.row_T, padded.sample_N),
        *(len(ring.stamp_E), shape.rows, shape.k, len(padded.row_T), padding_slot),
        PAGE_SIZE=page_size,
        IS_UNIFORM=shape.is_uniform,
        WIDTH=triton.next_power_of_2(state.drafts_SK.shape[1] + 1),
        BLOCK=128 if shape.is_uniform else 1024,
        HAS_CLOCK=ring.turn_1.is_cuda,
        num_warps=1 if shape.is_uniform else 4,
    )


@triton.jit
def page_slots(state, sizes, slot, position, is_owned, PAGE_SIZE: tl.constexpr):
    """Flat KV slots of positions; -1 where an entry is unused or has no page."""
    is_owned &= position < sizes.max_model_len
    page_at = state.table_SP + slot.to(tl.int64) * sizes.table_stride + position // PAGE_SIZE
    page = tl.load(page_at, mask=is_owned, other=-1)
    return tl.where(page >= 0, page * PAGE_SIZE + position % PAGE_SIZE, -1)


@triton.jit
def _append_pages(packet, layout, num_appends, slot, is_every_slot, state, sizes):
    """Write the appends of one slot, or all of them, which serves slots without a row."""
    first = 0
    while first < num_appends:
        append = first + tl.arange(0, _APPENDS_AT_ONCE)
        is_append = append < num_appends
        # All three at once: each wait for the host's memory costs more than the words.
        append_slot = tl.load(packet + layout.append_slot + append, mask=is_append, other=-1)
        index = tl.load(packet + layout.append_index + append, mask=is_append, other=0)
        page = tl.load(packet + layout.append_page + append, mask=is_append, other=-1)
        is_mine = is_append & (is_every_slot | (append_slot == slot))
        row_at = state.table_SP + append_slot.to(tl.int64) * sizes.table_stride
        tl.store(row_at + index, page, mask=is_mine)
        first += _APPENDS_AT_ONCE


@triton.jit
def _extent(packet, layout, row, num_rows, shape, IS_UNIFORM: tl.constexpr):
    """Where a program's entries begin and end; the last program's are those behind all rows."""
    num_shape_rows, num_shape_drafts, num_entries = shape
    if IS_UNIFORM:
        begin = row * (num_shape_drafts + 1)
        end = begin + num_shape_drafts + 1
    else:
        # Padding rows begin where the last row ends, and so does the tail.
        known = tl.minimum(row, num_rows - 1)
        begin = tl.load(packet + layout.row_start + known, mask=known >= 0, other=0)
        end = begin + tl.load(packet + layout.planned + known, mask=known >= 0, other=0)
        begin = tl.where(row < num_rows, begin, end)
        has_next = row + 1 < num_rows
        next_begin = tl.load(packet + layout.row_start + row + 1, mask=has_next, other=0)
        end = tl.where(has_next, next_begin, end)
    return begin, tl.where(row == num_shape_rows, num_entries, end)


@triton.jit
def _fill_entries(
    batch, row_T, state, sizes, extent, owner, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Tokens, positions and page slots of the entries of one row."""
    begin, end = extent
    row, slot, start, committed, query_len = owner
    tokens = state.tokens_SL + slot.to(tl.int64) * sizes.tokens_stride
    drafts = state.drafts_SK + slot.to(tl.int64) * sizes.drafts_stride
    first = begin
    while first < end:
        entry = first + tl.arange(0, BLOCK)
        is_entry = entry < end
        offset = entry - begin
        is_owned = is_entry & (offset < query_len)
        is_draft = offset >= committed
        position = tl.where(is_owned, start + offset, 0)
        token = tl.load(tokens + position, mask=is_owned & ~is_draft, other=0)
        draft = tl.load(drafts + offset - committed, mask=is_owned & is_draft, other=0)
        page_slot = page_slots(state, sizes, slot, position, is_owned, PAGE_SIZE)
        position = tl.minimum(position, sizes.max_model_len - 1)
        tl.store(batch.token_T + entry, tl.where(is_draft, draft, token), mask=is_entry)
        tl.store(batch.position_T + entry, position, mask=is_entry)
        tl.store(batch.page_slot_T + entry, page_slot, mask=is_entry)
        tl.store(row_T + entry, tl.where(is_owned, row, -1), mask=is_entry)
        first += BLOCK


# What differs between the shapes of one engine stays outside tuples: Triton would specialize there.
_VARYING = ["ring_size", "num_shape_rows", "num_shape_drafts", "num_entries", "padding_slot"]


@triton.jit(do_not_specialize=_VARYING)
def _step_inputs_kernel(  # noqa: PLR0913
    ring,
    layout,
    state,
    sizes,
    batch,
    rows,
    row_T,
    sample_N,
    ring_size,
    num_shape_rows,
    num_shape_drafts,
    num_entries,
    padding_slot,
    PAGE_SIZE: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    is_tail = row == num_shape_rows
    ring_entry = tl.load(ring.turn_1) % ring_size
    if HAS_CLOCK:
        tl.store(ring.time_E2 + ring_entry * 2, tl.extra.cuda.globaltimer(), mask=row == 0)
    packet = ring.packet_EP + ring_entry * layout.num_words
    num_rows = tl.load(packet + _NUM_ROWS)
    num_appends = tl.load(packet + _NUM_APPENDS)
    # Read before it is known whether there is a row: the words exist, and one wait serves all.
    packet_row = tl.minimum(row, num_shape_rows - 1)
    slot = tl.load(packet + layout.slot + packet_row)
    planned = tl.load(packet + layout.planned + packet_row)
    samples = tl.load(packet + layout.samples + packet_row)
    is_row = row < num_rows
    slot = tl.where(is_row, slot, padding_slot)
    planned = tl.where(is_row, planned, 0)
    start = tl.load(state.num_computed_S + slot)
    num_tokens = tl.load(state.num_tokens_S + slot)
    room = tl.load(state.max_len_S + slot) - num_tokens - 1
    is_live = is_row & (tl.load(state.done_S + slot) == 0)
    committed = tl.minimum(planned, num_tokens - start)
    limit = tl.minimum(tl.minimum(planned - committed, room), num_shape_drafts)
    limit = tl.where(is_live, limit, 0)
    step = tl.arange(0, WIDTH)
    drafts = state.drafts_SK + slot.to(tl.int64) * sizes.drafts_stride
    draft = tl.load(drafts + step, mask=step < limit, other=-1)
    usable = tl.min(tl.where(draft < 0, step, WIDTH))  # up to the first that is none
    query_len = tl.where(is_live, committed + usable, 0)
    width = tl.where(is_live & (samples != 0), 1 + usable, 0)

    shape = (num_shape_rows, num_shape_drafts, num_entries)
    begin, end = _extent(packet, layout, row, num_rows, shape, IS_UNIFORM)
    _append_pages(packet, layout, num_appends, slot, is_tail, state, sizes)
    tl.debug_barrier()  # this row's pages are in the table before the row looks there
    owner = (row, slot, start, committed, query_len)
    _fill_entries(batch, row_T, state, sizes, (begin, end), owner, PAGE_SIZE, BLOCK)
    if is_tail:
        return
    tl.store(batch.slot_B + row, slot)
    tl.store(batch.row_start_B + row, begin)
    tl.store(batch.query_len_B + row, query_len)
    tl.store(batch.length_B + row, tl.where(is_live, start + query_len, 0))
    tl.store(rows.start_B + row, start)
    windows = rows.windows
    tl.store(windows.length_B + row, num_tokens)
    tl.store(windows.first_B + row, row * (num_shape_drafts + 1))
    tl.store(windows.width_B + row, width)
    draft = tl.where(step < usable, draft, -1)
    draft_at = windows.draft_BK + row * num_shape_drafts + step
    tl.store(draft_at, draft, mask=step < num_shape_drafts)
    sample = tl.where(step < width, begin + query_len - width + step, 0)
    sample_at = sample_N + row * (num_shape_drafts + 1) + step
    tl.store(sample_at, sample, mask=step <= num_shape_drafts)


def read_marks(ring: Ring, layout: PacketLayout, num_rows: int) -> tuple[Tensor, Tensor]:
    shape = (num_rows, layout.num_marks)
    length_BM, entry_BM = (
        torch.empty(shape, dtype=torch.int32, device=ring.device) for _ in range(2)
    )
    _marks_kernel[(1,)](
        *(ring.packet_EP, ring.turn_1, length_BM, entry_BM),
        *(len(ring.packet_EP), ring.packet_EP.stride(0)),
        *(layout.mark_len, layout.mark_entry, num_rows * layout.num_marks),
        NUM_ROWS=PACKET_ROWS,
        HAS_MARKS=PACKET_HAS_MARKS,
        MARKS=layout.num_marks,
        BLOCK=128,
        num_warps=4,
    )
    return length_BM, entry_BM


@triton.jit
def _marks_kernel(  # noqa: PLR0913
    packet_EP,
    turn_1,
    length_BM,
    entry_BM,
    num_entries,
    packet_stride,
    mark_len_at,
    mark_entry_at,
    num_words,
    NUM_ROWS: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    MARKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Steps without marks read two words of the packet."""
    packet = packet_EP + tl.load(turn_1) % num_entries * packet_stride
    has_marks = tl.load(packet + HAS_MARKS) != 0
    num_known = tl.where(has_marks, tl.load(packet + NUM_ROWS) * MARKS, 0)
    for first in range(0, num_words, BLOCK):
        word = first + tl.arange(0, BLOCK)
        is_known = word < tl.minimum(num_known, num_words)
        length = tl.load(packet + mark_len_at + word, mask=is_known, other=-1)
        entry = tl.load(packet + mark_entry_at + word, mask=is_known, other=-1)
        tl.store(length_BM + word, length, mask=word < num_words)
        tl.store(entry_BM + word, entry, mask=word < num_words)
