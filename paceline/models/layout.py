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
    """The varlen batch of positions start..start + count of each slot, then its drafts."""
    tokens_SL = slots.tokens_SL.numpy()
    table_SP = pages.table_SP.numpy()
    size = pages.page_size
    token_parts: list[Ints] = []
    position_parts: list[Longs] = []
    page_slot_parts: list[Longs] = []
    row_start, length, row_pages = [0], [], []
    for i, slot in enumerate(slot_B.tolist()):
        start, count = int(start_B[i]), int(count_B[i])
        token_parts.append(tokens_SL[slot, start : start + count])
        end = start + count
        if drafts is not None:
            draft = drafts[i][drafts[i] >= 0]
            token_parts.append(draft)
            end += len(draft)
        position = np.arange(start, end)
        table = table_SP[slot, : -(-end // size)].astype(np.int64)
        position_parts.append(position)
        page_slot_parts.append(table[position // size] * size + position % size)
        row_start.append(row_start[-1] + end - start)
        length.append(end)
        row_pages.append(torch.from_numpy(table))
    return ForwardInputs(
        token_T=torch.from_numpy(np.concatenate(token_parts).astype(np.int64)),
        position_T=torch.from_numpy(np.concatenate(position_parts)),
        page_slot_T=torch.from_numpy(np.concatenate(page_slot_parts)),
        attention=AttentionBatch(row_start, length, row_pages, size, group_size),
    )
