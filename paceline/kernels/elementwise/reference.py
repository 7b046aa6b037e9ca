"""What a decoder layer does between its products: norms, gates, rotary heads. In torch.

A residual is updated in place where the name says so. Pairs of a rotation are interleaved (2i,
2i + 1): weights are permuted once at load (models/reader), so that a rotation is one complex
product. Only q . k matters, so any fixed order of the pairs is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.kv_codes.reference import KvScales, encode


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """x / rms(x) * weight over the last axis, in fp32.

    `dtype` is the result's; None: the weight's.
    """
    normed_TD = torch.rms_norm(x_TD.float(), weight_D.shape, weight_D.float(), eps)
    return normed_TD.to(dtype or weight_D.dtype)


def add_rms_norm(
    residual_TD: Tensor,
    delta_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """residual += delta in place, then its norm: the pair that opens every block."""
    residual_TD.add_(delta_TD)
    return rms_norm(residual_TD, weight_D, eps, dtype)


def silu_and_mul(gate_up_TI: Tensor) -> Tensor:
    """silu(first half) * second half of the fused gate-up projection; overwrites its input."""
    gate, up = gate_up_TI.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate, inplace=True).mul_(up)


def sigmoid_mul(x_TD: Tensor, gate_TD: Tensor) -> Tensor:
    """x * sigmoid(gate), in fp32; the result has the type of x. The gate's rows may have gaps."""
    return (x_TD.float() * torch.sigmoid(gate_TD.float())).to(x_TD.dtype)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each query head and each key head, before the rotation."""

    query_H: Tensor
    key_H: Tensor
    eps: float


def place_heads(
    qkv_TD: Tensor,
    rotation_TH: Tensor,
    norms: HeadNorms | None,
    key_NSH: Tensor,
    value_NSH: Tensor,
    slot_T: Tensor,
    scales: KvScales | None = None,
) -> None:
    """Norm and rotate queries and keys in place, write keys and values to their page slots.

    A token's row of `qkv` holds its query heads, its key heads, its value heads. Rows may
    have gaps. `scales`: of fp8 pages.
    """
    num_kv, _, head_size = key_NSH.shape
    qkv_TNH = qkv_TD.unflatten(1, (-1, head_size))
    num_q = qkv_TNH.shape[1] - 2 * num_kv
    query_TNH, key_TNH, value_TNH = qkv_TNH.split((num_q, num_kv, num_kv), dim=1)
    if norms is not None:
        for x_TNH, weight_H in ((query_TNH, norms.query_H), (key_TNH, norms.key_H)):
            x_TNH.copy_(torch.rms_norm(x_TNH.float(), (head_size,), weight_H.float(), norms.eps))
    rotate_(qkv_TNH[:, : num_q + num_kv], rotation_TH)
    write_kv(key_NSH, value_NSH, key_TNH, value_TNH, slot_T, scales)


def rotate_(x_TNH: Tensor, rotation_TH: Tensor) -> Tensor:
    """Rotate pairs of the last axis in place. rotation is complex64 [T, H / 2]: cos + i sin."""
    if x_TNH.dtype != torch.float32:  # complex numbers of two bytes a part are only half there
        return x_TNH.copy_(rotate_(x_TNH.float(), rotation_TH))
    pairs = torch.view_as_complex(x_TNH.unflatten(-1, (-1, 2)))
    pairs.mul_(rotation_TH.unsqueeze(1))
    return x_TNH


def write_kv(
    key_NSH: Tensor,
    value_NSH: Tensor,
    new_key_TNH: Tensor,
    new_value_TNH: Tensor,
    slot_T: Tensor,
    scales: KvScales | None = None,
) -> None:
    """Write new keys and values at flat page slots (page * page_size + offset); -1 writes nothing.

    The cache is head-major, [N, P * page_size, H]: the run of a sequence is one slice per head.
    """
    write_rows(key_NSH, new_key_TNH, slot_T, None if scales is None else scales.key_N)
    write_rows(value_NSH, new_value_TNH, slot_T, None if scales is None else scales.value_N)


def write_rows(
    cache_NSH: Tensor, new_TNH: Tensor, slot_T: Tensor, scale_N: Tensor | None = None
) -> None:
    # torch reads -1 as the last row, so the mask comes before the index.
    keep = slot_T >= 0
    if not bool(keep.all()):
        slot_T, new_TNH = slot_T[keep], new_TNH[keep]
    stored = new_TNH.to(cache_NSH.dtype) if scale_N is None else encode(new_TNH, scale_N[:, None])
    cache_NSH.index_copy_(1, slot_T.to(torch.int64), stored.transpose(0, 1))
