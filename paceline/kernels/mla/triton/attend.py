"""Latent attention over pages on the GPU.

Some of a token's heads are the rows of a tile. Rows of few queries are cut along KV and merged as
in attention/triton/spans, rows of many queries walk theirs from position 0: a query's bits depend
on its sequence alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.attention.reference import AttentionBatch, AttentionWork
from paceline.kernels.attention.triton.spans import LOG2_E
from paceline.kernels.attention.triton.work import MOST_BLOCKS, SHORT, STRETCH, TILE_ROWS, make_work
from paceline.kernels.gpu.triton import dependent, wait_for_input
from paceline.kernels.kv_codes.reference import KvScales
from paceline.kernels.kv_codes.triton import encoded
from paceline.kernels.mla.reference import LatentNorm
from paceline.kernels.mla.triton.kernels import (
    LatentTiles,
    latent_merge_kernel,
    latent_span_kernel,
    latent_tile_kernel,
    query_tiles,
    span_tiles,
)


def place_latent(
    query_TNH: Tensor,
    kv_TH: Tensor,
    rotation_TR: Tensor,
    norm: LatentNorm,
    out_TNH: Tensor,
    page_NSH: Tensor,
    slot_T: Tensor,
    scales: KvScales | None = None,
) -> None:
    num_heads, row_size = out_TNH.shape[1:]
    latent_size = len(norm.weight_L)
    rotation = torch.view_as_real(rotation_TR)
    _place_kernel[(len(kv_TH), 2)](
        *(query_TNH, kv_TH, rotation, norm.weight_L, out_TNH, page_NSH),
        *(scales.key_N if scales else None, slot_T),
        *(query_TNH.stride(0), kv_TH.stride(0), rotation.stride(0), norm.eps),
        HEADS=num_heads,
        QUERY=query_TNH.shape[2],
        LATENT=latent_size,
        ROPE=row_size - latent_size,
        PADDED_HEADS=triton.next_power_of_2(num_heads),
        PADDED_LATENT=triton.next_power_of_2(latent_size),
        PADDED_ROPE=triton.next_power_of_2(row_size - latent_size),
        **dependent(),
        num_warps=4,
    )


@triton.jit(do_not_specialize_on_alignment=["slot_T"])
def _place_kernel(  # noqa: PLR0913
    query_TNH,
    kv_TH,
    rotation_TR2,
    norm_L,
    out_TNH,
    page_SH,
    page_scale_1,
    slot_T,
    query_stride,
    kv_stride,
    rotation_stride,
    eps,
    HEADS: tl.constexpr,
    QUERY: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Two programs per token: the KV row, and the rotary ends of all heads."""
    wait_for_input(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_ROPE)
    in_rope = column < ROPE
    turn = tl.load(rotation_TR2 + token * rotation_stride + column, mask=in_rope, other=0.0)
    if tl.program_id(1) == 0:
        slot = tl.load(slot_T + token).to(tl.int64)
        latent_at = tl.arange(0, PADDED_LATENT)
        in_latent = latent_at < LATENT
        row = kv_TH + token * kv_stride
        latent = tl.load(row + latent_at, mask=in_latent, other=0.0).to(tl.float32)
        weight = tl.load(norm_L + latent_at, mask=in_latent, other=0.0).to(tl.float32)
        latent *= tl.rsqrt(tl.sum(latent * latent, axis=0) / LATENT + eps)
        latent *= weight
        key = tl.load(row + LATENT + column, mask=in_rope, other=0.0).to(tl.float32)
        key = tl.reshape(_turned(tl.reshape(key, (1, PADDED_ROPE)), turn), (PADDED_ROPE,))
        # -1 is no slot, and slots times row size may pass 2^31.
        page = page_SH + slot * (LATENT + ROPE)
        if page_scale_1 is not None:
            scale = tl.load(page_scale_1)
            latent, key = encoded(latent, scale), encoded(key, scale)
        kind = page_SH.dtype.element_ty
        tl.store(page + latent_at, latent.to(kind), mask=in_latent & (slot >= 0))
        tl.store(page + LATENT + column, key.to(kind), mask=in_rope & (slot >= 0))
    else:
        head = tl.arange(0, PADDED_HEADS)[:, None]
        inside = (head < HEADS) & in_rope[None, :]
        query_at = query_TNH + token * query_stride + head * QUERY + QUERY - ROPE
        query = tl.load(query_at + column[None, :], mask=inside, other=0.0).to(tl.float32)
        out_at = out_TNH + (token * HEADS + head) * (LATENT + ROPE) + LATENT
        out = _turned(query, turn).to(out_TNH.dtype.element_ty)
        tl.store(out_at + column[None, :], out, mask=inside)


@triton.jit
def _turned(x, turn):
    """Pairs of the last axis, each by its own angle."""
    pairs: tl.constexpr = x.shape[1] // 2
    cos, sin = tl.split(tl.reshape(turn, (1, pairs, 2)))
    even, odd = tl.split(tl.reshape(x, (x.shape[0], pairs, 2)))
    turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    return tl.reshape(turned, (x.shape[0], x.shape[1]))


def _make_work(
    batch: AttentionBatch, num_entries: int, num_heads: int, dtype: torch.dtype
) -> AttentionWork:
    tiles = span_tiles(dtype, num_heads)
    # To the lists a part of the heads is a KV head with a group.
    parts = replace(batch, group_size=tiles.group)
    sizes = {"block": tiles.block, "reach": STRETCH, "rows": tiles.rows}
    sizes["programs_per_sm"] = tiles.programs_per_sm
    return make_work(parts, num_entries, num_heads // tiles.group, **sizes)


def mla_attention(
    query_TNH: Tensor,
    page_NSH: Tensor,
    batch: AttentionBatch,
    scale: float,
    latent_size: int,
    scales: KvScales | None = None,
) -> Tensor:
    """Entries that no row owns get zeros. The scale is positive."""
    num_entries, num_heads, _ = query_TNH.shape
    assert page_NSH[0].numel() < 2**31, "the offset of a slot has 32 bits"
    if batch.work is None:
        # A batch is made anew for every pass, so its other layers find these lists.
        batch.work = _make_work(batch, num_entries, num_heads, query_TNH.dtype)
    out_TNL = query_TNH.new_empty(num_entries, num_heads, latent_size)
    pages = (page_NSH, scales.key_N if scales else None)
    _attend_spans(query_TNH, pages, batch, scale, out_TNL)
    if (batch.max_query_len or num_entries) > SHORT:
        _attend_tiles(query_TNH, pages, batch, scale, out_TNL)
    return out_TNL


def _attend_spans(
    query_TNH: Tensor,
    pages: tuple[Tensor, Tensor | None],
    batch: AttentionBatch,
    scale: float,
    out_TNL: Tensor,
) -> None:
    """Fill the outputs of short rows; entries that belong to no row get zeros."""
    work, device = batch.work, query_TNH.device
    assert work is not None
    num_entries, num_heads, latent_size = out_TNL.shape
    tiles = span_tiles(query_TNH.dtype, num_heads)
    parts = num_heads // tiles.group
    queries = tiles.rows // tiles.group
    partial_rows = min(batch.max_query_len or queries, queries) * tiles.group
    shape = (work.num_partials, parts, partial_rows)
    sums_EPRL = torch.empty((*shape, latent_size), dtype=torch.float32, device=device)
    states_EPR2 = torch.empty((*shape, 2), dtype=torch.float32, device=device)
    sizes = _sizes(query_TNH, batch, tiles, latent_size)
    latent_span_kernel[(len(work.span_E8) * parts,)](
        *(query_TNH, *pages, out_TNL, sums_EPRL, states_EPR2),
        *(work.span_E8, work.count_2, batch.table_SP, scale * LOG2_E),
        *(batch.table_SP.stride(0), partial_rows),
        **sizes,
        **dependent(),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    piece = min(128, latent_size & -latent_size)
    latent_merge_kernel[(num_entries, parts, latent_size // piece)](
        *(out_TNL, sums_EPRL, states_EPR2, work.merge_T4, pages[1], partial_rows),
        PARTS=parts,
        GROUP=tiles.group,
        LATENT=latent_size,
        PADDED_GROUP=triton.next_power_of_2(tiles.group),
        PIECE=piece,
        BLOCKS=min(STRETCH // tiles.block, MOST_BLOCKS),
        FINE_SPANS=MOST_BLOCKS,
        **dependent(),
        num_warps=4,
    )


def _attend_tiles(
    query_TNH: Tensor,
    pages: tuple[Tensor, Tensor | None],
    batch: AttentionBatch,
    scale: float,
    out_TNL: Tensor,
) -> None:
    """Fill the outputs of long rows."""
    work = batch.work
    assert work is not None
    tiles = query_tiles(query_TNH.dtype, out_TNL.shape[1])
    parts = out_TNL.shape[1] // tiles.group
    num_tiles = triton.cdiv(TILE_ROWS, tiles.rows)
    latent_tile_kernel[(parts * num_tiles, len(work.tile_E8))](
        *(query_TNH, *pages, out_TNL, work.tile_E8, work.count_2, batch.table_SP),
        *(scale * LOG2_E, batch.table_SP.stride(0)),
        batch.table_SP.shape[1] * batch.page_size,
        **_sizes(query_TNH, batch, tiles, out_TNL.shape[2]),
        TILES=num_tiles,
        **dependent(),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _sizes(
    query_TNH: Tensor, batch: AttentionBatch, tiles: LatentTiles, latent_size: int
) -> dict[str, int]:
    assert query_TNH.is_contiguous()
    num_heads, row_size = query_TNH.shape[1:]
    rope_size = row_size - latent_size
    return {
        "PARTS": num_heads // tiles.group,
        "GROUP": tiles.group,
        "LATENT": latent_size,
        "ROPE": rope_size,
        "PADDED_LATENT": max(16, triton.next_power_of_2(latent_size)),
        "PADDED_ROPE": max(16, triton.next_power_of_2(rope_size)),
        "PAGE": batch.page_size,
        "ROWS": tiles.rows,
        "SIZE": tiles.block,
    }
