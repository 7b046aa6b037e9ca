"""Latent attention over pages. In torch.

A page slot holds one row for all heads, the normed latent and behind it the rotated key. Queries
were brought to the latents' space before (layers/mla), so heads are many queries of one KV head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.attention.reference import AttentionBatch, paged_attention
from paceline.kernels.elementwise.reference import rotate_, write_rows
from paceline.kernels.kv_codes.reference import KvScales


class LatentNorm(NamedTuple):
    """RMS norm of the latent; the rotary key has none."""

    weight_L: Tensor
    eps: float


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
    """Rotate the queries' ends into the ends of `out`; norm, rotate and write a token's KV row.

    A head of `query` ends with its rotary part, as wide as that behind the latent in `kv`. All
    of `out` but its rotary ends is written elsewhere. Slot -1 writes nothing.
    """
    latent_size = len(norm.weight_L)
    rope_size = kv_TH.shape[1] - latent_size
    out_TNH[..., latent_size:].copy_(_rotated(query_TNH[..., -rope_size:], rotation_TR))
    latent_TL = torch.rms_norm(
        kv_TH[:, :latent_size].float(), (latent_size,), norm.weight_L.float(), norm.eps
    )
    key_T1R = _rotated(kv_TH[:, None, latent_size:], rotation_TR)
    row_T1H = torch.cat((latent_TL.unsqueeze(1), key_T1R), dim=-1)
    write_rows(page_NSH, row_T1H, slot_T, None if scales is None else scales.key_N)


def _rotated(x_TNR: Tensor, rotation_TR: Tensor) -> Tensor:
    return rotate_(x_TNR.to(torch.float32, copy=True), rotation_TR)


def mla_attention(
    query_TNH: Tensor,
    page_NSH: Tensor,
    batch: AttentionBatch,
    scale: float,
    latent_size: int,
    scales: KvScales | None = None,
) -> Tensor:
    """softmax(q row^T * scale) latent for every head, causal inside the row; [T, N, latent].

    Keys are whole rows of the pages and values their latents. Entries without a row get zeros.
    """
    # A row's rotary end among the values costs a ninth more and spares a copy of the latents.
    out_TD = paged_attention(query_TNH.flatten(1), page_NSH, page_NSH, batch, scale, scales)
    return out_TD.view(query_TNH.shape)[..., :latent_size]
