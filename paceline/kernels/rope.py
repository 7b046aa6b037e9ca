"""Rotary embedding and the KV write: torch references with the signatures of their fast twins.

Pairs are interleaved (2i, 2i + 1): weights are permuted once at load (models/loading), so that a
rotation is one complex product. Only q . k matters, so any fixed order of the pairs is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each query head and each key head, before the rotation."""

    query_H: Tensor
    key_H: Tensor
    eps: float


def place_heads(
    qkv_TNH: Tensor,
    rotation_TH: Tensor,
    norms: HeadNorms | None,
    key_NSH: Tensor,
    value_NSH: Tensor,
    slot_T: Tensor,
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values to their page slots.

    Overwrites its input; returns the queries, [T, N, H], which may be a view of it.
    """
    num_kv = key_NSH.shape[0]
    num_q = qkv_TNH.shape[1] - 2 * num_kv
    qk_TNH = qkv_TNH[:, : num_q + num_kv]
    if norms is not None:
        head_size = (qkv_TNH.shape[2],)
        query = torch.rms_norm(qk_TNH[:, :num_q], head_size, norms.query_H, norms.eps)
        key = torch.rms_norm(qk_TNH[:, num_q:], head_size, norms.key_H, norms.eps)
        qk_TNH = torch.cat((query, key), dim=1)
    rotate_(qk_TNH, rotation_TH)
    write_kv(key_NSH, value_NSH, qk_TNH[:, num_q:], qkv_TNH[:, num_q + num_kv :], slot_T)
    return qk_TNH[:, :num_q]


def rotate_(x_TNH: Tensor, rotation_TH: Tensor) -> Tensor:
    """Rotate pairs of the last axis in place. rotation is complex64 [T, H / 2]: cos + i sin."""
    pairs = torch.view_as_complex(x_TNH.unflatten(-1, (-1, 2)))
    pairs.mul_(rotation_TH.unsqueeze(1))
    return x_TNH


def write_kv(
    key_NSH: Tensor, value_NSH: Tensor, new_key_TNH: Tensor, new_value_TNH: Tensor, slot_T: Tensor
) -> None:
    """Write new keys and values at flat page slots (page * page_size + offset); -1 writes nothing.

    The cache is head-major, [N, P * page_size, H]: the run of a sequence is one slice per head.
    """
    # torch reads -1 as the last row, so the mask comes before the index.
    keep = slot_T >= 0
    if not bool(keep.all()):
        slot_T, new_key_TNH, new_value_TNH = slot_T[keep], new_key_TNH[keep], new_value_TNH[keep]
    key_NSH.index_copy_(1, slot_T, new_key_TNH.transpose(0, 1))
    value_NSH.index_copy_(1, slot_T, new_value_TNH.transpose(0, 1))
