"""Accepts drafts and cuts windows: from one verdict per logits row to emitted tokens per request.

Draws only what replaces a draft that was sampled, and never writes slot state.

Shape letters: B rows that sample, N logits rows, K drafts, W = K + 1, S slots, E table entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.kernels import rng
from paceline.kernels.rows import WindowRows
from paceline.kernels.sampling import (
    Knobs,
    Noise,
    SlotKnobs,
    distributions,
    draw_windows_reference,
)

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


class SampledDrafts(NamedTuple):
    """What drafts were drawn from, by slot."""

    onehot_S: Tensor  # int32: 0 where prob_SKV says what they were drawn from
    prob_SKV: Tensor  # float32; its width may differ from the target's vocabulary


class Windows(NamedTuple):
    """Where each row's verdicts are, its drafts and its place in the sequence."""

    slot_B: Tensor  # int64
    start_B: Tensor  # int64
    width_B: Tensor  # int64
    draft_BK: Tensor  # int32, -1 = none
    length_B: Tensor  # int32


class Limits(NamedTuple):
    """What ends a request, by slot."""

    eos_SE: Tensor  # int32, -1 = unused
    stop_SE: Tensor  # int32, -1 = unused
    min_len_S: Tensor  # int32: a stop token is honoured from this committed length on
    max_len_S: Tensor  # int32


class Settled(NamedTuple):
    """What each row emits. All int32."""

    token_BW: Tensor  # -1 after count
    count_B: Tensor
    done_B: Tensor
    num_drafts_B: Tensor
    num_accepted_B: Tensor  # drafts among the emitted tokens


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


def judge(logits_NV: Tensor, rows: WindowRows, knobs: SlotKnobs, drafts: SampledDrafts) -> Verdicts:
    """Verdicts at fixed shapes, by rejection for drafts that were sampled, else by equality.

    A sampled draft is accepted with chance p / q and replaced from max(p - q, 0), each with noise
    of its own. The token of an accepted row is its draft.
    """
    at, draft_N, used_N = rows.logit_rows(), rows.draft_N(), rows.used_N()
    logits_NV = logits_NV.float()
    knobs_N, seed_N2 = knobs.at(at.slot_N), knobs.seed_S2[at.slot_N]
    position_N = (at.length_N + at.offset_N).to(torch.int32)
    is_sampled_N = (drafts.onehot_S[at.slot_N] == 0) & (knobs_N.temperature_N > 0)
    is_sampled_N &= (draft_N >= 0) & used_N
    prob_NV = distributions(logits_NV, knobs_N)
    last = drafts.prob_SKV.shape[1] - 1
    draft_prob_ND = drafts.prob_SKV[at.slot_N, at.offset_N.clamp(max=last)]
    unit_N = rng.uniform(seed_N2, position_N, rng.ACCEPT)
    accepted_N = accept_sampled(prob_NV, draft_prob_ND, draft_N.clamp(min=0), unit_N)
    accepted_N &= is_sampled_N

    rejected_N = is_sampled_N & ~accepted_N
    residual_NV = residual_logits(prob_NV, draft_prob_ND)
    logits_NV = torch.where(rejected_N[:, None], residual_NV, logits_NV)
    off = (1.0, 0, 1.0, 0.0)
    knobs_N = Knobs(*(torch.where(rejected_N, v, t) for t, v in zip(knobs_N, off, strict=True)))
    domain_N = torch.where(rejected_N, rng.RESAMPLE, rng.SAMPLE).to(torch.int32)
    token_N, bad_N = draw_windows_reference(
        logits_NV, knobs_N, Noise(seed_N2, position_N, domain_N)
    )
    token_N = torch.where(accepted_N, draft_N, torch.where(used_N, token_N, 0))
    ok_N = torch.where(is_sampled_N, accepted_N, used_N & (draft_N >= 0) & (token_N == draft_N))
    return Verdicts(token_N, bad_N & used_N, ok_N)


def settle_windows(verdicts: Verdicts, windows: Windows, limits: Limits) -> Settled:
    """Accept the leading drafts, close each window with one token of its own, cut it at a stop."""
    if verdicts.token_N.is_cpu:
        groups: tuple[tuple[Tensor | None, ...], ...] = (verdicts, windows, limits)
        # CPU-only shortcut: at these sizes a numpy call costs a third of a torch call.
        tables = ([None if t is None else t.numpy() for t in group] for group in groups)
        step_W = np.arange(windows.draft_BK.shape[1] + 1)
        arrays = _settle(np, *tables, step_W=step_W)
        return Settled(*(torch.from_numpy(a.astype(np.int32)) for a in arrays))
    return settle_windows_reference(verdicts, windows, limits)


def settle_windows_reference(verdicts: Verdicts, windows: Windows, limits: Limits) -> Settled:
    """`settle_windows` in torch operations on any device."""
    step_W = torch.arange(windows.draft_BK.shape[1] + 1, device=verdicts.token_N.device)
    return Settled(
        *(t.to(torch.int32) for t in _settle(torch, verdicts, windows, limits, step_W=step_W))
    )


def _settle(xp: Any, verdicts: Any, windows: Any, limits: Any, *, step_W: Any) -> tuple[Any, ...]:
    # One body for torch and numpy: only operations that both spell the same way.
    token_N, bad_N, ok_N = verdicts
    slot_B, start_B, width_B, draft_BK, length_B = windows
    eos_SE, stop_SE, min_len_S, max_len_S = limits
    k = draft_BK.shape[1]
    step_K = step_W[:k]
    last_B1 = width_B[:, None] - 1
    real_BK = (draft_BK >= 0) & (step_K < last_B1)
    row_BK = start_B[:, None] + xp.minimum(step_K[None, :], last_B1)
    ok_BK = token_N[row_BK] == draft_BK if ok_N is None else ok_N[row_BK]
    ok_BK = ok_BK & real_BK & ~bad_N[row_BK]
    num_ok_B = ok_BK.cumprod(axis=1).sum(axis=1)
    closing_B = start_B + num_ok_B
    num_ok_B1 = num_ok_B[:, None]

    closing_token_B1 = token_N[closing_B][:, None]
    padded_BW = xp.concatenate((draft_BK, closing_token_B1), axis=1)
    token_BW = xp.where(step_W < num_ok_B1, padded_BW, closing_token_B1)
    before_BW = length_B[:, None] + step_W  # committed length before each token
    may_stop_BW = before_BW >= min_len_S[slot_B][:, None]
    is_eos_BW = (token_BW[:, :, None] == eos_SE[slot_B][:, None, :]).any(-1)
    is_stop_BW = (token_BW[:, :, None] == stop_SE[slot_B][:, None, :]).any(-1)
    is_full_BW = before_BW + 1 >= max_len_S[slot_B][:, None]
    code_BW = xp.where(is_full_BW, DONE_LENGTH, 0)
    code_BW = xp.where(is_stop_BW & may_stop_BW, DONE_STOP_TOKEN, code_BW)
    code_BW = xp.where(is_eos_BW & may_stop_BW, DONE_EOS, code_BW)
    failed_BW = (step_W == num_ok_B1) & bad_N[closing_B][:, None]
    code_BW = xp.where(failed_BW, DONE_ERROR, code_BW)

    num_running_B = (code_BW == 0).cumprod(axis=1).sum(axis=1)  # tokens before the first stop
    count_B = xp.minimum(num_ok_B, num_running_B) + 1
    done_B = (code_BW * (step_W == count_B[:, None] - 1)).sum(axis=1)
    token_BW = xp.where(step_W < count_B[:, None], token_BW, -1)
    return token_BW, count_B, done_B, real_BK.sum(axis=1), xp.minimum(num_ok_B, count_B)
