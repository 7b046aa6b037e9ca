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

from paceline.kernels.rng import numpy as np_rng
from paceline.kernels.rng import reference as rng
from paceline.kernels.rows import Integers, LogitRows, WindowRows
from paceline.kernels.sampling.numpy import (
    ACCEPTED,
    BY_EQUALITY,
    distributions,
    draw_windows,
)
from paceline.kernels.sampling.reference import Knobs, SlotKnobs

Ints = npt.NDArray[np.int32]
Booleans = npt.NDArray[np.bool_]
# Whole distributions of p and q exist for this many rows at a time, whatever the batch and K.
ROWS_AT_ONCE = 64
# A draft that was drawn has a probability; divisors are kept above 0 all the same.
LEAST_Q = 1e-37

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


def accept_block(
    prob_NV: Tensor, draft_prob_ND: Tensor, draft_N: Tensor, unit_N: Tensor, offset_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Block verification (Sun et al., 2024). Rows are drafts 0, 1, ... of one window after another.

    Returns which drafts are accepted (bool), the factor of p in each row's residual, and which rows
    are verified (bool): those before the first unusable one of their window.
    Drafts 0 .. i-1 are worth reach_i = min(1, reach_{i-1} p / q). The longest prefix whose coin
    says so is accepted, although a shorter one may have been refused by its coin.
    """
    index_N1 = draft_N[:, None].to(torch.int64)
    q_N1 = draft_prob_ND.gather(1, index_N1).clamp(min=LEAST_Q)
    ratio_N = (prob_NV.gather(1, index_N1) / q_N1)[:, 0]
    reach_N, is_in_N = torch.ones_like(ratio_N), ~prob_NV[:, 0].isnan()
    for j in range(1, int(offset_N.max()) + 1):
        at = (offset_N == j).nonzero()[:, 0]
        reach_N[at] = (reach_N[at - 1] * ratio_N[at - 1]).clamp(max=1.0)
        is_in_N[at] &= is_in_N[at - 1]
    left_N = _left(prob_NV * reach_N[:, None], draft_prob_ND).sum(-1)
    # The prefix that ends with each row's draft; the row after it says what is left of p.
    worth_N = (reach_N * ratio_N).clamp(max=1.0)
    has_next_N = torch.nn.functional.pad((is_in_N & (offset_N > 0))[1:], (0, 1))
    next_left_N = left_N.roll(-1)
    share_N = next_left_N / (next_left_N + 1.0 - worth_N)
    chance_N = torch.where(has_next_N & (worth_N < 1), share_N, worth_N)
    length_N = torch.where(is_in_N & (unit_N < chance_N), offset_N + 1, 0)
    window_N = (offset_N == 0).cumsum(0) - 1
    longest_W = torch.zeros_like(length_N).scatter_reduce_(0, window_N, length_N, "amax")
    return offset_N < longest_W[window_N], reach_N, is_in_N


def _left(prob_NV: Tensor, draft_prob_ND: Tensor) -> Tensor:
    """max(p - q, 0). D may differ from V."""
    vocab_size, draft_vocab_size = prob_NV.shape[1], draft_prob_ND.shape[1]
    draft_prob_NV = draft_prob_ND[:, :vocab_size]
    if draft_vocab_size < vocab_size:
        padding = (0, vocab_size - draft_vocab_size)
        draft_prob_NV = torch.nn.functional.pad(draft_prob_NV, padding)
    return (prob_NV - draft_prob_NV).clamp(min=0.0)


def residual_logits(prob_NV: Tensor, draft_prob_ND: Tensor) -> Tensor:
    """log max(p - q, 0), which a rejected draft is replaced from; log p where nothing is left."""
    left_NV = _left(prob_NV, draft_prob_ND)
    # Rounding may reject a draft although p = q everywhere.
    is_empty_N1 = left_NV.amax(-1, keepdim=True) <= 0
    return torch.where(is_empty_N1, prob_NV, left_NV).log()


def accept_by_rate(
    windows: WindowRows, seed_S2: Tensor, rates_SK: Tensor, num_logits: int
) -> Tensor:
    """bool [N]: synthetic acceptance. Each draft is accepted with the chance that its slot's
    request has at its position."""
    slot_B, first_B, width_B, length_B, draft_BK = windows.arrays
    ok_N = np.zeros(num_logits, np.bool_)
    k = min(draft_BK.shape[1], rates_SK.shape[1])  # others have no rate
    # -1 is no draft, so no rate can accept it.
    is_draft_BK = (draft_BK[:, :k] >= 0) & (np.arange(k) < width_B[:, None])
    row_D, offset_D = is_draft_BK.nonzero()
    if len(row_D):
        slot_D, position_D = slot_B[row_D], torch.from_numpy(length_B[row_D] + offset_D)
        unit_D = np_rng.uniform(seed_S2[slot_D], position_D, rng.ACCEPT).numpy()
        ok_N[first_B[row_D] + offset_D] = unit_D < rates_SK.numpy()[slot_D, offset_D]
    return torch.from_numpy(ok_N)


def judge(
    logits_NV: Tensor,
    windows: WindowRows,
    knobs: SlotKnobs,
    drafts: SampledDrafts,
    is_block: bool = False,
) -> Verdicts:
    """Verdicts by rejection sampling for drafts that were sampled, else by equality.

    A sampled draft is accepted with chance p / q and replaced from max(p - q, 0), each with noise
    of a separate domain. The token of an accepted row is its draft. `logits_NV` is overwritten.
    `is_block`: the drafts of a window are accepted together (`accept_block`), up to the first
    position that has no draft or unusable logits.
    """
    rows = windows.logit_rows
    draft_M = rows.own_draft_M
    knobs_M = knobs.at(rows.slot_M)
    noise = knobs.noise(rows.slot_M, rows.position_M, rng.SAMPLE)
    is_sampled_M = (drafts.onehot_S[rows.slot_M] == 0) & (knobs_M.temperature_M > 0)
    verdict_M = torch.full_like(draft_M, BY_EQUALITY, dtype=torch.int8)
    at = (is_sampled_M & (draft_M >= 0)).nonzero()[:, 0]
    for part_P in _blocks(at, rows, windows) if is_block else at.split(ROWS_AT_ONCE):
        row_P, slot_P, offset_P, length_P = (t[part_P] for t in rows[:4])
        prob_PV = distributions(logits_NV[row_P], Knobs(*(t[part_P] for t in knobs_M)))
        draft_prob_PV = drafts.prob_SKV[slot_P, offset_P]
        domain_P = rng.ACCEPT + rng.PER_DRAFT * offset_P
        unit_P = rng.uniform(noise.seed_M2[part_P], length_P, domain_P)
        chances = (prob_PV, draft_prob_PV, draft_M[part_P], unit_P)
        if is_block:
            ok_P, reach_P, is_in_P = accept_block(*chances, offset_P)
            prob_PV *= reach_P[:, None]
            ok_P |= ~is_in_P  # not replaced from a residual
            verdict_M[part_P[is_in_P]] = ok_P[is_in_P].to(torch.int8)
        else:
            ok_P = accept_sampled(*chances)
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


def _blocks(at: Tensor, rows: LogitRows, windows: WindowRows) -> tuple[Tensor, ...]:
    """The leading ones of the given rows in each window, its last row never among them: in parts of
    whole windows."""
    at = at[rows.offset_M[at] + 1 < windows.width_B[rows.owner_M[at]]]
    _, window, counts = rows.owner_M[at].unique_consecutive(return_inverse=True, return_counts=True)
    rank = torch.arange(len(at)) - (counts.cumsum(0) - counts)[window]
    at = at[rows.offset_M[at] == rank]
    starts = (rows.offset_M[at] == 0).nonzero()[:, 0]
    cuts = starts[:: max(1, ROWS_AT_ONCE // windows.width)].tolist()
    return at.tensor_split(cuts[1:]) if cuts else ()


def settle(verdicts: Verdicts, windows: WindowRows, limits: Limits) -> Settled:
    """Accept the leading drafts, close each window with one more token, cut it at a stop."""
    token_N, bad_N = verdicts.token_N.numpy(), verdicts.bad_N.numpy()
    ok_N = None if verdicts.ok_N is None else verdicts.ok_N.numpy()
    slot_B, first_B, width_B, length_B, draft_BK = windows.arrays
    num_rows, k = draft_BK.shape
    if not len(token_N):  # no row has a window
        none_B = np.zeros(num_rows, np.int32)
        return Settled(np.full((num_rows, k + 1), -1, np.int32), none_B, none_B, none_B, none_B)
    step_W = np.arange(k + 1)
    num_ok_B = num_real_B = np.zeros(num_rows, np.int32)
    if k:
        num_ok_B, num_real_B = _accepted(token_N, bad_N, ok_N, windows, step_W[:k])
    num_ok_B1 = num_ok_B[:, None]
    closing_B1 = np.minimum(first_B[:, None] + num_ok_B1, len(token_N) - 1)
    token_BW = closing_token_B1 = token_N[closing_B1]
    if k:
        padded_BW = np.concatenate((draft_BK, closing_token_B1), axis=1)
        token_BW = np.where(step_W < num_ok_B1, padded_BW, closing_token_B1)
    code_BW = _end_codes(token_BW, slot_B, length_B[:, None] + step_W, limits)
    failed_BW = (step_W == num_ok_B1) & bad_N[closing_B1]
    if failed_BW.any():
        code_BW = np.where(failed_BW, DONE_ERROR, 0 if code_BW is None else code_BW)

    count_B, done_B = (num_ok_B + 1) * (width_B > 0), np.zeros(num_rows, np.int32)
    if code_BW is not None:
        num_running_B = (code_BW == 0).cumprod(axis=1).sum(axis=1)  # tokens before the first stop
        count_B = (np.minimum(num_ok_B, num_running_B) + 1) * (width_B > 0)
        done_B = (code_BW * (step_W == count_B[:, None] - 1)).sum(axis=1)
    token_BW = np.where(step_W < count_B[:, None], token_BW, -1)
    settled = (token_BW, count_B, done_B, num_real_B, np.minimum(num_ok_B, count_B))
    return Settled(*(array.astype(np.int32, copy=False) for array in settled))


def _accepted(
    token_N: Integers, bad_N: Booleans, ok_N: Booleans | None, windows: WindowRows, step_K: Integers
) -> tuple[Integers, Integers]:
    """Leading drafts of each row that are accepted, and all its drafts."""
    _, first_B, width_B, _, draft_BK = windows.arrays
    last_B1 = np.maximum(width_B[:, None], 1) - 1
    # A row without a window looks at any other's verdicts, and emits nothing in the end.
    row_BK = np.minimum(first_B[:, None] + np.minimum(step_K, last_B1), len(token_N) - 1)
    real_BK = (draft_BK >= 0) & (step_K < last_B1)
    ok_BK = token_N[row_BK] == draft_BK if ok_N is None else ok_N[row_BK]
    ok_BK = ok_BK & real_BK & ~bad_N[row_BK]
    return ok_BK.cumprod(axis=1).sum(axis=1), real_BK.sum(axis=1)


def _end_codes(
    token_BW: Integers, slot_B: Integers, before_BW: Integers, limits: Limits
) -> Integers | None:
    """What ends a request at each token; None: nothing does. `before_BW`: tokens committed before
    it."""
    eos_SE, stop_SE, min_len_S, max_len_S = limits
    is_full_BW = before_BW + 1 >= max_len_S[slot_B][:, None]
    is_eos_BW = (token_BW[:, :, None] == eos_SE[slot_B][:, None, :]).any(-1)
    is_stop_BW = (token_BW[:, :, None] == stop_SE[slot_B][:, None, :]).any(-1)
    if not (is_full_BW.any() or is_eos_BW.any() or is_stop_BW.any()):
        return None
    may_stop_BW = before_BW >= min_len_S[slot_B][:, None]
    code_BW = np.where(is_full_BW, DONE_LENGTH, 0)
    code_BW = np.where(is_stop_BW & may_stop_BW, DONE_STOP_TOKEN, code_BW)
    return np.where(is_eos_BW & may_stop_BW, DONE_EOS, code_BW)
