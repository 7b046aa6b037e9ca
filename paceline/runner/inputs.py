"""Plan + slot state -> the tensors of one step. On CPU every size here is the true one.

The device is a thread, so reading slot state is no sync: rows that are done and draft positions
without a draft are left out, and a drafter without a match costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paceline.layers.attention import ForwardInputs
from paceline.models.layout import lay_out
from paceline.sampling.window import Window
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from paceline.step import Bools, Ints, Longs, StepPlan


@dataclass(slots=True)
class StepInputs:
    """The rows of a step that compute anything, and what they compute."""

    row_B: Longs  # plan row of each live row
    slot_B: Longs
    start_B: Longs  # first position computed
    query_len_B: Longs  # positions computed
    num_drafts_B: Longs  # drafts among them
    samples_B: Bools
    forward: ForwardInputs
    window: Window  # over the live rows that sample
    sample_T: torch.Tensor  # int64: rows of the hidden states that get logits


def build_inputs(plan: StepPlan, slots: Slots, pages: Pages, group_size: int) -> StepInputs:
    """Of the rows that are still alive; there may be none."""
    plan_slot = plan.slot_B.astype(np.int64)
    row_B = np.flatnonzero(slots.done_S.numpy()[plan_slot] == 0)
    slot_B = plan_slot[row_B]
    samples_B = plan.samples_B[row_B]
    num_tokens_B = slots.num_tokens_S.numpy()[slot_B].astype(np.int64)
    start_B = slots.num_computed_S.numpy()[slot_B].astype(np.int64)
    # Committed tokens first; what the plan asks beyond them are drafts.
    asked_B = plan.query_len_B[row_B].astype(np.int64)
    committed_B = np.minimum(asked_B, num_tokens_B - start_B)
    drafts_BK = _usable_drafts(plan, slots, row_B, slot_B, num_tokens_B, asked_B - committed_B)
    num_drafts_B = (drafts_BK >= 0).sum(axis=1)
    query_len_B = committed_B + num_drafts_B
    forward = lay_out(
        slots,
        pages,
        slot_B,
        start_B,
        committed_B,
        group_size,
        drafts=drafts_BK if drafts_BK.shape[1] else None,
    )
    if plan.agreed is not None:
        forward.num_rows = plan.agreed.tokens
    window, sample_T = _window(
        slot_B[samples_B],
        num_tokens_B[samples_B],
        np.cumsum(query_len_B)[samples_B],
        drafts_BK[samples_B],
        plan.k,
    )
    return StepInputs(
        row_B=row_B,
        slot_B=slot_B,
        start_B=start_B,
        query_len_B=query_len_B,
        num_drafts_B=num_drafts_B,
        samples_B=samples_B,
        forward=forward,
        window=window,
        sample_T=sample_T,
    )


def _usable_drafts(
    plan: StepPlan,
    slots: Slots,
    row_B: Longs,
    slot_B: Longs,
    num_tokens_B: Longs,
    wanted_B: Longs,
) -> Ints:
    """The leading real drafts of each row, -1 padded to the widest; none past the row's limit."""
    width = int(wanted_B.max(initial=0))
    if not width:
        return np.empty((len(row_B), 0), np.int32)
    # A draft at window position j is followed by a sample at length + j + 1 < max_len.
    room_B = slots.max_len_S.numpy()[slot_B] - num_tokens_B - 1
    limit_B = np.minimum(wanted_B, room_B)
    drafts_BK = slots.drafts_SK.numpy()[slot_B, :width].copy()
    usable = (drafts_BK >= 0) & (np.arange(width) < limit_B[:, None])
    drafts_BK[~np.logical_and.accumulate(usable, axis=1)] = -1
    width = int((drafts_BK >= 0).sum(axis=1).max(initial=0))
    return drafts_BK[:, :width]


def _window(
    slot_B: Longs, length_B: Longs, end_B: Longs, drafts_BK: Ints, k: int
) -> tuple[Window, torch.Tensor]:
    """The sampling rows' windows: the last 1 + drafts positions of each row."""
    width_B = 1 + (drafts_BK >= 0).sum(axis=1)
    start_B = np.cumsum(width_B) - width_B
    row_N = np.repeat(np.arange(len(slot_B)), width_B)
    offset_N = np.arange(len(row_N)) - start_B[row_N]
    sample_T = (end_B - width_B)[row_N] + offset_N
    padded = np.full((len(slot_B), k), -1, np.int32)
    padded[:, : drafts_BK.shape[1]] = drafts_BK
    window = Window(
        slot_B=torch.from_numpy(slot_B),
        start_B=torch.from_numpy(start_B),
        width_B=torch.from_numpy(width_B),
        row_N=torch.from_numpy(row_N),
        slot_N=torch.from_numpy(slot_B[row_N]),
        offset_N=torch.from_numpy(offset_N),
        draft_BK=torch.from_numpy(padded),
        length_B=torch.from_numpy(length_B.astype(np.int32)),
        k=k,
    )
    return window, torch.from_numpy(sample_T)
