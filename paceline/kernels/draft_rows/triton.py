"""Rows of drafters on the GPU: small kernels between their passes.

Everything is read from the device's own state, except the row starts, which the packet brings.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.step_inputs.triton import page_slots
from paceline.kernels.step_rows import (
    PACKET_ROWS,
    BatchRows,
    BlockLayout,
    PacketLayout,
    PaddedRows,
    Ring,
    SlotTensors,
)

_ENTRIES = 256  # token entries of one program of shifted_tokens
_OWN_ENTRIES = 1024  # and of one turn of own_rows
_ROWS = 32  # rows of one program of next_rows
_NUM_ROWS = tl.constexpr(PACKET_ROWS)


def shifted_tokens(padded: PaddedRows, state: SlotTensors, token_T: Tensor) -> None:
    num_entries = len(token_T)
    _shifted_kernel[(triton.cdiv(num_entries, _ENTRIES),)](
        *(padded.row_T, padded.batch, state, state.sizes, token_T, num_entries),
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
    _own_kernel[(len(last_B),)](
        *(ring, layout, padded.rows, state, state.sizes, batch, last_B),
        *(len(ring.stamp_E), len(batch.token_T)),
        PAGE_SIZE=page_size,
        BLOCK=_OWN_ENTRIES,
    )


def block_rows(
    padded: PaddedRows,
    state: SlotTensors,
    layout: BlockLayout,
    width: int,
    batch: BatchRows,
    page_size: int,
) -> None:
    num_rows, num_tokens = len(padded.batch.slot_B), padded.shape.tokens
    num_entries = num_tokens + num_rows * width
    _block_kernel[(triton.cdiv(max(num_entries, 2 * num_rows), _ENTRIES),)](
        *(padded.row_T, padded.batch, padded.rows.windows, state, state.sizes, batch),
        *(num_tokens, num_rows, width, layout.mask_id),
        SHIFT=layout.shift,
        HAS_ANCHOR=layout.has_anchor,
        PAGE_SIZE=page_size,
        BLOCK=_ENTRIES,
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
    num_rows, shift = len(token_B), j - (2 if is_shifted else 1)
    _next_kernel[(triton.cdiv(num_rows, _ROWS),)](
        *(padded.rows.windows, state, state.sizes, batch),
        *(token_B, token_B.stride(0), shift, num_rows),
        PAGE_SIZE=page_size,
        ROWS=_ROWS,
        num_warps=1,
    )


def store_drafts(draft_BK: Tensor, padded: PaddedRows, state: SlotTensors, is_onehot: bool) -> None:
    num_rows, num_drafts = draft_BK.shape
    _store_kernel[(num_rows,)](
        *(padded.rows.windows, state, state.sizes),
        *(draft_BK, num_drafts, *draft_BK.stride(), int(is_onehot)),
        DRAFTS=triton.next_power_of_2(state.sizes.num_drafts),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_entries"])
def _shifted_kernel(row_T, batch, state, sizes, token_T, num_entries, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < num_entries
    row = tl.load(row_T + entry, mask=is_entry, other=-1)
    position = tl.load(batch.position_T + entry, mask=is_entry, other=0) + 1
    is_owned = row >= 0
    slot = tl.load(batch.slot_B + row, mask=is_owned, other=0).to(tl.int64)
    length = tl.load(state.num_tokens_S + slot, mask=is_owned, other=0)
    is_known = is_owned & (position < length)
    token_at = state.tokens_SL + slot * sizes.tokens_stride + position
    tl.store(token_T + entry, tl.load(token_at, mask=is_known, other=0), mask=is_entry)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "width", "mask_id"])
def _block_kernel(  # noqa: PLR0913
    row_T,
    target,
    windows,
    state,
    sizes,
    batch,
    num_tokens,
    num_rows,
    width,
    mask_id,
    SHIFT: tl.constexpr,
    HAS_ANCHOR: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program writes some entries, of the target's or of blocks, and as many rows."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _copy_committed(row_T, target, state, sizes, batch, index, num_tokens, SHIFT)
    in_block = index - num_tokens
    row = in_block // tl.maximum(width, 1)
    offset = in_block - row * width
    is_entry = (in_block >= 0) & (in_block < num_rows * width)
    slot, first, count = _block_of(windows, state, sizes, row, is_entry, width)
    is_owned = is_entry & (offset < count)
    position = tl.where(is_owned, first + offset, 0)
    is_anchor = is_owned & (offset == 0) & HAS_ANCHOR
    token_at = state.tokens_SL + slot.to(tl.int64) * sizes.tokens_stride + first
    token = tl.where(is_anchor, tl.load(token_at, mask=is_anchor, other=0), mask_id)
    page_slot = page_slots(state, sizes, slot, position, is_owned, PAGE_SIZE)
    tl.store(batch.token_T + index, tl.where(is_owned, token, 0), mask=is_entry)
    tl.store(batch.position_T + index, position, mask=is_entry)
    tl.store(batch.page_slot_T + index, page_slot, mask=is_entry)

    is_row = index < num_rows
    slot = tl.load(target.slot_B + index, mask=is_row, other=0)
    tl.store(batch.slot_B + index, slot, mask=is_row)
    row_start = tl.load(target.row_start_B + index, mask=is_row)
    tl.store(batch.row_start_B + index, row_start, mask=is_row)
    query_len = tl.load(target.query_len_B + index, mask=is_row, other=0)
    start = tl.load(target.length_B + index, mask=is_row, other=0) - query_len
    end = tl.load(state.num_tokens_S + slot, mask=is_row, other=0)
    kept = tl.maximum(tl.minimum(end - 1 - start, query_len), 0)
    tl.store(batch.query_len_B + index, kept, mask=is_row)
    tl.store(batch.length_B + index, tl.where(kept > 0, start + kept, 0), mask=is_row)
    row = index - num_rows
    is_row = (row >= 0) & (row < num_rows)
    slot, first, count = _block_of(windows, state, sizes, row, is_row, width)
    tl.store(batch.slot_B + index, slot, mask=is_row)
    tl.store(batch.row_start_B + index, num_tokens + row * width, mask=is_row)
    tl.store(batch.query_len_B + index, count, mask=is_row)
    tl.store(batch.length_B + index, tl.where(count > 0, first + count, 0), mask=is_row)


@triton.jit
def _copy_committed(row_T, target, state, sizes, batch, index, num_tokens, SHIFT: tl.constexpr):
    is_entry = index < num_tokens
    row = tl.load(row_T + index, mask=is_entry, other=-1)
    position = tl.load(target.position_T + index, mask=is_entry, other=0)
    slot = tl.load(target.slot_B + row, mask=row >= 0, other=0).to(tl.int64)
    length = tl.load(state.num_tokens_S + slot, mask=row >= 0, other=0)
    is_kept = (row >= 0) & (position < length - 1)
    token_at = state.tokens_SL + slot * sizes.tokens_stride + position + SHIFT
    token = tl.load(token_at, mask=is_kept, other=0)
    page_slot = tl.load(target.page_slot_T + index, mask=is_kept, other=-1)
    tl.store(batch.token_T + index, token, mask=is_entry)
    tl.store(batch.position_T + index, position, mask=is_entry)
    tl.store(batch.page_slot_T + index, page_slot, mask=is_entry)


@triton.jit
def _block_of(windows, state, sizes, row, is_row, width):
    """Slot, first position and number of entries of each row's block."""
    slot = tl.load(windows.slot_B + row, mask=is_row, other=0)
    samples = tl.load(windows.width_B + row, mask=is_row, other=0) > 0
    goes_on = samples & (tl.load(state.done_S + slot, mask=is_row, other=1) == 0)
    first = tl.load(state.num_tokens_S + slot, mask=goes_on, other=1) - 1
    count = tl.where(goes_on, tl.minimum(width, sizes.max_model_len - first), 0)
    return slot, first, count


@triton.jit(do_not_specialize=["ring_size", "num_entries"])
def _own_kernel(  # noqa: PLR0913
    ring,
    layout,
    rows,
    state,
    sizes,
    batch,
    last_B,
    ring_size,
    num_entries,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    packet = ring.packet_EP + (tl.load(ring.turn_1) % ring_size) * layout.num_words
    num_rows = tl.load(packet + _NUM_ROWS)
    slot = tl.load(rows.windows.slot_B + row)
    start = tl.load(rows.start_B + row)
    computed = tl.load(rows.query_len_B + row)
    samples = tl.load(rows.windows.width_B + row) > 0
    end = tl.load(state.num_tokens_S + slot)
    is_live = computed > 0
    stop = tl.where(samples, end, start + computed)
    length = tl.load(packet + layout.draft_len + row, mask=row < num_rows, other=0)
    start = tl.maximum(stop - length, start)
    query_len = tl.where(is_live, stop - start, 0)

    # A row fills up to where the next begins; the last one, or the first of none, to the end.
    start_at = packet + layout.draft_start + row
    row_start = tl.load(start_at, mask=row < num_rows, other=num_entries)
    next_start = tl.load(start_at + 1, mask=row + 1 < num_rows, other=num_entries)
    first = tl.where(row == 0, 0, row_start)
    tokens = state.tokens_SL + slot.to(tl.int64) * sizes.tokens_stride
    while first < next_start:
        entry = first + tl.arange(0, BLOCK)
        is_entry = entry < next_start
        is_owned = is_entry & (entry >= row_start) & (entry < row_start + query_len)
        position = tl.where(is_owned, start + entry - row_start, 0)
        token = tl.load(tokens + position, mask=is_owned, other=0)
        page_slot = page_slots(state, sizes, slot, position, is_owned, PAGE_SIZE)
        tl.store(batch.token_T + entry, token, mask=is_entry)
        tl.store(batch.position_T + entry, position, mask=is_entry)
        tl.store(batch.page_slot_T + entry, page_slot, mask=is_entry)
        first += BLOCK
    tl.store(batch.slot_B + row, slot)
    tl.store(batch.row_start_B + row, row_start)
    tl.store(batch.query_len_B + row, query_len)
    tl.store(batch.length_B + row, tl.where(is_live, stop, 0))
    tl.store(last_B + row, tl.where(query_len > 0, row_start + query_len - 1, 0))


@triton.jit(do_not_specialize=["draft_stride", "shift", "num_rows"])
def _next_kernel(  # noqa: PLR0913
    windows,
    state,
    sizes,
    batch,
    draft_B,
    draft_stride,
    shift,
    num_rows,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    slot = tl.load(windows.slot_B + row, mask=is_row, other=0)
    samples = tl.load(windows.width_B + row, mask=is_row, other=0) > 0
    goes_on = samples & (tl.load(state.done_S + slot, mask=is_row, other=1) == 0)
    draft = tl.load(draft_B + row * draft_stride, mask=goes_on, other=0).to(tl.int32)
    end = tl.load(state.num_tokens_S + slot, mask=goes_on, other=0)
    position = tl.where(goes_on, end + shift, 0)
    page_slot = page_slots(state, sizes, slot, position, goes_on, PAGE_SIZE)
    position = tl.minimum(position, sizes.max_model_len - 1)
    tl.store(batch.token_T + row, tl.maximum(draft, 0), mask=is_row)
    tl.store(batch.position_T + row, position, mask=is_row)
    tl.store(batch.page_slot_T + row, page_slot, mask=is_row)
    tl.store(batch.slot_B + row, slot, mask=is_row)
    tl.store(batch.row_start_B + row, row, mask=is_row)
    tl.store(batch.query_len_B + row, goes_on.to(tl.int32), mask=is_row)
    tl.store(batch.length_B + row, tl.where(goes_on, position + 1, 0), mask=is_row)


@triton.jit(do_not_specialize=["num_drafts", "row_stride", "draft_stride", "is_onehot"])
def _store_kernel(  # noqa: PLR0913
    windows,
    state,
    sizes,
    draft_BK,
    num_drafts,
    row_stride,
    draft_stride,
    is_onehot,
    DRAFTS: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(windows.slot_B + row).to(tl.int64)
    goes_on = (tl.load(windows.width_B + row) > 0) & (tl.load(state.done_S + slot) == 0)
    step = tl.arange(0, DRAFTS)
    has_room = tl.load(state.num_tokens_S + slot) + step < sizes.max_model_len
    draft_at = draft_BK + row * row_stride + step * draft_stride
    draft = tl.load(draft_at, mask=(step < num_drafts) & has_room, other=-1).to(tl.int32)
    stored_at = state.drafts_SK + slot * sizes.drafts_stride + step
    tl.store(stored_at, draft, mask=goes_on & (step < sizes.num_drafts))
    tl.store(state.drafts_onehot_S + slot, is_onehot, mask=goes_on)
