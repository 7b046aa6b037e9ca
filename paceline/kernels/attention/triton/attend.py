"""Paged attention over a varlen batch on the GPU.

Chooses between two kernels by the batch's shape alone: spans of KV for rows of few queries, tiles
of queries for rows of many. A batch that may hold both runs both, each on its own rows. For tiles
there are two more to choose from, by the GPU and the model.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
from torch import Tensor

from paceline.kernels.attention.reference import AttentionBatch
from paceline.kernels.attention.triton import tiles
from paceline.kernels.attention.triton.spans import attend_spans
from paceline.kernels.attention.triton.work import SHORT, TILE_ROWS, PagedHeads, make_work
from paceline.kernels.gpu.device import is_hopper
from paceline.kernels.gpu.triton import after_all, dependent
from paceline.kernels.kv_codes.reference import KvScales

# Gluon is an experiment that every Triton continues differently: with another than the one that a
# kernel was written for, and has run with, there is none.
GLUONS_TRITON = "3.6."


def prepare_attention(batch: AttentionBatch, num_entries: int, num_kv_heads: int) -> None:
    """Once for all layers of a pass, and before a plain launch in front of the first (see
    gpu/triton): attention reads the lists while products in front of it still run. A batch is one
    pass: its lengths, once they are on the device, do not change."""
    batch.work = make_work(batch, num_entries, num_kv_heads)


def paged_attention(
    qkv_TD: Tensor,
    key_NSH: Tensor,
    value_NSH: Tensor,
    batch: AttentionBatch,
    scale: float,
    scales: KvScales | None = None,
) -> Tensor:
    """Entries that no row owns get zeros. The scale is positive."""
    num_kv_heads, num_slots, head_size = key_NSH.shape
    assert batch.group_size <= TILE_ROWS, f"groups of {batch.group_size}, at most {TILE_ROWS}"
    assert num_slots * head_size < 2**31, "the offset of a slot within its head has 32 bits"
    num_entries = len(qkv_TD)
    launch = dependent()
    if batch.work is None:
        prepare_attention(batch, num_entries, num_kv_heads)
        launch = after_all()
    work = batch.work
    assert work is not None
    out_TD = qkv_TD.new_empty(num_entries, num_kv_heads * batch.group_size * head_size)
    pages = PagedHeads(key_NSH, value_NSH, *(scales or (None, None)))
    attend_spans(qkv_TD, pages, batch, work, scale, out_TD, launch)
    if (batch.max_query_len or num_entries) > SHORT:
        is_plain = batch.is_causal and not batch.has_row_window
        assert is_plain, f"only rows of up to {SHORT} queries see otherwise"
        attend_tiles = tiles_kernel(qkv_TD, key_NSH, value_NSH, batch)
        attend_tiles(qkv_TD, pages, batch, work, scale, out_TD)
    return out_TD


def tiles_kernel(
    qkv_TD: Tensor, key_NSH: Tensor, value_NSH: Tensor, batch: AttentionBatch
) -> Callable[..., None]:
    """Always the same one for a model: they do not have the same bits."""
    if is_hopper(qkv_TD.device) and triton.__version__.startswith(GLUONS_TRITON):
        # Here, because the interpreter and other versions of Triton cannot even import it.
        from paceline.kernels.attention.hopper import tiles as hoppers

        if hoppers.is_supported(qkv_TD, key_NSH, value_NSH, batch):
            return hoppers.attend_tiles
    return tiles.attend_tiles
