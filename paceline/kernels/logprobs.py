"""Log probabilities of chosen tokens and of the most likely ones, from raw logits rows.

Never changes the logits. Shape letters: N logits rows, V vocabulary, T = 1 + number of top tokens;
at fixed shapes E ring entries, B rows of a step, W window positions, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.kernels.rows import Asking, WindowRows

# Stands for NaN in a row that is unusable anyway, so that its numbers stay numbers.
_LOWEST = -1e30


class LogprobResults(NamedTuple):
    """Where a step's logprobs go: entry `turn % E` of a ring. Rows that did not ask stay as is."""

    ids_EBWT: Tensor  # int32
    values_EBWT: Tensor  # float32
    rank_EBW: Tensor  # int32
    turn_1: Tensor  # int32


def token_logprobs(logits_NV: Tensor, token_N: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids_NT (int32), values_NT (float32), rank_N (int32).

    Entry 0 is the token itself, then the `top` most likely in descending order (ties to the lowest
    id). The rank counts from 1; equal tokens share it. A row whose token is -1 gives -1 and 0.
    """
    top = min(top, logits_NV.shape[1])
    if not logits_NV.is_cpu:
        return token_logprobs_reference(logits_NV, token_N, top)
    # CPU-only shortcut: skips rows without a token and never orders a whole row.
    ids_NT = np.full((len(token_N), 1 + top), -1, np.int32)
    values_NT = np.zeros((len(token_N), 1 + top), np.float32)
    rank_N = np.zeros(len(token_N), np.int32)
    for n, (row_V, token) in enumerate(zip(logits_NV.numpy(), token_N.tolist(), strict=True)):
        if token < 0:
            continue
        best = row_V.max()
        if not np.isfinite(best):
            row_V = np.nan_to_num(row_V, nan=_LOWEST, posinf=-_LOWEST, neginf=_LOWEST)
            best = row_V.max()
        log_total = best + np.log(np.exp(row_V - best).sum())
        ids_NT[n, 0] = token
        ids_NT[n, 1:] = _largest(row_V, top)
        values_NT[n] = row_V[ids_NT[n]] - log_total
        rank_N[n] = 1 + np.count_nonzero(row_V > row_V[token])
    return torch.from_numpy(ids_NT), torch.from_numpy(values_NT), torch.from_numpy(rank_N)


def token_logprobs_reference(
    logits_NV: Tensor, token_N: Tensor, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`token_logprobs` in torch operations on any device."""
    is_real_N1 = token_N[:, None] >= 0
    token_N1 = torch.where(is_real_N1, token_N[:, None], 0).to(torch.int64)
    usable_N1 = torch.isfinite(logits_NV.amax(-1, keepdim=True))
    cleaned_NV = torch.nan_to_num(logits_NV, nan=_LOWEST, posinf=-_LOWEST, neginf=_LOWEST)
    logits_NV = torch.where(usable_N1, logits_NV, cleaned_NV)
    # A stable sort: topk promises no order among equals.
    top_NT = logits_NV.argsort(dim=-1, descending=True, stable=True)[:, :top]
    ids_NT = torch.cat((token_N1, top_NT), 1)
    values_NT = logits_NV.gather(1, ids_NT) - logits_NV.logsumexp(-1, keepdim=True)
    rank_N = 1 + (logits_NV > logits_NV.gather(1, token_N1)).sum(-1)
    return (
        torch.where(is_real_N1, ids_NT, -1).to(torch.int32),
        torch.where(is_real_N1, values_NT, 0.0),
        torch.where(is_real_N1[:, 0], rank_N, 0).to(torch.int32),
    )


def write_logprobs(
    logits_NV: Tensor,
    token_N: Tensor,
    rows: WindowRows,
    asking: Asking,
    num_top_S: Tensor,
    results: LogprobResults,
) -> None:
    """`token_logprobs` at fixed shapes: each window position's token and the slot's own number of
    most likely ones, for the slots that ask.

    `token_N` is what is emitted if the window gets there; what it does not reach is nobody's.
    Entries past a slot's number stay as they are. Reads nothing on the host.
    """
    most = results.ids_EBWT.shape[3] - 1
    found = token_logprobs_reference(logits_NV.float(), token_N, min(most, logits_NV.shape[1]))
    slot_N = rows.logit_rows().slot_N
    num_N1 = num_top_S[slot_N].clamp(max=most)[:, None]
    asks_N1 = asking.rows_N(rows)[:, None]
    num_found = found[0].shape[1]
    place_T = torch.arange(num_found, device=slot_N.device)
    is_wanted_NT = asks_N1 & (place_T <= num_N1)
    entry_1 = (results.turn_1 % len(results.ids_EBWT)).to(torch.int64)
    for ring, new in zip(results[:2], found[:2], strict=True):
        new_BWT = new.view(*ring.shape[1:3], num_found)
        part = ring[..., :num_found]
        old_BWT = part.index_select(0, entry_1)[0]
        wanted_BWT = is_wanted_NT.view(new_BWT.shape)
        part.index_copy_(0, entry_1, torch.where(wanted_BWT, new_BWT, old_BWT)[None])
    rank = results.rank_EBW
    rank_BW = torch.where(
        asks_N1.view(rank.shape[1:]),
        found[2].view(rank.shape[1:]),
        rank.index_select(0, entry_1)[0],
    )
    rank.index_copy_(0, entry_1, rank_BW[None])


def _largest(row_V: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    if count == 0:
        return np.empty(0, np.int64)
    threshold = np.partition(row_V, -count)[-count]
    ids = np.flatnonzero(row_V >= threshold)
    return ids[np.argsort(-row_V[ids], kind="stable")[:count]]
