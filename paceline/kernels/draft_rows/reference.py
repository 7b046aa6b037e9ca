"""Inputs of a drafter's passes, and where its drafts go: read from slot state after the step.

Owns the contracts and their torch references; never runs a model and never accepts a draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.step_inputs.reference import entries_of, packet_of, page_slots
from paceline.kernels.step_rows import (
    PACKET_ROWS,
    BatchRows,
    BlockLayout,
    PacketLayout,
    PaddedRows,
    Ring,
    SlotTensors,
)


def shifted_tokens(padded: PaddedRows, state: SlotTensors, token_T: Tensor) -> None:
    """For a head that reads the target's batch: the token after each of its positions.

    0 where it is not known: past what is now committed, and at unused entries.
    """
    slot_T = padded.batch.slot_B[padded.row_T.clamp(min=0).long()].long()
    next_T = padded.batch.position_T.long() + 1
    is_known_T = (padded.row_T >= 0) & (next_T < state.num_tokens_S[slot_T])
    found_T = state.tokens_SL[slot_T, next_T.where(is_known_T, 0)]
    token_T.copy_(found_T.where(is_known_T, 0))


def own_rows(
    ring: Ring,
    layout: PacketLayout,
    padded: PaddedRows,
    state: SlotTensors,
    batch: BatchRows,
    last_B: Tensor,
    page_size: int,
) -> None:
    """The first pass of a stand-alone draft model, at the packet's `draft_start`.

    Rows compute the tokens that the step has committed, but at most the last `draft_len`. That is 2
    where the model made the drafts: it has computed all but the last one. Rows that were done
    before the step compute nothing. `last_B` is the entry of each row's last token, else 0.
    """
    packet_P = packet_of(ring)
    num_rows, num_entries = len(last_B), len(batch.token_T)
    slot_B = padded.batch.slot_B.long()
    end_B = state.num_tokens_S[slot_B]
    rows, windows = padded.rows, padded.rows.windows
    samples_B = windows.width_B > 0
    # Also rows that this step ended: the prefix cache may keep their pages.
    is_live_B = padded.batch.query_len_B > 0
    row_B = torch.arange(num_rows, device=last_B.device)
    stop_B = end_B.where(samples_B, rows.start_B + padded.batch.query_len_B)
    start_B = torch.maximum(stop_B - packet_P[layout.draft_len + row_B], rows.start_B)
    query_len_B = (stop_B - start_B).where(is_live_B, 0)
    row_start_B = packet_P[layout.draft_start + row_B]
    row_start_B = row_start_B.where(row_B < packet_P[PACKET_ROWS], num_entries)

    batch.slot_B.copy_(slot_B)
    batch.row_start_B.copy_(row_start_B)
    batch.query_len_B.copy_(query_len_B)
    batch.length_B.copy_(stop_B.where(is_live_B, 0))
    last_B.copy_((row_start_B + query_len_B - 1).where(query_len_B > 0, 0))
    entries = entries_of(row_start_B, query_len_B, start_B, slot_B, num_entries)
    token_T = state.tokens_SL[entries.slot_T, entries.position_T]
    batch.token_T.copy_(token_T.where(entries.is_owned_T, 0))
    batch.position_T.copy_(entries.position_T)
    batch.page_slot_T.copy_(
        page_slots(state, entries.slot_T, entries.position_T, entries.is_owned_T, page_size)
    )


def block_rows(
    padded: PaddedRows,
    state: SlotTensors,
    layout: BlockLayout,
    width: int,
    batch: BatchRows,
    page_size: int,
) -> None:
    """The pass of a block drafter: the target's entries and rows, then blocks of `width` entries.

    Committed entries hold the token `layout.shift` further on. Entries of rejected drafts compute
    nothing: the block has their positions. Rows that sampled and go on have a block, from
    their newest token on; it ends at max_model_len.
    """
    target, num_rows, longest = padded.batch, len(padded.batch.slot_B), state.tokens_SL.shape[1]
    slot_B = target.slot_B.long()
    end_B = state.num_tokens_S[slot_B].long()
    slot_T = slot_B[padded.row_T.clamp(min=0).long()]
    position_T = target.position_T.long()
    is_kept_T = (padded.row_T >= 0) & (position_T < state.num_tokens_S[slot_T] - 1)
    token_T = state.tokens_SL[slot_T, (position_T + layout.shift).where(is_kept_T, 0)]

    goes_on_B = _goes_on(padded, state)
    step_W = torch.arange(width, device=slot_B.device)
    first_B = (end_B - 1).where(goes_on_B, 0)
    count_B = (longest - first_B).clamp(max=width).where(goes_on_B, 0)
    is_owned_BW = step_W < count_B[:, None]
    position_BW = (first_B[:, None] + step_W).where(is_owned_BW, 0)
    is_anchor_BW = (step_W == 0) & layout.has_anchor
    token_BW = torch.where(is_anchor_BW, state.tokens_SL[slot_B, first_B][:, None], layout.mask_id)
    page_slot_BW = page_slots(
        state, slot_B[:, None].expand(-1, width), position_BW, is_owned_BW, page_size
    )

    def join(of_target: Tensor, of_blocks: Tensor, out: Tensor) -> None:
        out.copy_(torch.cat((of_target, of_blocks.flatten().to(of_target.dtype))))

    join(token_T.where(is_kept_T, 0), token_BW.where(is_owned_BW, 0), batch.token_T)
    join(target.position_T, position_BW, batch.position_T)
    join(target.page_slot_T.where(is_kept_T, -1), page_slot_BW, batch.page_slot_T)
    join(target.slot_B, slot_B, batch.slot_B)
    row_B = torch.arange(num_rows, device=slot_B.device)
    join(target.row_start_B, padded.shape.tokens + row_B * width, batch.row_start_B)
    start_B = target.length_B - target.query_len_B
    kept_B = torch.minimum(end_B - 1 - start_B, target.query_len_B).clamp(min=0)
    join(kept_B, count_B, batch.query_len_B)
    length_B = (start_B + kept_B).where(kept_B > 0, 0)
    join(length_B, (first_B + count_B).where(count_B > 0, 0), batch.length_B)


def next_rows(
    token_B: Tensor,
    j: int,
    padded: PaddedRows,
    state: SlotTensors,
    batch: BatchRows,
    page_size: int,
    is_shifted: bool,
) -> None:
    """Pass j >= 1, one entry per row: draft j - 1 of each row that sampled and goes on.

    A stand-alone model computes it at its own position, a head that reads shifted tokens at the
    one before. At max_model_len the position is clamped and no page is written.
    """
    slot_B = padded.batch.slot_B.long()
    goes_on_B = _goes_on(padded, state)
    position_B = (state.num_tokens_S[slot_B].long() + j - (2 if is_shifted else 1)).where(
        goes_on_B, 0
    )
    clamped_B = position_B.clamp(max=state.tokens_SL.shape[1] - 1)
    batch.token_T.copy_(token_B.clamp(min=0).where(goes_on_B, 0))
    batch.position_T.copy_(clamped_B)
    batch.page_slot_T.copy_(page_slots(state, slot_B, position_B, goes_on_B, page_size))
    batch.slot_B.copy_(slot_B)
    batch.row_start_B.copy_(torch.arange(len(slot_B), device=slot_B.device))
    batch.query_len_B.copy_(goes_on_B)
    batch.length_B.copy_((clamped_B + 1).where(goes_on_B, 0))


def store_drafts(draft_BK: Tensor, padded: PaddedRows, state: SlotTensors, is_onehot: bool) -> None:
    """Slots of rows that sampled and go on hold exactly these drafts, and -1 beyond them.

    A draft at max_model_len or later is none.
    """
    slot_B = padded.batch.slot_B.long()
    goes_on_B = _goes_on(padded, state)
    step_K = torch.arange(draft_BK.shape[1], device=slot_B.device)
    has_room_BK = state.num_tokens_S[slot_B][:, None] + step_K < state.tokens_SL.shape[1]
    # Rows that drafted nothing write what is there already.
    stored_BK = state.drafts_SK[slot_B]
    new_BK = torch.full_like(stored_BK, -1)
    new_BK[:, : draft_BK.shape[1]] = draft_BK.where(has_room_BK, -1)
    state.drafts_SK[slot_B] = new_BK.where(goes_on_B[:, None], stored_BK)
    stored_B = state.drafts_onehot_S[slot_B]
    state.drafts_onehot_S[slot_B] = torch.where(goes_on_B, int(is_onehot), stored_B)


def _goes_on(padded: PaddedRows, state: SlotTensors) -> Tensor:
    """bool [B]: the row sampled and its request is not done."""
    return (padded.rows.windows.width_B > 0) & (state.done_S[padded.batch.slot_B.long()] == 0)
