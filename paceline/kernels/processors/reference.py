"""Processors of logits: allowed ids, minimum length, bias, penalties, bad words.

They write logits in place. Each touches only the windows of slots that use it. History is the
slot's committed tokens and the window's drafts before the row; there are no counters to keep. Shape
letters: M logits rows, N all of them, V vocabulary, S slots, L length, H history, E entries of a
slot's table, C tokens of a word, B rows of the step, R rows with late masks, W window positions, X
words of 32 bits (bit v % 32 of word v // 32 is token v's).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.rows import FeatureMask, LogitRows, WindowRows, history, tail_of_history


class Stops(NamedTuple):
    """What ends a sequence, and from which committed length on it may."""

    min_len_S: Tensor
    eos_SE: Tensor
    stop_SE: Tensor


class LateBits(NamedTuple):
    """Token masks of one step, for some of its rows."""

    index_B: Tensor  # int32: entry of bits_RWX that is this row's; -1: the row has none
    bits_RWX: Tensor  # int32


def keep_allowed(
    logits_NV: Tensor, windows: WindowRows, mask: FeatureMask, bits_SX: Tensor
) -> None:
    """Forbid the tokens whose bit is not set for the slot."""
    rows = mask.logit_rows(windows)
    _forbid_unset(logits_NV, rows.row_M, bits_SX[rows.slot_M])


def keep_late(logits_NV: Tensor, windows: WindowRows, late: LateBits) -> None:
    """`keep_allowed` with a mask for each window position, for the rows that have some."""
    index_B, first_B, width_B = late.index_B.numpy(), windows.first_B, windows.width_B
    for b in np.flatnonzero(index_B >= 0).tolist():
        count = int(width_B[b])
        row_M = int(first_B[b]) + torch.arange(count)
        _forbid_unset(logits_NV, row_M, late.bits_RWX[index_B[b], :count])


def _forbid_unset(logits_NV: Tensor, row_M: Tensor, bits_MX: Tensor) -> None:
    # numpy unpacks bits in one pass.
    array_NV, bytes_MX = logits_NV.numpy(), bits_MX.contiguous().numpy().view(np.uint8)
    for row, row_bytes in zip(row_M.tolist(), bytes_MX, strict=True):
        forbidden_V = np.unpackbits(row_bytes, bitorder="little", count=array_NV.shape[1]) == 0
        array_NV[row][forbidden_V] = -np.inf


def ban_early_stops(
    logits_NV: Tensor, windows: WindowRows, mask: FeatureMask, stops: Stops
) -> None:
    """Forbid EOS and stop tokens where the sequence is still shorter than its minimum."""
    rows = mask.logit_rows(windows)
    early_M = rows.length_M + rows.offset_M < stops.min_len_S[rows.slot_M]
    for table_SE in (stops.eos_SE, stops.stop_SE):
        token_ME = torch.where(early_M[:, None], table_SE[rows.slot_M], -1)
        forbid(logits_NV, rows.row_M, token_ME)


def add_bias(
    logits_NV: Tensor, windows: WindowRows, mask: FeatureMask, ids_SE: Tensor, values_SE: Tensor
) -> None:
    """Add each slot's biases; entries with id -1 are unused."""
    rows = mask.logit_rows(windows)
    token_ME = ids_SE[rows.slot_M]
    value_ME = values_SE[rows.slot_M].masked_fill(token_ME < 0, 0.0)
    token_ME = token_ME.clamp(min=0).to(torch.int64)
    row_ME = rows.row_M[:, None].expand_as(token_ME)
    logits_NV.index_put_((row_ME, token_ME), value_ME, accumulate=True)


class Penalties(NamedTuple):
    """float32 by slot. Repetition counts prompt and output, the other two output only."""

    repetition_S: Tensor
    presence_S: Tensor
    frequency_S: Tensor


def apply_penalties(
    logits_NV: Tensor,
    windows: WindowRows,
    mask: FeatureMask,
    tokens_SL: Tensor,
    prompt_len_S: Tensor,
    penalties: Penalties,
) -> None:
    """Divide (or multiply, when negative) seen tokens by repetition; subtract the other two."""
    rows = mask.logit_rows(windows)
    if len(rows.row_M) == 0:
        return
    longest = int(rows.length_M.max())
    token_MH, exists_MH = history(rows, tokens_SL, longest)
    place_H = torch.arange(token_MH.shape[1])
    is_output_MH = exists_MH & (
        (place_H >= prompt_len_S[rows.slot_M][:, None]) | (place_H >= longest)
    )
    count_MV = torch.zeros((len(rows.row_M), logits_NV.shape[1]), dtype=torch.int32)
    count_MV.scatter_add_(1, token_MH, is_output_MH.to(torch.int32))
    count_MH = count_MV.gather(1, token_MH).to(torch.float32)

    repetition_M1, presence_M1, frequency_M1 = (p[rows.slot_M][:, None] for p in penalties)
    old_MH = logits_NV[rows.row_M[:, None], token_MH]
    new_MH = torch.where(old_MH > 0, old_MH / repetition_M1, old_MH * repetition_M1)
    new_MH = new_MH - frequency_M1 * count_MH - presence_M1 * (count_MH > 0)
    # A token that occurs twice is written twice, with the same value.
    logits_NV[rows.row_M[:, None], token_MH] = new_MH


def ban_bad_words(
    logits_NV: Tensor,
    windows: WindowRows,
    mask: FeatureMask,
    tokens_SL: Tensor,
    bad_words_SEC: Tensor,
) -> None:
    """Forbid the last token of each word whose other tokens the history ends with.

    Words are right-aligned; -1 fills the front, and all of an unused entry.
    """
    rows = mask.logit_rows(windows)
    forbid(logits_NV, rows.row_M, _completing(rows, tokens_SL, bad_words_SEC))


def _completing(rows: LogitRows, tokens_SL: Tensor, bad_words_SEC: Tensor) -> Tensor:
    """int32 [M, E]: the token that would complete each word now; -1 where none would."""
    word_MEC = bad_words_SEC[rows.slot_M]
    tail_MC = tail_of_history(rows, tokens_SL, word_MEC.shape[2] - 1)
    prefix_MEC, last_ME = word_MEC[:, :, :-1], word_MEC[:, :, -1]
    matches_ME = ((prefix_MEC == tail_MC[:, None, :]) | (prefix_MEC == -1)).all(-1)
    return torch.where(matches_ME, last_ME, -1)


def forbid(logits_NV: Tensor, row_M: Tensor, token_ME: Tensor) -> None:
    """Make tokens impossible; -1 entries do nothing."""
    used_ME = token_ME >= 0
    token_ME = torch.where(used_ME, token_ME, 0).to(torch.int64)
    # Added, not assigned, so that an unused entry cannot undo a used one.
    drop_ME = torch.where(used_ME, -torch.inf, 0.0)
    logits_NV.index_put_((row_M[:, None].expand_as(token_ME), token_ME), drop_ME, accumulate=True)
