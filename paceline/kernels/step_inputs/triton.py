"""Step inputs on the GPU: one launch, one program per row and one for what no row owns.

Reads the packet where the host wrote it; every loop ends at a number that the device knows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.step_rows import PacketLayout, PaddedRows, Ring, SlotTensors

APPENDS_AT_ONCE = 64


def step_inputs(
    ring: Ring,
    layout: PacketLayout,
    state: SlotTensors,
    padded: PaddedRows,
    page_size: int,
    padding_slot: int,
) -> None:
    batch, shape, rows = padded.batch, padded.shape, padded.rows
    windows = rows.windows
    _step_inputs_kernel[(shape.rows + 1,)](
        *(ring.packet_EP, ring.time_E2, ring.turn_1),
        *(state.tokens_SL, state.num_tokens_S, state.num_computed_S, state.done_S),
        *(state.max_len_S, state.drafts_SK, state.table_SP),
        *(batch.token_T, batch.position_T, batch.page_slot_T, padded.row_T),
        *(batch.slot_B, batch.row_start_B, batch.query_len_B, batch.length_B),
        *(rows.start_B, windows.length_B, windows.first_B, windows.width_B, windows.draft_BK),
        *(padded.sample_N,),
        *(len(ring.packet_EP), ring.packet_EP.stride(0)),
        *(layout.slot, layout.planned, layout.samples, layout.row_start),
        *(layout.append_slot, layout.append_index, layout.append_page),
        *(shape.rows, shape.k, len(batch.token_T), padding_slot),
        *(state.tokens_SL.shape[1], state.tokens_SL.stride(0)),
        *(state.drafts_SK.stride(0), state.table_SP.stride(0)),
        NUM_ROWS=layout.NUM_ROWS,
        NUM_APPENDS=layout.NUM_APPENDS,
        PAGE_SIZE=page_size,
        IS_UNIFORM=shape.is_uniform,
        WIDTH=triton.next_power_of_2(state.drafts_SK.shape[1] + 1),
        APPENDS=APPENDS_AT_ONCE,
        BLOCK=128 if shape.is_uniform else 1024,
        HAS_CLOCK=ring.turn_1.is_cuda,
        num_warps=1 if shape.is_uniform else 4,
    )


@triton.jit
def page_slots(table_SP, table_stride, slot, position, is_owned, max_model_len, page_size):
    """Flat KV slots of positions; -1 where there is no page, or nobody to write one."""
    is_owned &= position < max_model_len
    page_at = table_SP + slot.to(tl.int64) * table_stride + position // page_size
    page = tl.load(page_at, mask=is_owned, other=-1)
    return tl.where(page >= 0, page * page_size + position % page_size, -1)


@triton.jit
def _append_pages(  # noqa: PLR0913
    packet,
    num_appends,
    append_slot_at,
    append_index_at,
    append_page_at,
    slot,
    is_every_slot,
    table_SP,
    table_stride,
    APPENDS: tl.constexpr,
):
    """Write the appends of one slot, or all of them (who has no row is served that way)."""
    first = 0
    while first < num_appends:
        append = first + tl.arange(0, APPENDS)
        is_append = append < num_appends
        # All three at once: each wait for the host's memory costs more than the words.
        append_slot = tl.load(packet + append_slot_at + append, mask=is_append, other=-1)
        index = tl.load(packet + append_index_at + append, mask=is_append, other=0)
        page = tl.load(packet + append_page_at + append, mask=is_append, other=-1)
        is_mine = is_append & (is_every_slot | (append_slot == slot))
        tl.store(table_SP + append_slot.to(tl.int64) * table_stride + index, page, mask=is_mine)
        first += APPENDS


@triton.jit
def _extent(  # noqa: PLR0913
    packet,
    planned_at,
    row_start_at,
    row,
    num_rows,
    num_shape_rows,
    num_shape_drafts,
    num_entries,
    IS_UNIFORM: tl.constexpr,
):
    """Where a program's entries begin and end; the last program's are those behind all rows."""
    if IS_UNIFORM:
        begin = row * (num_shape_drafts + 1)
        end = begin + num_shape_drafts + 1
    else:
        # Rows of nobody begin where the last row ends, and so does the tail.
        known = tl.minimum(row, num_rows - 1)
        begin = tl.load(packet + row_start_at + known, mask=known >= 0, other=0)
        end = begin + tl.load(packet + planned_at + known, mask=known >= 0, other=0)
        begin = tl.where(row < num_rows, begin, end)
        has_next = row + 1 < num_rows
        next_begin = tl.load(packet + row_start_at + row + 1, mask=has_next, other=0)
        end = tl.where(has_next, next_begin, end)
    return begin, tl.where(row == num_shape_rows, num_entries, end)


@triton.jit
def _fill_entries(  # noqa: PLR0913
    token_T,
    position_T,
    page_slot_T,
    row_T,
    tokens,
    drafts,
    table_SP,
    table_stride,
    begin,
    end,
    row,
    slot,
    start,
    committed,
    query_len,
    max_model_len,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
        page_slot = page_slots(
            table_SP, table_stride, slot, position, is_owned, max_model_len, PAGE_SIZE
        )
        tl.store(token_T + entry, tl.where(is_draft, draft, token), mask=is_entry)
        tl.store(position_T + entry, tl.minimum(position, max_model_len - 1), mask=is_entry)
        tl.store(page_slot_T + entry, page_slot, mask=is_entry)
        tl.store(row_T + entry, tl.where(is_owned, row, -1), mask=is_entry)
        first += BLOCK


_SIZES_THAT_VARY = [
    *("ring_size", "packet_stride", "slot_at", "planned_at", "samples_at", "row_start_at"),
    *("append_slot_at", "append_index_at", "append_page_at"),
    *("num_shape_rows", "num_shape_drafts", "num_entries", "padding_slot"),
]


@triton.jit(do_not_specialize=_SIZES_THAT_VARY)
def _step_inputs_kernel(  # noqa: PLR0913
    packet_EP,
    time_E2,
    turn_1,
    tokens_SL,
    num_tokens_S,
    num_computed_S,
    done_S,
    max_len_S,
    drafts_SK,
    table_SP,
    token_T,
    position_T,
    page_slot_T,
    row_T,
    slot_B,
    row_start_B,
    query_len_B,
    length_B,
    start_B,
    num_tokens_B,
    first_B,
    width_B,
    draft_BK,
    sample_N,
    ring_size,
    packet_stride,
    slot_at,
    planned_at,
    samples_at,
    row_start_at,
    append_slot_at,
    append_index_at,
    append_page_at,
    num_shape_rows,
    num_shape_drafts,
    num_entries,
    padding_slot,
    max_model_len,
    tokens_stride,
    drafts_stride,
    table_stride,
    NUM_ROWS: tl.constexpr,
    NUM_APPENDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
    WIDTH: tl.constexpr,
    APPENDS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    is_tail = row == num_shape_rows
    ring_entry = tl.load(turn_1) % ring_size
    if HAS_CLOCK:
        tl.store(time_E2 + ring_entry * 2, tl.extra.cuda.globaltimer(), mask=row == 0)
    packet = packet_EP + ring_entry * packet_stride
    num_rows = tl.load(packet + NUM_ROWS)
    num_appends = tl.load(packet + NUM_APPENDS)
    # Read before it is known whether there is a row: the words exist, and nobody waits twice.
    packet_row = tl.minimum(row, num_shape_rows - 1)
    slot = tl.load(packet + slot_at + packet_row)
    planned = tl.load(packet + planned_at + packet_row)
    samples = tl.load(packet + samples_at + packet_row)
    is_row = row < num_rows
    slot = tl.where(is_row, slot, padding_slot)
    planned = tl.where(is_row, planned, 0)
    start = tl.load(num_computed_S + slot)
    num_tokens = tl.load(num_tokens_S + slot)
    room = tl.load(max_len_S + slot) - num_tokens - 1
    is_live = is_row & (tl.load(done_S + slot) == 0)
    committed = tl.minimum(planned, num_tokens - start)
    limit = tl.minimum(tl.minimum(planned - committed, room), num_shape_drafts)
    limit = tl.where(is_live, limit, 0)
    drafts = drafts_SK + slot.to(tl.int64) * drafts_stride
    step = tl.arange(0, WIDTH)
    draft = tl.load(drafts + step, mask=step < limit, other=-1)
    usable = tl.min(tl.where(draft < 0, step, WIDTH))  # up to the first that is none
    query_len = tl.where(is_live, committed + usable, 0)
    width = tl.where(is_live & (samples != 0), 1 + usable, 0)

    begin, end = _extent(
        *(packet, planned_at, row_start_at, row, num_rows),
        *(num_shape_rows, num_shape_drafts, num_entries, IS_UNIFORM),
    )
    _append_pages(
        *(packet, num_appends, append_slot_at, append_index_at, append_page_at),
        *(slot, is_tail, table_SP, table_stride, APPENDS),
    )
    tl.debug_barrier()  # this row's pages are in the table before the row looks there
    _fill_entries(
        *(token_T, position_T, page_slot_T, row_T),
        *(tokens_SL + slot.to(tl.int64) * tokens_stride, drafts, table_SP, table_stride),
        *(begin, end, row, slot, start, committed, query_len),
        *(max_model_len, PAGE_SIZE, BLOCK),
    )
    if is_tail:
        return
    tl.store(slot_B + row, slot)
    tl.store(row_start_B + row, begin)
    tl.store(query_len_B + row, query_len)
    tl.store(length_B + row, tl.where(is_live, start + query_len, 0))
    tl.store(start_B + row, start)
    tl.store(num_tokens_B + row, num_tokens)
    tl.store(first_B + row, row * (num_shape_drafts + 1))
    tl.store(width_B + row, width)
    usable_draft = tl.where(step < usable, draft, -1)
    tl.store(draft_BK + row * num_shape_drafts + step, usable_draft, mask=step < num_shape_drafts)
    sample = tl.where(step < width, begin + query_len - width + step, 0)
    sample_at = sample_N + row * (num_shape_drafts + 1) + step
    tl.store(sample_at, sample, mask=step <= num_shape_drafts)
