"""Processors that read only tables: allowed ids, minimum length, bias. They write logits in place.

Never look at history. Shape letters: N logits rows, V vocabulary, S slots, E table entries,
B words of 32 bits (bit v % 32 of word v // 32 stands for token v).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.penalties import forbid
from paceline.kernels.rows import Asking, LogitRows, WindowRows


def keep_allowed(logits_NV: Tensor, row_N: Tensor, bits_NB: Tensor) -> None:
    """Forbid the tokens whose bit is not set."""
    if len(row_N) == 0:
        return
    if logits_NV.is_cpu:
        # CPU-only shortcut: numpy unpacks bits in one pass.
        array_NV, bytes_NB = logits_NV.numpy(), bits_NB.contiguous().numpy().view(np.uint8)
        for row, row_bytes in zip(row_N.tolist(), bytes_NB, strict=True):
            forbidden_V = np.unpackbits(row_bytes, bitorder="little", count=array_NV.shape[1]) == 0
            array_NV[row][forbidden_V] = -np.inf
        return
    keep_allowed_reference(logits_NV, row_N, bits_NB)


def keep_allowed_reference(logits_NV: Tensor, row_N: Tensor, bits_NB: Tensor) -> None:
    """`keep_allowed` in torch operations on any device."""
    bit_NV = _unpacked(bits_NB, logits_NV.shape[1])
    logits_NV[row_N] = logits_NV[row_N].masked_fill(bit_NV == 0, -torch.inf)


def keep_allowed_by_row(logits_NV: Tensor, bits_NB: Tensor) -> None:
    """`keep_allowed` for every logits row, each with a mask of its own."""
    logits_NV.masked_fill_(_unpacked(bits_NB, logits_NV.shape[1]) == 0, -torch.inf)


def keep_allowed_by_slot(
    logits_NV: Tensor, rows: WindowRows, asking: Asking, bits_SB: Tensor
) -> None:
    """`keep_allowed` at fixed shapes, for the slots that ask."""
    bit_NV = _unpacked(bits_SB[rows.logit_rows().slot_N], logits_NV.shape[1])
    logits_NV.masked_fill_((bit_NV == 0) & asking.rows_N(rows)[:, None], -torch.inf)


def _unpacked(bits_NB: Tensor, vocab_size: int) -> Tensor:
    shift = torch.arange(32, dtype=torch.int32, device=bits_NB.device)
    return ((bits_NB[:, :, None] >> shift) & 1).flatten(1)[:, :vocab_size]


def ban_early_stops(
    logits_NV: Tensor, rows: LogitRows, min_len_S: Tensor, eos_SE: Tensor, stop_SE: Tensor
) -> None:
    """Forbid EOS and stop tokens where the sequence is still shorter than its minimum."""
    if len(rows.row_N) == 0:
        return
    early_N = rows.length_N + rows.offset_N < min_len_S[rows.slot_N]
    for table_SE in (eos_SE, stop_SE):
        token_NE = torch.where(early_N[:, None], table_SE[rows.slot_N], -1)
        forbid(logits_NV, rows.row_N, token_NE)


class Stops(NamedTuple):
    """What ends a sequence, and from which committed length on it may."""

    min_len_S: Tensor
    eos_SE: Tensor
    stop_SE: Tensor


def ban_early_stops_by_slot(
    logits_NV: Tensor, rows: WindowRows, asking: Asking, stops: Stops
) -> None:
    """`ban_early_stops` at fixed shapes, for the slots that ask."""
    at = rows.logit_rows()
    early_N = at.length_N + at.offset_N < stops.min_len_S[at.slot_N]
    early_N &= asking.rows_N(rows)
    for table_SE in (stops.eos_SE, stops.stop_SE):
        forbid(logits_NV, at.row_N, torch.where(early_N[:, None], table_SE[at.slot_N], -1))


def add_bias(logits_NV: Tensor, rows: LogitRows, ids_SE: Tensor, values_SE: Tensor) -> None:
    """Add each slot's biases; entries with id -1 are unused."""
    if len(rows.row_N) == 0:
        return
    token_NE = ids_SE[rows.slot_N]
    value_NE = values_SE[rows.slot_N].masked_fill(token_NE < 0, 0.0)
    token_NE = token_NE.clamp(min=0).to(torch.int64)
    row_NE = rows.row_N[:, None].expand_as(token_NE)
    logits_NV.index_put_((row_NE, token_NE), value_NE, accumulate=True)


def add_bias_by_slot(
    logits_NV: Tensor, rows: WindowRows, asking: Asking, ids_SE: Tensor, values_SE: Tensor
) -> None:
    """`add_bias` at fixed shapes, for the slots that ask."""
    at = rows.logit_rows()
    token_NE = torch.where(asking.rows_N(rows)[:, None], ids_SE[at.slot_N], -1)
    value_NE = values_SE[at.slot_N].masked_fill(token_NE < 0, 0.0)
    token_NE = token_NE.clamp(min=0).to(torch.int64)
    row_NE = at.row_N[:, None].expand_as(token_NE)
    logits_NV.index_put_((row_NE, token_NE), value_NE, accumulate=True)
