"""Rotary embedding and the KV write: torch references with the signatures of their Triton twins.

Pairs are interleaved (2i, 2i + 1): weights are permuted once at load (models/loading), so that a
rotation is one complex product. Only q . k matters, so any fixed order of the pairs is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
