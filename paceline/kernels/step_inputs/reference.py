"""Step inputs: a plan's packet and slot state become the tensors of a step, at fixed shapes.

Owns the contract and its torch reference; never reads a length on the host, never runs a model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.step_rows import (
    PACKET_APPENDS,
    PACKET_HAS_MARKS,
    PACKET_ROWS,
    PacketLayout,
    PaddedRows,
    Ring,
    SlotTensors,
    StepShape,
)


class Entries(NamedTuple):
    """The row of each of the T token entries of a varlen batch."""

    row_T: Tensor  # int64: a valid row, also at unused entries
    is_owned_T: Tensor  # bool
    offset_T: Tensor  # int64: place in the row
    slot_T: Tensor  # int64
    position_T: Tensor  # int64: place in the sequence; 0 at unused entries


class _Plan(NamedTuple):
    """What the packet says of each row."""

    is_row_B: Tensor  # bool; the others are padding
    slot_B: Tensor  # int64
    planned_B: Tensor
    samples_B: Tensor  # bool
    row_start_B: Tensor


def step_inputs(
    ring: Ring,
    layout: PacketLayout,
    state: SlotTensors,
    padded: PaddedRows,
    page_size: int,
    padding_slot: int,
) -> None:
    """Append the packet's pages to the table, then fill what `padded` says the target computes.

    A row computes its committed tokens from num_computed on, at most as many as planned, then the
    leading real drafts of its slot: as many as planned, K and the request's limit allow. Done rows
    and padding compute nothing. Unused entries hold token 0, position 0, page slot -1.
    Uniform rows begin at b * W; packed ones where the packet says, padding behind the last of them.
    """
    packet_P = packet_of(ring)
    _append_pages(packet_P, layout, state.table_SP, padding_slot)
    plan = _read_plan(packet_P, layout, padded.shape, padding_slot)
    start_B = state.num_computed_S[plan.slot_B]
    num_tokens_B = state.num_tokens_S[plan.slot_B]
    is_live_B = plan.is_row_B & (state.done_S[plan.slot_B] == 0)
    committed_B = torch.minimum(plan.planned_B, num_tokens_B - start_B)
    # A draft at window position j is followed by a sample at length + j + 1 < max_len.
    room_B = state.max_len_S[plan.slot_B] - num_tokens_B - 1
    limit_B = torch.minimum(plan.planned_B - committed_B, room_B).where(is_live_B, 0)
    draft_BK = _leading_drafts(state.drafts_SK[plan.slot_B, : padded.shape.k], limit_B)
    usable_B = (draft_BK >= 0).sum(1, dtype=torch.int32)
    query_len_B = (committed_B + usable_B).where(is_live_B, 0)

    batch, rows, windows = padded.batch, padded.rows, padded.rows.windows
    batch.slot_B.copy_(plan.slot_B)
    batch.row_start_B.copy_(plan.row_start_B)
    batch.query_len_B.copy_(query_len_B)
    batch.length_B.copy_((start_B + query_len_B).where(is_live_B, 0))
    rows.start_B.copy_(start_B)
    windows.length_B.copy_(num_tokens_B)
    windows.width_B.copy_((1 + usable_B).where(is_live_B & plan.samples_B, 0))
    windows.first_B.copy_(torch.arange(len(start_B), device=start_B.device) * windows.width)
    windows.draft_BK.copy_(draft_BK)
    _fill_samples(padded)
    _fill_entries(padded, state, committed_B, page_size)


def read_marks(ring: Ring, layout: PacketLayout, num_rows: int) -> tuple[Tensor, Tensor]:
    """Lengths and entries of the snapshots that each row is to leave: [B, M], -1 = none."""
    packet_P, num_marks = packet_of(ring), layout.num_marks
    size = num_rows * num_marks
    is_row_B1 = torch.arange(num_rows, device=ring.device)[:, None] < packet_P[PACKET_ROWS]
    is_mark_B1 = is_row_B1 & (packet_P[PACKET_HAS_MARKS] != 0)
    length_BM, entry_BM = (
        packet_P[at : at + size].view(num_rows, num_marks).where(is_mark_B1, -1)
        for at in (layout.mark_len, layout.mark_entry)
    )
    return length_BM, entry_BM


def packet_of(ring: Ring) -> Tensor:
    """The running step's packet."""
    entry_1 = ring.turn_1 % len(ring.packet_EP)
    return ring.packet_EP.index_select(0, entry_1.long())[0]


def entries_of(
    row_start_B: Tensor, query_len_B: Tensor, start_B: Tensor, slot_B: Tensor, num_entries: int
) -> Entries:
    """Owners of the entries of rows in order; a row without a query owns none."""
    entry_T = torch.arange(num_entries, device=row_start_B.device)
    row_start_B = row_start_B.long()
    row_T = (torch.searchsorted(row_start_B, entry_T, right=True) - 1).clamp(min=0)
    offset_T = entry_T - row_start_B[row_T]
    is_owned_T = (offset_T >= 0) & (offset_T < query_len_B[row_T])
    position_T = (start_B[row_T] + offset_T).where(is_owned_T, 0)
    return Entries(row_T, is_owned_T, offset_T, slot_B[row_T].long(), position_T)


def page_slots(
    state: SlotTensors, slot_T: Tensor, position_T: Tensor, is_owned_T: Tensor, page_size: int
) -> Tensor:
    """Flat KV slots; -1 at unused entries, from max_model_len on and where there is no page."""
    table_SP = state.table_SP
    index_T = (position_T // page_size).clamp(max=table_SP.shape[1] - 1)
    page_T = table_SP[slot_T, index_T].long()
    is_placed_T = is_owned_T & (page_T >= 0) & (position_T < state.tokens_SL.shape[1])
    return (page_T * page_size + position_T % page_size).where(is_placed_T, -1)


def _append_pages(
    packet_P: Tensor, layout: PacketLayout, table_SP: Tensor, padding_slot: int
) -> None:
    step_A = torch.arange(layout.max_appends, device=packet_P.device)
    is_append_A = step_A < packet_P[PACKET_APPENDS]
    slot_A = packet_P[layout.append_slot + step_A].where(is_append_A, padding_slot).long()
    index_A = packet_P[layout.append_index + step_A].where(is_append_A, 0).long()
    page_A = packet_P[layout.append_page + step_A]
    # Unused entries write what is there already.
    table_SP[slot_A, index_A] = page_A.where(is_append_A, table_SP[padding_slot, 0])


def _read_plan(
    packet_P: Tensor, layout: PacketLayout, shape: StepShape, padding_slot: int
) -> _Plan:
    row_B = torch.arange(shape.rows, device=packet_P.device)
    is_row_B = row_B < packet_P[PACKET_ROWS]
    planned_B = packet_P[layout.planned + row_B].where(is_row_B, 0)
    if shape.is_uniform:
        row_start_B = (row_B * shape.width).int()
    else:
        row_start_B = packet_P[layout.row_start + row_B]
        end = (row_start_B + planned_B).where(is_row_B, 0).amax()
        row_start_B = row_start_B.where(is_row_B, end)
    return _Plan(
        is_row_B=is_row_B,
        slot_B=packet_P[layout.slot + row_B].where(is_row_B, padding_slot).long(),
        planned_B=planned_B,
        samples_B=packet_P[layout.samples + row_B] != 0,
        row_start_B=row_start_B,
    )


def _leading_drafts(draft_BK: Tensor, limit_B: Tensor) -> Tensor:
    """Drafts before the first -1 and before the row's limit; -1 from there on."""
    step_K = torch.arange(draft_BK.shape[1], device=draft_BK.device)
    is_usable_BK = (draft_BK >= 0) & (step_K < limit_B[:, None])
    return draft_BK.where(is_usable_BK.cumprod(1) > 0, -1)


def _fill_samples(padded: PaddedRows) -> None:
    batch, width_B = padded.batch, padded.rows.windows.width_B
    step_W = torch.arange(padded.shape.width, device=width_B.device)
    entry_B = batch.row_start_B + batch.query_len_B - width_B
    sample_BW = (entry_B[:, None] + step_W).where(step_W < width_B[:, None], 0)
    padded.sample_N.copy_(sample_BW.flatten())


def _fill_entries(
    padded: PaddedRows, state: SlotTensors, committed_B: Tensor, page_size: int
) -> None:
    batch = padded.batch
    entries = entries_of(
        batch.row_start_B, batch.query_len_B, padded.rows.start_B, batch.slot_B, len(batch.token_T)
    )
    row_T, is_owned_T, slot_T = entries.row_T, entries.is_owned_T, entries.slot_T
    last = state.tokens_SL.shape[1] - 1
    token_T = state.tokens_SL[slot_T, entries.position_T.clamp(max=last)]
    if padded.shape.k:
        place_T = entries.offset_T - committed_B[row_T]
        draft_T = padded.rows.windows.draft_BK[row_T, place_T.clamp(0, padded.shape.k - 1)]
        token_T = draft_T.where(place_T >= 0, token_T)
    batch.token_T.copy_(token_T.where(is_owned_T, 0))
    batch.position_T.copy_(entries.position_T.clamp(max=last))
    batch.page_slot_T.copy_(page_slots(state, slot_T, entries.position_T, is_owned_T, page_size))
    padded.row_T.copy_(row_T.where(is_owned_T, -1))
