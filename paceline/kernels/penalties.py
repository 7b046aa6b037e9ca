"""Processors that read a row's history: penalties and bad words. They write logits in place.

History is the slot's committed tokens and the window's drafts before the row; there are no
counters to keep. Shape letters: N logits rows, V vocabulary, S slots, L length, H history,
E words of a slot, C tokens of a word.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.rows import Asking, LogitRows, WindowRows, history, tail_of_history


class Penalties(NamedTuple):
    """float32 by slot. Repetition counts prompt and output, the other two output only."""

    repetition_S: Tensor
    presence_S: Tensor
    frequency_S: Tensor


def apply_penalties(
    logits_NV: Tensor,
    rows: LogitRows,
    tokens_SL: Tensor,
    prompt_len_S: Tensor,
    penalties: Penalties,
) -> None:
    """Divide (or multiply, when negative) seen tokens by repetition; subtract the other two."""
    if len(rows.row_N) == 0:
        return
    longest = int(rows.length_N.max())  # CPU-only shortcut: a kernel walks to its row's own length
    place_NH, value_NH, _ = _penalised(
        logits_NV, rows, tokens_SL[:, :longest], prompt_len_S, penalties
    )
    # A token that occurs twice is written twice, with the same value.
    logits_NV[rows.row_N[:, None], place_NH] = value_NH


def apply_penalties_by_slot(
    logits_NV: Tensor,
    rows: WindowRows,
    asking: Asking,
    tokens_SL: Tensor,
    prompt_len_S: Tensor,
    penalties: Penalties,
) -> None:
    """`apply_penalties` at fixed shapes, for the slots that ask."""
    at = rows.logit_rows()
    place_NH, new_NH, old_NH = _penalised(logits_NV, at, tokens_SL, prompt_len_S, penalties)
    asks_N1 = asking.rows_N(rows)[:, None]
    logits_NV[at.row_N[:, None], place_NH] = torch.where(asks_N1, new_NH, old_NH)


def _penalised(
    logits_NV: Tensor,
    rows: LogitRows,
    tokens_SL: Tensor,
    prompt_len_S: Tensor,
    penalties: Penalties,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of each row's history, their penalised logits and the logits as they are."""
    longest = tokens_SL.shape[1]
    token_NH, exists_NH = history(rows, tokens_SL, longest)
    place_H = torch.arange(token_NH.shape[1], device=logits_NV.device)
    is_output_NH = exists_NH & (
        (place_H >= prompt_len_S[rows.slot_N][:, None]) | (place_H >= longest)
    )
    count_NV = torch.zeros(
        (len(rows.row_N), logits_NV.shape[1]), dtype=torch.int32, device=logits_NV.device
    )
    count_NV.scatter_add_(1, token_NH, is_output_NH.to(torch.int32))
    count_NH = count_NV.gather(1, token_NH).to(torch.float32)

    repetition_N1, presence_N1, frequency_N1 = (p[rows.slot_N][:, None] for p in penalties)
    old_NH = logits_NV[rows.row_N[:, None], token_NH]
    new_NH = torch.where(old_NH > 0, old_NH / repetition_N1, old_NH * repetition_N1)
    new_NH = new_NH - frequency_N1 * count_NH - presence_N1 * (count_NH > 0)
    return token_NH, new_NH, old_NH


def ban_bad_words(
    logits_NV: Tensor, rows: LogitRows, tokens_SL: Tensor, bad_words_SEC: Tensor
) -> None:
    """Forbid the last token of each word whose other tokens the history ends with.

    Words are right-aligned; -1 fills the front, and all of an unused entry.
    """
    if len(rows.row_N) == 0:
        return
    forbid(logits_NV, rows.row_N, _completing(rows, tokens_SL, bad_words_SEC))


def ban_bad_words_by_slot(
    logits_NV: Tensor, rows: WindowRows, asking: Asking, tokens_SL: Tensor, bad_words_SEC: Tensor
) -> None:
    """`ban_bad_words` at fixed shapes, for the slots that ask."""
    at = rows.logit_rows()
    token_NE = _completing(at, tokens_SL, bad_words_SEC)
    forbid(logits_NV, at.row_N, torch.where(asking.rows_N(rows)[:, None], token_NE, -1))


def _completing(rows: LogitRows, tokens_SL: Tensor, bad_words_SEC: Tensor) -> Tensor:
    """int32 [N, E]: the token that would complete each word now; -1 where none would."""
    word_NEC = bad_words_SEC[rows.slot_N]
    tail_NC = tail_of_history(rows, tokens_SL, word_NEC.shape[2] - 1)
    prefix_NEC, last_NE = word_NEC[:, :, :-1], word_NEC[:, :, -1]
    matches_NE = ((prefix_NEC == tail_NC[:, None, :]) | (prefix_NEC == -1)).all(-1)
    return torch.where(matches_NE, last_NE, -1)


def forbid(logits_NV: Tensor, row_N: Tensor, token_NE: Tensor) -> None:
    """Make tokens impossible; -1 entries do nothing."""
    used_NE = token_NE >= 0
    token_NE = torch.where(used_NE, token_NE, 0).to(torch.int64)
    # Added, not assigned, so that an unused entry cannot undo a used one.
    drop_NE = torch.where(used_NE, -torch.inf, 0.0)
    logits_NV.index_put_((row_N[:, None].expand_as(token_NE), token_NE), drop_NE, accumulate=True)
