"""Positions of slots -> the varlen batch that a forward takes. Shared by target and drafts.

CPU only: reads slot state through numpy views, which is no sync where the device is a thread.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.kernels.attention import AttentionBatch
from paceline.models.decoder import ForwardInputs
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from paceline.step import Ints, Longs


def lay_out(
    slots: Slots,
    pages: Pages,
    slot_B: Longs,
    start_B: Longs,
    count_B: Longs,
    group_size: int,
    *,
    drafts: Ints | None = None,
) -> ForwardInputs:
    """The varlen batch of positions start..start + count of each slot, then its drafts.

    Drafts of a row come first in it; -1 fills the rest.
    """
    query_len_B = count_B
    if drafts is not None:
        query_len_B = count_B + (drafts >= 0).sum(axis=1)
    row_start = np.zeros(len(slot_B) + 1, np.int64)
    np.cumsum(query_len_B, out=row_start[1:])
    # Position of a token = its index in T + what its row begins at.
    shift_B = start_B - row_start[:-1]
    position_T = np.arange(row_start[-1]) + np.repeat(shift_B, query_len_B)
    slot_T = np.repeat(slot_B, query_len_B)
    token_T = slots.tokens_SL.numpy()[slot_T, position_T]
    if drafts is not None:
        is_draft_T = position_T >= np.repeat(start_B + count_B, query_len_B)
        token_T[is_draft_T] = drafts[drafts >= 0]
    size = pages.page_size
    page_T = pages.table_SP.numpy()[slot_T, position_T // size].astype(np.int64)
    page_slot_T = np.where(page_T < 0, -1, page_T * size + position_T % size)
    return ForwardInputs(
        token_T=torch.from_numpy(token_T.astype(np.int64)),
        position_T=torch.from_numpy(position_T),
        page_slot_T=torch.from_numpy(page_slot_T),
        attention=AttentionBatch(
            row_start_B=torch.from_numpy(row_start),
            length_B=torch.from_numpy(start_B + query_len_B),
            slot_B=torch.from_numpy(slot_B),
            table_SP=pages.table_SP,
            page_size=size,
            group_size=group_size,
        ),
    )
