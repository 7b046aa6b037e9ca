"""Triton twin of kernels/verify.judge: drafts that were sampled are accepted or replaced.

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

from paceline.kernels.rng_triton import (
    ACCEPT,
    RESAMPLE,
    SAMPLE,
    exponential,
    stream_key,
    uniform,
)
from paceline.kernels.rows import WindowRows
from paceline.kernels.sampling import SlotKnobs
from paceline.kernels.sampling_chunks_triton import (
    NUM_WARPS,
    Split,
    best_part,
    is_last,
    sharpness,
    tickets,
)
from paceline.kernels.sampling_race_triton import race
from paceline.kernels.sampling_search_triton import finish_cuts
from paceline.kernels.sampling_thresholds_triton import SETTLED, begin_cuts
from paceline.kernels.verify import SampledDrafts, Verdicts


def judge(logits_NV: Tensor, rows: WindowRows, knobs: SlotKnobs, drafts: SampledDrafts) -> Verdicts:
    num_rows, vocab_size = logits_NV.shape
    split = Split.of(vocab_size)
    device = logits_NV.device
    cuts = begin_cuts(logits_NV, rows, knobs)
    finish_cuts(logits_NV, rows, knobs, cuts)
    ok_N = torch.empty(num_rows, dtype=torch.bool, device=device)
    spare_value_NC = torch.empty_like(cuts.part_value_NC)
    spare_index_NC = torch.empty_like(cuts.part_index_NC)
    prob_SKV = drafts.prob_SKV
    _judge_kernel[(num_rows * split.num_chunks,)](
        *(logits_NV, logits_NV.stride(0), vocab_size),
        *(rows.slot_B, rows.width_B, rows.length_B, rows.draft_BK, rows.draft_BK.stride(0)),
        *(rows.width, knobs.temperature_S, knobs.seed_S2, knobs.seed_S2.stride(0)),
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
    draft = tl.load(draft_BK + batch_row * draft_stride + j, j + 1 < width, -1)
    if tl.load(state_N + row) == SETTLED:
        if chunk == 0:
            is_used = j < tl.load(width_B + batch_row)
            is_right = (draft >= 0) & is_used & (tl.load(token_N + row) == draft)
            tl.store(ok_N + row, is_right.to(tl.int8))
        return
    slot = tl.load(slot_B + batch_row)
    temperature = tl.load(temperature_S + slot)
    threshold, mass = tl.load(threshold_N + row), tl.load(mass_N + row)
    best, sharp = tl.load(best_N + row), sharpness(temperature)
    seed_low = tl.load(seed_S2 + slot * seed_stride)
    seed_high = tl.load(seed_S2 + slot * seed_stride + 1)
    position = tl.load(length_B + batch_row) + j
    logits_V = logits_NV + row.to(tl.int64) * row_stride
    prob_V = prob_SKV + slot.to(tl.int64) * prob_stride_S + j * prob_stride_K.to(tl.int64)

    is_sampled = (draft >= 0) & (tl.load(onehot_S + slot) == 0)
    if is_sampled:
        logit = tl.load(logits_V + draft, draft < vocab_size, float("-inf")).to(tl.float32)
        q = tl.load(prob_V + draft, draft < draft_vocab_size, 0.0)
        coin = uniform(seed_low, seed_high, position, ACCEPT)
        if coin * q < _prob(logit, threshold, best, sharp, mass):
            if chunk == 0:
                tl.store(token_N + row, draft)
                tl.store(ok_N + row, 1)
            return

    start = chunk * CHUNK
    place = start + tl.arange(0, CHUNK)
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
        tl.store(token_N + row, token)
        tl.store(ok_N + row, ((draft >= 0) & (is_sampled == 0) & (token == draft)).to(tl.int8))


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
