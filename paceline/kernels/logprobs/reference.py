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

from paceline.kernels.rows import FeatureMask, WindowRows
from paceline.kernels.verify.reference import Verdicts

Singles = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]
# Stands for NaN in a row that is unusable anyway, so that its numbers stay numbers.
_LOWEST = -1e30


class LogprobResults(NamedTuple):
    """Where a step's logprobs go: entry `turn % E` of a ring. Other rows stay as they are."""

    ids_EBWT: Tensor  # int32
    values_EBWT: Tensor  # float32
    rank_EBW: Tensor  # int32
    turn_1: Tensor  # int32
    place_B: Tensor | None = None  # which B of the ring is row b's; None: b itself


def write_logprobs(
    logits_NV: Tensor,
    verdicts: Verdicts,
    windows: WindowRows,
    mask: FeatureMask,
    num_top_S: Tensor,
    results: LogprobResults,
) -> None:
    """Logprobs of what each window position emits, and of the slot's number of most likely tokens.

    Of the slots that ask for them. A position that its window does not reach may be written too;
    it is not read. Entries past a slot's number stay as they are.
    """
    rows = mask.logit_rows(windows)
    token_M = verdicts.token_N[rows.row_M]
    if verdicts.ok_N is not None:
        token_M = torch.where(verdicts.ok_N[rows.row_M], rows.own_draft_M, token_M)
    most = results.ids_EBWT.shape[3] - 1
    num_top_M = num_top_S[rows.slot_M].clamp(max=min(most, logits_NV.shape[1]))
    place_M = rows.owner_M if results.place_B is None else results.place_B[rows.owner_M]
    ids_EBWT, values_EBWT, rank_EBW = (
        t.numpy() for t in (results.ids_EBWT, results.values_EBWT, results.rank_EBW)
    )
    entry = int(results.turn_1) % len(ids_EBWT)
    columns = (rows.row_M, token_M, num_top_M, place_M, rows.offset_M)
    for row, token, top, b, j in zip(*(t.tolist() for t in columns), strict=True):
        if token < 0:
            continue
        found = _row_logprobs(logits_NV[row].float().numpy(), token, top)
        place = (entry, b, j)
        ids_EBWT[place][: 1 + top], values_EBWT[place][: 1 + top], rank_EBW[place] = found


def token_logprobs(logits_NV: Tensor, token_N: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids_NT (int32), values_NT (float32), rank_N (int32).

    Entry 0 is the token itself, then the `top` most likely in descending order (ties to the lowest
    id). The rank counts from 1; equal tokens share it. A row whose token is -1 gives -1 and 0.
    """
    top = min(top, logits_NV.shape[1])
    if not logits_NV.is_cpu:
        return token_logprobs_reference(logits_NV, token_N, top)
    # Skips rows without a token and never orders a whole row.
    ids_NT = np.full((len(token_N), 1 + top), -1, np.int32)
    values_NT = np.zeros((len(token_N), 1 + top), np.float32)
    rank_N = np.zeros(len(token_N), np.int32)
    for n, (row_V, token) in enumerate(zip(logits_NV.numpy(), token_N.tolist(), strict=True)):
        if token >= 0:
            ids_NT[n], values_NT[n], rank_N[n] = _row_logprobs(row_V, token, top)
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


def _row_logprobs(row_V: Singles, token: int, top: int) -> tuple[Longs, Singles, int]:
    """Ids and logprobs of the token and of the `top` most likely ones, and the token's rank."""
    best = row_V.max()
    if not np.isfinite(best):
        row_V = np.nan_to_num(row_V, nan=_LOWEST, posinf=-_LOWEST, neginf=_LOWEST)
        best = row_V.max()
    log_total = best + np.log(np.exp(row_V - best).sum())
    ids_T = np.concatenate(([token], _largest(row_V, top)))
    rank = 1 + int(np.count_nonzero(row_V > row_V[token]))
    return ids_T.astype(np.int64), (row_V[ids_T] - log_total).astype(np.float32), rank


def _largest(row_V: Singles, count: int) -> Longs:
    if count == 0:
        return np.empty(0, np.int64)
    threshold = np.partition(row_V, -count)[-count]
    ids = np.flatnonzero(row_V >= threshold)
    return ids[np.argsort(-row_V[ids], kind="stable")[:count]]
