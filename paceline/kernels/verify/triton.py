"""Triton twins of kernels/verify: drafts are accepted by chance, or accepted or replaced.

Every program of a row tosses the same coin; only those of a rejected row look at the residual, in
registers. There is no distribution in memory beside q itself: what a row costs is in
`sampling_thresholds_triton.Cuts` and 8 bytes per chunk here.

Shape letters: B rows, N logits rows, C chunks of a row, S slots, K drafts, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.rng.triton import (
    ACCEPT,
    RESAMPLE,
    SAMPLE,
    exponential,
    stream_key,
    uniform,
)
from paceline.kernels.rows import WindowRows
from paceline.kernels.sampling.reference import SlotKnobs
from paceline.kernels.sampling.triton.chunks import (
    NUM_WARPS,
    Split,
    best_part,
    is_last,
    sharpness,
    tickets,
)
from paceline.kernels.sampling.triton.cuts import SETTLED, begin_cuts
from paceline.kernels.sampling.triton.race import race
from paceline.kernels.sampling.triton.search import finish_cuts
from paceline.kernels.verify.reference import SampledDrafts, Verdicts


def accept_by_rate(
    windows: WindowRows, seed_S2: Tensor, rates_K: Tensor, num_logits: int
) -> Tensor:
    ok_N = torch.empty(num_logits, dtype=torch.bool, device=rates_K.device)
    _rate_kernel[(len(windows.slot_B),)](
        *(windows.slot_B, windows.first_B, windows.width_B, windows.length_B, windows.draft_BK),
        *(windows.draft_BK.stride(0), seed_S2, seed_S2.stride(0), rates_K, len(rates_K)),
        *(windows.width, ok_N.view(torch.int8)),
        WIDTH=triton.next_power_of_2(windows.width),
        num_warps=1,
    )
    return ok_N


@triton.jit(do_not_specialize=["draft_stride", "num_rates", "width"])
def _rate_kernel(  # noqa: PLR0913
    slot_B,
    first_B,
    width_B,
    length_B,
    draft_BK,
    draft_stride,
    seed_S2,
    seed_stride,
    rates_K,
    num_rates,
    width,
    ok_N,
    WIDTH: tl.constexpr,
):
    row, j = tl.program_id(0), tl.arange(0, WIDTH)
    slot = tl.load(slot_B + row)
    is_used = (j < width) & (j < tl.load(width_B + row))
    draft = tl.load(draft_BK + row * draft_stride + j, mask=is_used & (j + 1 < width), other=-1)
    seed = seed_S2 + slot * seed_stride
    unit = uniform(tl.load(seed), tl.load(seed + 1), tl.load(length_B + row) + j, ACCEPT)
    rate = tl.load(rates_K + j, mask=j < num_rates, other=0.0)
    is_accepted = (unit < rate) & (draft >= 0)
    tl.store(ok_N + tl.load(first_B + row) + j, is_accepted.to(tl.int8), mask=is_used)


def judge(
    logits_NV: Tensor, windows: WindowRows, knobs: SlotKnobs, drafts: SampledDrafts
) -> Verdicts:
    num_rows, vocab_size = windows.num_positions, logits_NV.shape[1]
    split = Split.of(vocab_size)
    device = logits_NV.device
    cuts = begin_cuts(logits_NV, windows, knobs)
    finish_cuts(logits_NV, windows, knobs, cuts)
    ok_N = torch.empty(len(logits_NV), dtype=torch.bool, device=device)
    spare_value_NC = torch.empty_like(cuts.part_value_NC)
    spare_index_NC = torch.empty_like(cuts.part_index_NC)
    prob_SKV = drafts.prob_SKV
    _judge_kernel[(num_rows * split.num_chunks,)](
        *(logits_NV, logits_NV.stride(0), vocab_size),
        *(windows.slot_B, windows.first_B, windows.width_B, windows.length_B),
        *(windows.draft_BK, windows.draft_BK.stride(0)),
        *(windows.width, knobs.temperature_S, knobs.seed_S2, knobs.seed_S2.stride(0)),
        *(drafts.onehot_S, prob_SKV, prob_SKV.stride(0), prob_SKV.stride(1), prob_SKV.shape[2]),
        *(tickets(device), cuts.state_N, cuts.best_N, cuts.threshold_N, cuts.mass_N),
        *(cuts.token_N, cuts.bad_N.view(torch.int8), ok_N.view(torch.int8)),
        *(cuts.part_value_NC, cuts.part_index_NC, spare_value_NC, spare_index_NC),
        CHUNK=split.chunk,
        NUM_CHUNKS=split.num_chunks,
        PARTS=split.parts,
        num_warps=NUM_WARPS,
    )
    return Verdicts(cuts.token_N, cuts.bad_N, ok_N)


@triton.jit(do_not_specialize=["width", "draft_stride"])
def _judge_kernel(  # noqa: PLR0913
    logits_NV,
    row_stride,
    vocab_size,
    slot_B,
    first_B,
    width_B,
    length_B,
    draft_BK,
    draft_stride,
    width,
    temperature_S,
    seed_S2,
    seed_stride,
    onehot_S,
    prob_SKV,
    prob_stride_S,
    prob_stride_K,
    draft_vocab_size,
    ticket_N,
    state_N,
    best_N,
    threshold_N,
    mass_N,
    token_N,
    bad_N,
    ok_N,
    part_value_NC,
    part_index_NC,
    spare_value_NC,
    spare_index_NC,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    row, chunk = tl.program_id(0) // NUM_CHUNKS, tl.program_id(0) % NUM_CHUNKS
    batch_row, j = row // width, row % width
    is_used = j < tl.load(width_B + batch_row)
    at_logits = tl.load(first_B + batch_row) + j
    draft = tl.load(draft_BK + batch_row * draft_stride + j, j + 1 < width, -1)
    if tl.load(state_N + row) == SETTLED:
        if is_used & (chunk == 0):
            is_right = (draft >= 0) & (tl.load(token_N + at_logits) == draft)
            tl.store(ok_N + at_logits, is_right.to(tl.int8))
        return
    slot = tl.load(slot_B + batch_row)
    temperature = tl.load(temperature_S + slot)
    sharp = sharpness(temperature)
    threshold, mass, best = tl.load(threshold_N + row), tl.load(mass_N + row), tl.load(best_N + row)
    seed = seed_S2 + slot * seed_stride
    seed_low, seed_high = tl.load(seed), tl.load(seed + 1)
    position = tl.load(length_B + batch_row) + j
    logits_V = logits_NV + at_logits.to(tl.int64) * row_stride
    prob_V = prob_SKV + slot.to(tl.int64) * prob_stride_S + j * prob_stride_K.to(tl.int64)

    is_sampled = (draft >= 0) & (tl.load(onehot_S + slot) == 0)
    if is_sampled:
        logit = tl.load(logits_V + draft, draft < vocab_size, float("-inf")).to(tl.float32)
        q = tl.load(prob_V + draft, draft < draft_vocab_size, 0.0)
        coin = uniform(seed_low, seed_high, position, ACCEPT)
        if coin * q < _prob(logit, threshold, best, sharp, mass):
            if chunk == 0:
                tl.store(token_N + at_logits, draft)
                tl.store(ok_N + at_logits, 1)
            return
    start, place = chunk * CHUNK, chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits_V + place, place < vocab_size, other=float("-inf")).to(tl.float32)
    score, token, spare_score, spare_token = float("-inf"), start, float("-inf"), start
    if tl.max(logit, 0) >= threshold:
        domain = tl.where(is_sampled, RESAMPLE, SAMPLE)
        key_1, key_2 = stream_key(seed_low, seed_high, position, domain)
        if is_sampled:
            noise = tl.log(exponential(key_1, key_2, place))
            prob = _prob(logit, threshold, best, sharp, mass)
            left = prob - tl.load(prob_V + place, place < draft_vocab_size, 0.0)
            score, token = _first_to_arrive(left, noise, start)
            # Rounding may reject a draft although p = q everywhere: then p itself is drawn from.
            spare_score, spare_token = _first_to_arrive(prob, noise, start)
        else:
            keys = (temperature, key_1, key_2)
            score, token = race(logits_V, vocab_size, logit, start, threshold, float("-inf"), keys)
    if NUM_CHUNKS > 1:
        _keep(part_value_NC, part_index_NC, row * NUM_CHUNKS + chunk, score, token)
        _keep(spare_value_NC, spare_index_NC, row * NUM_CHUNKS + chunk, spare_score, spare_token)
    if is_last(ticket_N, row, NUM_CHUNKS):
        if NUM_CHUNKS > 1:
            score, token = best_part(part_value_NC, part_index_NC, row, NUM_CHUNKS, PARTS)
            spare_score, spare_token = best_part(
                spare_value_NC, spare_index_NC, row, NUM_CHUNKS, PARTS
            )
        token = tl.where(score == float("-inf"), spare_token, token)
        tl.store(token_N + at_logits, token)
        tl.store(
            ok_N + at_logits, ((draft >= 0) & (is_sampled == 0) & (token == draft)).to(tl.int8)
        )


@triton.jit
def _keep(value_NC, index_NC, part, value, index):
    tl.store(value_NC + part, value)
    tl.store(index_NC + part, index)


@triton.jit
def _first_to_arrive(weight, noise, start):
    """The winner among weights above 0, and its score."""
    scores = tl.where(weight > 0, tl.log(tl.maximum(weight, 1e-37)) - noise, float("-inf"))
    score, at = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
    return score, start + at


@triton.jit
def _prob(logit, threshold, best, sharp, mass):
    return tl.where(logit >= threshold, tl.exp2((logit - best) * sharp) / mass, 0.0)
