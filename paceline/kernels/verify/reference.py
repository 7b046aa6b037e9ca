"""Accepts drafts and cuts windows: from one verdict per logits row to emitted tokens per request.

Never writes slot state. Shape letters: B rows of the step, N logits rows, M those of windows, P
some of them, K drafts, W = K + 1, S slots, E table entries.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.kernels.rng import reference as rng
from paceline.kernels.rows import WindowRows
from paceline.kernels.sampling.reference import (
    ACCEPTED,
    BY_EQUALITY,
    Knobs,
    SlotKnobs,
    distributions,
    draw_windows,
)

Ints = npt.NDArray[np.int32]
# Whole distributions of p and q exist for this many rows at a time, whatever the batch and K.
ROWS_AT_ONCE = 64

# Values of request.Done that a device may set; a test keeps them equal.
DONE_EOS = 1
DONE_STOP_TOKEN = 2
DONE_LENGTH = 3
DONE_ERROR = 6


class Verdicts(NamedTuple):
    """For each logits row: the token to emit if the window ends there, and may it go on."""

    token_N: Tensor  # int32: the draw, the replacement or the bonus
    bad_N: Tensor  # bool: the logits were unusable (NaN, or nothing allowed)
    ok_N: Tensor | None  # bool: the row's draft is accepted; None: accepted if equal to token_N

    @property
    def device(self) -> torch.device:
        return self.token_N.device


class SampledDrafts(NamedTuple):
    """What drafts were drawn from, by slot."""

    onehot_S: Tensor  # int32: 0 where prob_SKV says what they were drawn from
    prob_SKV: Tensor  # float32; its width may differ from the target's vocabulary


class Limits(NamedTuple):
    """What ends a request, by slot."""

    eos_SE: Ints  # -1 = unused
    stop_SE: Ints  # -1 = unused
    min_len_S: Ints  # a stop token is honoured from this committed length on
    max_len_S: Ints


class Settled(NamedTuple):
    """What each row emits."""

    token_BW: Ints  # -1 after count
    count_B: Ints
    done_B: Ints
    num_drafts_B: Ints  # real drafts that were verified
    num_accepted_B: Ints  # drafts among the emitted tokens, never the closing one


def accept_sampled(
    prob_NV: Tensor, draft_prob_ND: Tensor, draft_N: Tensor, unit_N: Tensor
) -> Tensor:
    """bool [N]: u < p / q for a draft that was drawn from q. D may differ from V."""
    index_N1 = draft_N[:, None].to(torch.int64)
    known_N1 = index_N1 < prob_NV.shape[1]
    p_N1 = prob_NV.gather(1, torch.where(known_N1, index_N1, 0)).masked_fill(~known_N1, 0.0)
    q_N1 = draft_prob_ND.gather(1, index_N1)
    return unit_N * q_N1[:, 0] < p_N1[:, 0]


def residual_logits(prob_NV: Tensor, draft_prob_ND: Tensor) -> Tensor:
    """log max(p - q, 0), which a rejected draft is replaced from; log p where nothing is left."""
    vocab_size, draft_vocab_size = prob_NV.shape[1], draft_prob_ND.shape[1]
    draft_prob_NV = draft_prob_ND[:, :vocab_size]
    if draft_vocab_size < vocab_size:
        padding = (0, vocab_size - draft_vocab_size)
        draft_prob_NV = torch.nn.functional.pad(draft_prob_NV, padding)
    left_NV = (prob_NV - draft_prob_NV).clamp(min=0.0)
    # Rounding may reject a draft although p = q everywhere.
    is_empty_N1 = left_NV.amax(-1, keepdim=True) <= 0
    return torch.where(is_empty_N1, prob_NV, left_NV).log()


def accept_by_rate(
    windows: WindowRows, seed_S2: Tensor, rates_K: Tensor, num_logits: int
) -> Tensor:
    """bool [N]: synthetic acceptance. Each draft is accepted with its position's chance."""
    rows = windows.logit_rows
    unit_M = rng.uniform(seed_S2[rows.slot_M], rows.position_M, rng.ACCEPT)
    rate_M = torch.nn.functional.pad(rates_K, (0, 1))[rows.offset_M.clamp(max=len(rates_K))]
    # -1 is no draft, so no rate can accept it.
    return rows.spread((unit_M < rate_M) & (rows.own_draft_M >= 0), num_logits)


def judge(
    logits_NV: Tensor, windows: WindowRows, knobs: SlotKnobs, drafts: SampledDrafts
) -> Verdicts:
    """Verdicts by rejection sampling for drafts that were sampled, else by equality.

    A sampled draft is accepted with chance p / q and replaced from max(p - q, 0), each with noise
    of its own domain. The token of an accepted row is its draft. `logits_NV` is overwritten.
    """
    rows = windows.logit_rows
    draft_M = rows.own_draft_M
    knobs_M = knobs.at(rows.slot_M)
    noise = knobs.noise(rows.slot_M, rows.position_M, rng.SAMPLE)
    is_sampled_M = (drafts.onehot_S[rows.slot_M] == 0) & (knobs_M.temperature_M > 0)
    verdict_M = torch.full_like(draft_M, BY_EQUALITY, dtype=torch.int8)
    for part_P in (is_sampled_M & (draft_M >= 0)).nonzero()[:, 0].split(ROWS_AT_ONCE):
        row_P, slot_P, offset_P = (t[part_P] for t in rows[:3])
        prob_PV = distributions(logits_NV[row_P], Knobs(*(t[part_P] for t in knobs_M)))
        draft_prob_PV = drafts.prob_SKV[slot_P, offset_P]
        unit_P = rng.uniform(noise.seed_M2[part_P], noise.position_M[part_P], rng.ACCEPT)
        ok_P = accept_sampled(prob_PV, draft_prob_PV, draft_M[part_P], unit_P)
        verdict_M[part_P] = ok_P.to(torch.int8)
        logits_NV[row_P[~ok_P]] = residual_logits(prob_PV[~ok_P], draft_prob_PV[~ok_P])
        for knob_M, off in zip(knobs_M, (1.0, 0, 1.0, 0.0), strict=True):
            knob_M[part_P[~ok_P]] = off
        noise.domain_M[part_P[~ok_P]] = rng.RESAMPLE
    token_M, bad_M = draw_windows(logits_NV, rows, knobs_M, noise, verdict_M)
    is_equal_M = (token_M == draft_M) & (draft_M >= 0)
    ok_M = torch.where(verdict_M == BY_EQUALITY, is_equal_M, verdict_M == ACCEPTED)
    token_M = torch.where(verdict_M == ACCEPTED, draft_M, token_M)
    num_logits = len(logits_NV)
    return Verdicts(*(rows.spread(t, num_logits) for t in (token_M, bad_M, ok_M)))


def settle(verdicts: Verdicts, windows: WindowRows, limits: Limits) -> Settled:
    """Accept the leading drafts, close each window with one token of its own, cut it at a stop."""
    token_N, bad_N = verdicts.token_N.numpy(), verdicts.bad_N.numpy()
    ok_N = None if verdicts.ok_N is None else verdicts.ok_N.numpy()
    slot_B, first_B, width_B, length_B, draft_BK = windows.arrays
    eos_SE, stop_SE, min_len_S, max_len_S = limits
    num_rows, k = draft_BK.shape
    if not len(token_N):  # no row has a window
        none_B = np.zeros(num_rows, np.int32)
        return Settled(np.full((num_rows, k + 1), -1, np.int32), none_B, none_B, none_B, none_B)
    step_W = np.arange(k + 1)
    step_K = step_W[:k]
    first_B1, last_B1 = first_B[:, None], np.maximum(width_B[:, None], 1) - 1
    # A row without a window looks at any other's verdicts, and emits nothing in the end.
    row_BK = np.minimum(first_B1 + np.minimum(step_K, last_B1), len(token_N) - 1)
    real_BK = (draft_BK >= 0) & (step_K < last_B1)
    ok_BK = token_N[row_BK] == draft_BK if ok_N is None else ok_N[row_BK]
    ok_BK = ok_BK & real_BK & ~bad_N[row_BK]
    num_ok_B = ok_BK.cumprod(axis=1).sum(axis=1)
    num_ok_B1 = num_ok_B[:, None]
    closing_B1 = np.minimum(first_B1 + num_ok_B1, len(token_N) - 1)

    closing_token_B1 = token_N[closing_B1]
    padded_BW = np.concatenate((draft_BK, closing_token_B1), axis=1)
    token_BW = np.where(step_W < num_ok_B1, padded_BW, closing_token_B1)
    before_BW = length_B[:, None] + step_W  # committed length before each token
    may_stop_BW = before_BW >= min_len_S[slot_B][:, None]
    is_eos_BW = (token_BW[:, :, None] == eos_SE[slot_B][:, None, :]).any(-1)
    is_stop_BW = (token_BW[:, :, None] == stop_SE[slot_B][:, None, :]).any(-1)
    is_full_BW = before_BW + 1 >= max_len_S[slot_B][:, None]
    code_BW = np.where(is_full_BW, DONE_LENGTH, 0)
    code_BW = np.where(is_stop_BW & may_stop_BW, DONE_STOP_TOKEN, code_BW)
    code_BW = np.where(is_eos_BW & may_stop_BW, DONE_EOS, code_BW)
    failed_BW = (step_W == num_ok_B1) & bad_N[closing_B1]
    code_BW = np.where(failed_BW, DONE_ERROR, code_BW)

    num_running_B = (code_BW == 0).cumprod(axis=1).sum(axis=1)  # tokens before the first stop
    count_B = (np.minimum(num_ok_B, num_running_B) + 1) * (width_B > 0)
    done_B = (code_BW * (step_W == count_B[:, None] - 1)).sum(axis=1)
    token_BW = np.where(step_W < count_B[:, None], token_BW, -1)
    settled = (token_BW, count_B, done_B, real_BK.sum(axis=1), np.minimum(num_ok_B, count_B))
    return Settled(*(array.astype(np.int32, copy=False) for array in settled))
