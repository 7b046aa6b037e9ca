"""Builds the varlen batch of a forward from positions of slots, for target and draft models.

CPU only: it runs on the worker thread and reads slot state through numpy views.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.attention.reference import AttentionBatch
from paceline.layers.attention import ForwardInputs
from paceline.models.spec import ModelSpec
from paceline.state.pages import Pages
from paceline.state.recurrent import LayerStorage, Recurrent
from paceline.state.slots import Slots
from paceline.step import Ints, Longs


def add_storage(
    pages: Pages, spec: ModelSpec, dtype: torch.dtype, recurrent: Recurrent | None = None
) -> list[LayerStorage]:
    """Storage for the layers of one model: pages, or rows of `recurrent`."""
    has_pages = [x.attention.has_pages for x in spec.layers]
    shape = (sum(has_pages), spec.num_kv_heads, spec.head_size)
    paged = iter(pages.add_layers(*shape, dtype, spec.attention.latent_size))
    if recurrent is None:
        return list(paged)
    layers = iter(recurrent.layers())
    return [next(paged) if x else next(layers) for x in has_pages]


def make_recurrent(
    spec: ModelSpec, slots: Slots, num_snapshots: int, dtype: torch.dtype
) -> Recurrent | None:
    """Storage for the recurrent layers of one model; None if it has none."""
    sizes = spec.recurrent
    if sizes is None:
        return None
    num_layers, counts = spec.num_recurrent_layers, (slots.num_slots, slots.max_k, num_snapshots)
    return Recurrent(num_layers, sizes, *counts, dtype, slots.device)


def lay_out(
    slots: Slots,
    pages: Pages,
    slot_B: Longs,
    start_B: Longs,
    count_B: Longs,
    group_size: int,
    *,
    drafts: Ints | None = None,
    shift: int = 0,
) -> ForwardInputs:
    """Positions start … start + count - 1 of each slot, then its drafts.

    A row of `drafts` is filled from the left; -1 stands for no draft. With `shift` each entry holds
    the token `shift` positions further on.
    """
    query_len_B = count_B
    if drafts is not None:
        query_len_B = count_B + (drafts >= 0).sum(axis=1)
    row_start = np.zeros(len(slot_B) + 1, np.int64)
    np.cumsum(query_len_B, out=row_start[1:])
    # A token's position is its index in T plus an offset per row.
    position_T = np.arange(row_start[-1]) + np.repeat(start_B - row_start[:-1], query_len_B)
    slot_T = np.repeat(slot_B, query_len_B)
    token_at_T = np.minimum(position_T + shift, slots.max_model_len - 1) if shift else position_T
    token_T = slots.arrays.tokens_SL[slot_T, token_at_T]
    if drafts is not None:
        is_draft_T = position_T >= np.repeat(start_B + count_B, query_len_B)
        token_T[is_draft_T] = drafts[drafts >= 0]
    return ForwardInputs(
        token_T=torch.from_numpy(token_T.astype(np.int64)),
        position_T=torch.from_numpy(position_T),
        page_slot_T=torch.from_numpy(_page_slots(pages, slot_T, position_T)),
        attention=attention_rows(pages, slot_B, row_start, start_B + query_len_B, group_size),
    )


def lay_out_one_each(
    slots: Slots,
    pages: Pages,
    slot_B: Longs,
    position_B: Longs,
    token_B: Tensor,
    group_size: int,
) -> ForwardInputs:
    """One given token per slot. At max_model_len and beyond no KV is written."""
    clamped_B = np.minimum(position_B, slots.max_model_len - 1)
    page_slot_B = _page_slots(pages, slot_B, clamped_B)
    page_slot_B[position_B > clamped_B] = -1
    row_start = np.arange(len(slot_B) + 1)
    return ForwardInputs(
        token_T=token_B.to(torch.int64),
        position_T=torch.from_numpy(clamped_B),
        page_slot_T=torch.from_numpy(page_slot_B),
        attention=attention_rows(pages, slot_B, row_start, clamped_B + 1, group_size),
    )


def _page_slots(pages: Pages, slot_T: Longs, position_T: Longs) -> Longs:
    size = pages.page_size
    page_T = pages.table_SP.numpy()[slot_T, position_T // size].astype(np.int64)
    return np.where(page_T < 0, -1, page_T * size + position_T % size)


def attention_rows(
    pages: Pages, slot_B: Longs, row_start: Longs, length_B: Longs, group_size: int
) -> AttentionBatch:
    return AttentionBatch(
        row_start_B=torch.from_numpy(row_start),
        length_B=torch.from_numpy(length_B),
        slot_B=torch.from_numpy(slot_B),
        table_SP=pages.table_SP,
        page_size=pages.page_size,
        group_size=group_size,
    )
