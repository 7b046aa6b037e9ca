"""Rows of drafters on the GPU: small kernels between their passes.

Everything is read from the device's own state; no number of them comes from the host but the
packet's row starts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.step_inputs.triton import page_slots
from paceline.kernels.step_rows import BatchRows, PacketLayout, PaddedRows, Ring, SlotTensors

_ENTRIES = 256  # token entries of one program of shifted_tokens
_OWN_ENTRIES = 1024  # and of one turn of own_rows
_ROWS = 32  # rows of one program of next_rows
_NUM_ROWS = tl.constexpr(PacketLayout.NUM_ROWS)


def shifted_tokens(padded: PaddedRows, state: SlotTensors, token_T: Tensor) -> None:
    num_entries = len(token_T)
    _shifted_kernel[(triton.cdiv(num_entries, _ENTRIES),)](
        *(padded.row_T, padded.batch.position_T, padded.batch.slot_B),
        *(state.num_tokens_S, state.tokens_SL, token_T),
        *(num_entries, state.tokens_SL.stride(0)),
        BLOCK=_ENTRIES,
    )


def own_rows(
    ring: Ring,
    layout: PacketLayout,
    padded: PaddedRows,
    state: SlotTensors,
    batch: BatchRows,
    last_B: Tensor,
    page_size: int,
) -> None:
    windows = padded.rows.windows
    _own_kernel[(len(last_B),)](
        *(ring.packet_EP, ring.turn_1, windows.slot_B, padded.batch.query_len_B),
        *(padded.rows.start_B, windows.length_B, windows.width_B),
        *(state.tokens_SL, state.num_tokens_S, state.table_SP),
        *(batch.token_T, batch.position_T, batch.page_slot_T),
        *(batch.slot_B, batch.row_start_B, batch.query_len_B, batch.length_B, last_B),
        *(len(ring.packet_EP), ring.packet_EP.stride(0), layout.draft_start),
        *(len(batch.token_T), state.tokens_SL.shape[1]),
        *(state.tokens_SL.stride(0), state.table_SP.stride(0)),
        PAGE_SIZE=page_size,
        BLOCK=_OWN_ENTRIES,
    )


def next_rows(
    token_B: Tensor,
    j: int,
    padded: PaddedRows,
    state: SlotTensors,
    batch: BatchRows,
    page_size: int,
    is_shifted: bool,
) -> None:
    num_rows, windows = len(token_B), padded.rows.windows
    _next_kernel[(triton.cdiv(num_rows, _ROWS),)](
        *(token_B, windows.slot_B, windows.width_B),
        *(state.num_tokens_S, state.done_S, state.table_SP),
        *(batch.token_T, batch.position_T, batch.page_slot_T),
        *(batch.slot_B, batch.row_start_B, batch.query_len_B, batch.length_B),
        *(token_B.stride(0), j - (2 if is_shifted else 1), num_rows),
        *(state.tokens_SL.shape[1], state.table_SP.stride(0)),
        PAGE_SIZE=page_size,
        ROWS=_ROWS,
        num_warps=1,
    )


def store_drafts(draft_BK: Tensor, padded: PaddedRows, state: SlotTensors, is_onehot: bool) -> None:
    num_rows, num_drafts = draft_BK.shape
    stored, windows = state.drafts_SK.shape[1], padded.rows.windows
    _store_kernel[(num_rows,)](
        *(draft_BK, windows.slot_B, windows.width_B),
        *(state.num_tokens_S, state.done_S, state.drafts_SK, state.drafts_onehot_S),
        *(num_drafts, *draft_BK.stride(), int(is_onehot)),
        *(stored, state.tokens_SL.shape[1], state.drafts_SK.stride(0)),
        DRAFTS=triton.next_power_of_2(stored),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_entries"])
def _shifted_kernel(  # noqa: PLR0913
    row_T,
    position_T,
    slot_B,
    num_tokens_S,
    tokens_SL,
    token_T,
    num_entries,
    tokens_stride,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < num_entries
    row = tl.load(row_T + entry, mask=is_entry, other=-1)
    position = tl.load(position_T + entry, mask=is_entry, other=0) + 1
    is_owned = row >= 0
    slot = tl.load(slot_B + row, mask=is_owned, other=0).to(tl.int64)
    length = tl.load(num_tokens_S + slot, mask=is_owned, other=0)
    is_known = is_owned & (position < length)
    token = tl.load(tokens_SL + slot * tokens_stride + position, mask=is_known, other=0)
    tl.store(token_T + entry, token, mask=is_entry)


@triton.jit(do_not_specialize=["ring_size", "packet_stride", "draft_start_at", "num_entries"])
def _own_kernel(  # noqa: PLR0913
    packet_EP,
    turn_1,
    step_slot_B,
    step_query_len_B,
    step_start_B,
    step_num_tokens_B,
    step_width_B,
    tokens_SL,
    num_tokens_S,
    table_SP,
    token_T,
    position_T,
    page_slot_T,
    slot_B,
    row_start_B,
    query_len_B,
    length_B,
    last_B,
    ring_size,
    packet_stride,
    draft_start_at,
    num_entries,
    max_model_len,
    tokens_stride,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    packet = packet_EP + (tl.load(turn_1) % ring_size) * packet_stride
    num_rows = tl.load(packet + _NUM_ROWS)
    slot = tl.load(step_slot_B + row)
    start = tl.load(step_start_B + row)
    computed = tl.load(step_query_len_B + row)
    samples = tl.load(step_width_B + row) > 0
    is_window = samples & (tl.load(step_num_tokens_B + row) - start == 1)
    end = tl.load(num_tokens_S + slot)
    is_live = computed > 0
    stop = tl.where(samples, end, start + computed)
    start = tl.where(is_window, tl.maximum(end - 2, 0), start)
    query_len = tl.where(is_live, stop - start, 0)

    # A row fills up to where the next begins; the last one, or the first of none, to the end.
    row_start = tl.load(packet + draft_start_at + row, mask=row < num_rows, other=num_entries)
    next_start = tl.load(
        packet + draft_start_at + row + 1, mask=row + 1 < num_rows, other=num_entries
    )
    first = tl.where(row == 0, 0, row_start)
    tokens = tokens_SL + slot.to(tl.int64) * tokens_stride
    while first < next_start:
        entry = first + tl.arange(0, BLOCK)
        is_entry = entry < next_start
        is_owned = is_entry & (entry >= row_start) & (entry < row_start + query_len)
        position = tl.where(is_owned, start + entry - row_start, 0)
        token = tl.load(tokens + position, mask=is_owned, other=0)
        page_slot = page_slots(
            table_SP, table_stride, slot, position, is_owned, max_model_len, PAGE_SIZE
        )
        tl.store(token_T + entry, token, mask=is_entry)
        tl.store(position_T + entry, position, mask=is_entry)
        tl.store(page_slot_T + entry, page_slot, mask=is_entry)
        first += BLOCK
    tl.store(slot_B + row, slot)
    tl.store(row_start_B + row, row_start)
    tl.store(query_len_B + row, query_len)
    tl.store(length_B + row, tl.where(is_live, stop, 0))
    tl.store(last_B + row, tl.where(query_len > 0, row_start + query_len - 1, 0))


@triton.jit(do_not_specialize=["token_stride", "shift", "num_rows"])
def _next_kernel(  # noqa: PLR0913
    draft_B,
    step_slot_B,
    step_width_B,
    num_tokens_S,
    done_S,
    table_SP,
    token_B,
    position_B,
    page_slot_B,
    slot_B,
    row_start_B,
    query_len_B,
    length_B,
    token_stride,
    shift,
    num_rows,
    max_model_len,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    slot = tl.load(step_slot_B + row, mask=is_row, other=0)
    samples = tl.load(step_width_B + row, mask=is_row, other=0) > 0
    goes_on = samples & (tl.load(done_S + slot, mask=is_row, other=1) == 0)
    draft = tl.load(draft_B + row * token_stride, mask=goes_on, other=0).to(tl.int32)
    end = tl.load(num_tokens_S + slot, mask=goes_on, other=0)
    position = tl.where(goes_on, end + shift, 0)
    page_slot = page_slots(
        table_SP, table_stride, slot, position, goes_on, max_model_len, PAGE_SIZE
    )
    position = tl.minimum(position, max_model_len - 1)
    tl.store(token_B + row, tl.maximum(draft, 0), mask=is_row)
    tl.store(position_B + row, position, mask=is_row)
    tl.store(page_slot_B + row, page_slot, mask=is_row)
    tl.store(slot_B + row, slot, mask=is_row)
    tl.store(row_start_B + row, row, mask=is_row)
    tl.store(query_len_B + row, goes_on.to(tl.int32), mask=is_row)
    tl.store(length_B + row, tl.where(goes_on, position + 1, 0), mask=is_row)


@triton.jit(do_not_specialize=["num_drafts", "row_stride", "draft_stride", "is_onehot"])
def _store_kernel(  # noqa: PLR0913
    draft_BK,
    slot_B,
    width_B,
    num_tokens_S,
    done_S,
    drafts_SK,
    drafts_onehot_S,
    num_drafts,
    row_stride,
    draft_stride,
    is_onehot,
    num_stored,
    max_model_len,
    stored_stride,
    DRAFTS: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slot_B + row).to(tl.int64)
    goes_on = (tl.load(width_B + row) > 0) & (tl.load(done_S + slot) == 0)
    step = tl.arange(0, DRAFTS)
    has_room = tl.load(num_tokens_S + slot) + step < max_model_len
    draft_at = draft_BK + row * row_stride + step * draft_stride
    draft = tl.load(draft_at, mask=(step < num_drafts) & has_room, other=-1).to(tl.int32)
    is_stored = goes_on & (step < num_stored)
    tl.store(drafts_SK + slot * stored_stride + step, draft, mask=is_stored)
    tl.store(drafts_onehot_S + slot, is_onehot, mask=goes_on)
