"""Paged attention over a varlen batch. In torch.

Rows are prefill chunks, verify windows or decode tokens alike. Lengths and page tables are device
data; here the view of a row is derived once per step and shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline.kernels.kv_codes.reference import KvScales, decode

# Past this many queries a row is computed per query head: the folded mask would grow with the
# group, and a causal prefill can skip half of its work.
_FOLD_LIMIT = 32


class AttentionWork(NamedTuple):
    """A pass's attention cut into items, on the device: made once, read by every layer."""

    span_E8: Tensor  # int32: spans of KV of rows with few queries
    tile_E8: Tensor  # int32: query tiles of rows with many
    count_2: Tensor  # int32: how many there are of each
    merge_T4: Tensor  # int32: which partial results make up an entry
    num_partials: int  # upper bound on the spans of span_E8 with a partial result


@dataclass(slots=True)
class AttentionBatch:
    """Which rows of the step attend to which pages."""

    row_start_B: Tensor  # int64 offset of each row's first query in T; one more closes the last
    length_B: Tensor  # int64 KV length of each row, its own queries included
    slot_B: Tensor  # int64 row of the page table
    table_SP: Tensor  # int32 page ids; ceil(length / page_size) of a row's are valid
    page_size: int
    group_size: int  # query heads per KV head
    # Fixed shapes (kernels/step_rows): rows have gaps between them, and some have no query.
    query_len_B: Tensor | None = None
    max_query_len: int = 0  # no row of this shape has more queries
    window: int | None = None  # positions that a query sees, its own included; None: all
    has_row_window: bool = False  # the window of a row's first query is that of all its queries
    is_causal: bool = True  # False: a query also sees the positions of its row after its own
    work: AttentionWork | None = None  # made before the pass's first layer, on a GPU
    _rows: list[_Row] = field(default_factory=list)

    def rows(self) -> list[_Row]:
        if not self._rows:
            start, length = self.row_start_B.tolist(), self.length_B.tolist()
            end = start[1:]
            if self.query_len_B is not None:
                end = (self.row_start_B + self.query_len_B).tolist()
            self._rows = [
                _Row.make(start[i], end[i], length[i], self.table_SP[slot].long(), self)
                for i, slot in enumerate(self.slot_B.tolist())
                if end[i] > start[i]
            ]
        return self._rows


@dataclass(slots=True)
class _Row:
    start: int
    end: int
    num_keys: int  # of positions that some query sees, the row's last ones
    run_start: int  # their first flat slot when the pages are physically consecutive, else -1
    pages: Tensor
    offset: int  # of the first key within the first page
    mask: Tensor | None
    is_folded: bool
    is_causal: bool

    @staticmethod
    def make(start: int, end: int, length: int, pages: Tensor, batch: AttentionBatch) -> _Row:
        num_queries, window = end - start, batch.window
        # Behind the window of the first query there may be pages of others.
        begin = 0 if window is None else max(length - num_queries + 1 - window, 0)
        pages = pages[begin // batch.page_size : -(-length // batch.page_size)]
        offset, num_pages = begin % batch.page_size, len(pages)
        first, last = int(pages[0]), int(pages[-1])
        consecutive = last - first == num_pages - 1 and (
            num_pages <= 2 or bool((pages[1:] - pages[:-1] == 1).all())
        )
        is_folded = num_queries <= _FOLD_LIMIT
        is_causal = batch.is_causal and not is_folded and num_queries == length - begin
        is_causal = is_causal and (window is None or length <= window)
        mask = None
        if num_queries > 1 and not is_causal and (batch.is_causal or window is not None):
            position = torch.arange(length - num_queries, length).unsqueeze(1)
            key = torch.arange(begin, length)
            mask = (key <= position) | (not batch.is_causal)
            if window is not None:
                mask &= key > (position[:1] if batch.has_row_window else position) - window
            mask = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf")).to(pages.device)
            if is_folded:
                mask = mask.repeat_interleave(batch.group_size, dim=0)
        return _Row(
            start=start,
            end=end,
            num_keys=length - begin,
            run_start=first * batch.page_size + offset if consecutive else -1,
            pages=pages,
            offset=offset,
            mask=mask,
            is_folded=is_folded,
            is_causal=is_causal,
        )


def paged_attention(
    qkv_TD: Tensor,
    key_NSH: Tensor,
    value_NSH: Tensor,
    batch: AttentionBatch,
    scale: float,
    scales: KvScales | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v for every row, causal inside the row unless the batch says
    otherwise, over no more than its window; returns [T, N * H].

    The N query heads lead each token's row of `qkv`; its keys and values are in the pages already.
    `scales`: of fp8 pages. Scores and results are scaled, codes are not.
    """
    num_kv_heads, _, head_size = key_NSH.shape
    num_heads = num_kv_heads * batch.group_size
    query_TNH = qkv_TD[:, : num_heads * head_size].unflatten(1, (num_heads, head_size))
    if scales is not None:
        query_TNH = query_TNH.float() * scales.key_N.repeat_interleave(batch.group_size)[:, None]
    out_TD: Tensor = query_TNH.new_zeros(len(qkv_TD), num_heads * head_size)
    for row in batch.rows():
        key, value = _sequence(key_NSH, row, batch), _sequence(value_NSH, row, batch)
        if scales is not None:
            key = decode(key)
            value = key if value_NSH is key_NSH else decode(value)
        query = query_TNH[row.start : row.end]
        mask = None if row.mask is None else row.mask.to(query.dtype)
        if row.is_folded:
            # [Q, N, H] -> [N_kv, Q * G, H]: the group becomes more queries of the same KV head.
            count = row.end - row.start
            query = query.view(count, num_kv_heads, -1, head_size).transpose(0, 1)
            query = query.reshape(1, num_kv_heads, -1, head_size)
            out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
            out = out.view(num_kv_heads, count, -1, head_size).transpose(0, 1)
            out_TD[row.start : row.end].view(out.shape).copy_(out)
        else:
            out = scaled_dot_product_attention(
                query.transpose(0, 1).unsqueeze(0),
                key,
                value,
                attn_mask=mask,
                is_causal=row.is_causal,
                scale=scale,
                enable_gqa=True,
            )
            out_TD[row.start : row.end].view(-1, num_heads, head_size).copy_(out[0].transpose(0, 1))
    if scales is not None:
        out_TD.view(len(out_TD), num_kv_heads, -1).mul_(scales.value_N[:, None])
        out_TD = out_TD.to(qkv_TD.dtype)
    return out_TD


def _sequence(cache_NSH: Tensor, row: _Row, batch: AttentionBatch) -> Tensor:
    """The row's keys or values, [1, N, length, H]: a view when its pages are consecutive."""
    if row.run_start >= 0:
        return cache_NSH[:, row.run_start : row.run_start + row.num_keys].unsqueeze(0)
    num_kv_heads, _, head_size = cache_NSH.shape
    paged = cache_NSH.view(num_kv_heads, -1, batch.page_size, head_size)
    gathered = paged.index_select(1, row.pages).view(num_kv_heads, -1, head_size)
    return gathered[:, row.offset : row.offset + row.num_keys].unsqueeze(0)
