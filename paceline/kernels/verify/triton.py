"""Triton twins of kernels/verify: drafts are accepted by chance, or accepted or replaced.

Every program of a row tosses the same coin; only those of a rejected row look at the residual, in
registers. Block verification weighs the residual of every draft first, then one program per window
tosses all its coins. There is no distribution in memory beside q itself: what a row costs is in
`sampling/triton/cuts.Cuts` and 8 bytes per chunk here.

Shape letters: B rows, N logits rows, C chunks of a row, S slots, K drafts, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.rng.triton import (
    ACCEPT,
    PER_DRAFT,
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
    Logits,
    Split,
    best_part,
    is_last,
    logits_row,
    own_draft,
    row_at,
    sharpness,
    tickets,
)
from paceline.kernels.sampling.triton.cuts import SETTLED, begin_cuts
from paceline.kernels.sampling.triton.race import race
from paceline.kernels.sampling.triton.search import finish_cuts
from paceline.kernels.verify.reference import LEAST_Q, SampledDrafts, Verdicts

_LEAST_Q = tl.constexpr(LEAST_Q)


class Blocks(NamedTuple):
    """What block verification says of each window."""

    num_drafts_B: Tensor  # int32: leading drafts that are verified together; 0: by equality
    num_accepted_B: Tensor  # int32
    factor_B: Tensor  # float32: of p, in the residual of the first draft that is not accepted


def accept_by_rate(
    windows: WindowRows, seed_S2: Tensor, rates_SK: Tensor, num_logits: int
) -> Tensor:
    ok_N = torch.empty(num_logits, dtype=torch.bool, device=rates_SK.device)
    _rate_kernel[(len(windows.slot_B),)](
        *(windows, seed_S2, seed_S2.stride(0)),
        *(rates_SK.contiguous(), rates_SK.shape[1], windows.width, ok_N),
        WIDTH=triton.next_power_of_2(windows.width),
        num_warps=1,
    )
    return ok_N


@triton.jit(do_not_specialize=["num_rates", "width"])
def _rate_kernel(
    windows, seed_S2, seed_stride, rates_SK, num_rates, width, ok_N, WIDTH: tl.constexpr
):
    row, j = tl.program_id(0), tl.arange(0, WIDTH)
    slot = tl.load(windows.slot_B + row)
    is_used = (j < width) & (j < tl.load(windows.width_B + row))
    draft = own_draft(windows, row, j, width)
    seed = seed_S2 + slot * seed_stride
    position = tl.load(windows.length_B + row) + j
    unit = uniform(tl.load(seed), tl.load(seed + 1), position, ACCEPT)
    rate = tl.load(rates_SK + slot * num_rates + j, mask=j < num_rates, other=0.0)
    is_accepted = (unit < rate) & (draft >= 0)
    tl.store(ok_N + tl.load(windows.first_B + row) + j, is_accepted, mask=is_used)


def judge(
    logits_NV: Tensor,
    windows: WindowRows,
    knobs: SlotKnobs,
    drafts: SampledDrafts,
    is_block: bool = False,
) -> Verdicts:
    split = Split.of(logits_NV.shape[1])
    cuts = begin_cuts(logits_NV, windows, knobs)
    finish_cuts(logits_NV, windows, knobs, cuts)
    ok_N = torch.empty_like(cuts.bad_N)
    spare = (torch.empty_like(cuts.part_value_NC), torch.empty_like(cuts.part_index_NC))
    prob_SKV = drafts.prob_SKV
    where = (
        *(Logits.of(logits_NV), windows, windows.width, knobs, knobs.seed_S2.stride(0)),
        *(drafts, *prob_SKV.stride()[:2], prob_SKV.shape[2], cuts),
    )
    grid = (windows.num_positions * split.num_chunks,)
    none_B = torch.empty(len(windows.slot_B), dtype=torch.int32, device=ok_N.device)
    blocks = Blocks(none_B, torch.empty_like(none_B), torch.empty_like(none_B, dtype=torch.float32))
    sizes = {"NUM_CHUNKS": split.num_chunks, "PARTS": split.parts}
    if is_block:
        _left_kernel[grid](*where, CHUNK=split.chunk, **sizes, num_warps=NUM_WARPS)
        _block_kernel[(len(none_B),)](*where, blocks, **sizes, num_warps=1)
    _judge_kernel[grid](
        *(*where, tickets(logits_NV.device), spare, ok_N, blocks, is_block),
        CHUNK=split.chunk,
        **sizes,
        num_warps=NUM_WARPS,
    )
    return Verdicts(cuts.token_N, cuts.bad_N, ok_N)


@triton.jit
def _is_in_block(windows, batch_row, j, width, drafts, cuts):
    """Whether window position j verifies a sampled draft, and its logits are usable."""
    slot = tl.load(windows.slot_B + batch_row)
    is_sampled = tl.load(drafts.onehot_S + slot) == 0
    has_draft = own_draft(windows, batch_row, j, width) >= 0
    is_inside = j + 1 < tl.load(windows.width_B + batch_row)
    is_inside = is_inside & has_draft & is_sampled
    state = tl.load(cuts.state_N + batch_row * width + j, is_inside, SETTLED)
    return is_inside & (state != SETTLED)


@triton.jit
def _next_reach(  # noqa: PLR0913
    reach, logits, windows, batch_row, j, width, sharp, prob_V, draft_vocab_size, cuts
):
    """What drafts 0 .. j are worth together; `reach`: what those before draft j are."""
    row = batch_row * width + j
    draft = own_draft(windows, batch_row, j, width)
    logits_V = row_at(logits, logits_row(windows, row, width))
    logit = tl.load(logits_V + draft, draft < logits.vocab_size, float("-inf")).to(tl.float32)
    threshold, best = tl.load(cuts.threshold_N + row), tl.load(cuts.best_N + row)
    p = _prob(logit, threshold, best, sharp, tl.load(cuts.mass_N + row))
    q = tl.load(prob_V + draft, draft < draft_vocab_size, 0.0)
    return tl.minimum(reach * (p / tl.maximum(q, _LEAST_Q)), 1.0)


@triton.jit(do_not_specialize=["width"])
def _left_kernel(  # noqa: PLR0913
    logits,
    windows,
    width,
    knobs,
    seed_stride,
    drafts,
    prob_stride_S,
    prob_stride_K,
    draft_vocab_size,
    cuts,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The mass of max(reach * p - q, 0) in each chunk, of positions inside a block."""
    row, chunk = tl.program_id(0) // NUM_CHUNKS, tl.program_id(0) % NUM_CHUNKS
    batch_row, j = row // width, row % width
    slot = tl.load(windows.slot_B + batch_row)
    sharp = sharpness(tl.load(knobs.temperature_S + slot))
    prob_KV = drafts.prob_SKV + slot.to(tl.int64) * prob_stride_S
    stride = prob_stride_K.to(tl.int64)
    reach, i = 1.0, 0
    is_in = _is_in_block(windows, batch_row, 0, width, drafts, cuts)
    while is_in & (i < j):
        reach = _next_reach(
            *(reach, logits, windows, batch_row, i, width, sharp, prob_KV + i * stride),
            *(draft_vocab_size, cuts),
        )
        i += 1
        is_in = _is_in_block(windows, batch_row, i, width, drafts, cuts)
    if is_in:
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        logits_V = row_at(logits, logits_row(windows, row, width))
        logit = tl.load(logits_V + place, place < logits.vocab_size, float("-inf")).to(tl.float32)
        threshold, best = tl.load(cuts.threshold_N + row), tl.load(cuts.best_N + row)
        prob = _prob(logit, threshold, best, sharp, tl.load(cuts.mass_N + row))
        q = tl.load(prob_KV + j * stride + place, place < draft_vocab_size, 0.0)
        left = tl.maximum(reach * prob - q, 0.0)
        tl.store(cuts.part_mass_NC + row * NUM_CHUNKS + chunk, tl.sum(left))


@triton.jit(do_not_specialize=["width"])
def _block_kernel(  # noqa: PLR0913
    logits,
    windows,
    width,
    knobs,
    seed_stride,
    drafts,
    prob_stride_S,
    prob_stride_K,
    draft_vocab_size,
    cuts,
    blocks,
    NUM_CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The longest prefix of each window's drafts that its coin accepts."""
    batch_row = tl.program_id(0)
    slot = tl.load(windows.slot_B + batch_row)
    sharp = sharpness(tl.load(knobs.temperature_S + slot))
    prob_KV = drafts.prob_SKV + slot.to(tl.int64) * prob_stride_S
    seed = knobs.seed_S2 + slot * seed_stride
    seed_low, seed_high = tl.load(seed), tl.load(seed + 1)
    start = tl.load(windows.length_B + batch_row)
    part = tl.arange(0, PARTS)
    reach, factor, num_accepted, j = 1.0, 1.0, 0, 0
    is_in = _is_in_block(windows, batch_row, 0, width, drafts, cuts)
    while is_in:
        reach = _next_reach(
            *(reach, logits, windows, batch_row, j, width, sharp),
            *(prob_KV + j * prob_stride_K.to(tl.int64), draft_vocab_size, cuts),
        )
        coin = uniform(seed_low, seed_high, start, ACCEPT + j * PER_DRAFT)
        j += 1
        is_in = _is_in_block(windows, batch_row, j, width, drafts, cuts)
        parts_at = (batch_row * width + j) * NUM_CHUNKS + part
        left = tl.sum(tl.load(cuts.part_mass_NC + parts_at, is_in & (part < NUM_CHUNKS), 0.0))
        rest = 1.0 - reach
        # Where reach is 1 a prefix is accepted for certain, also if nothing is left of p.
        chance = tl.where(is_in & (rest > 0), left / tl.maximum(left + rest, _LEAST_Q), reach)
        is_accepted = coin < chance
        num_accepted = tl.where(is_accepted, j, num_accepted)
        factor = tl.where(is_accepted, reach, factor)
    tl.store(blocks.num_drafts_B + batch_row, j)
    tl.store(blocks.num_accepted_B + batch_row, num_accepted)
    tl.store(blocks.factor_B + batch_row, factor)


@triton.jit(do_not_specialize=["width"])
def _judge_kernel(  # noqa: PLR0913
    logits,
    windows,
    width,
    knobs,
    seed_stride,
    drafts,
    prob_stride_S,
    prob_stride_K,
    draft_vocab_size,
    cuts,
    ticket_N,
    spare,
    ok_N,
    blocks,
    IS_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    row, chunk = tl.program_id(0) // NUM_CHUNKS, tl.program_id(0) % NUM_CHUNKS
    batch_row, j = row // width, row % width
    is_used = j < tl.load(windows.width_B + batch_row)
    at_logits = logits_row(windows, row, width)
    draft = own_draft(windows, batch_row, j, width)
    if tl.load(cuts.state_N + row) == SETTLED:
        is_right = (draft >= 0) & (tl.load(cuts.token_N + at_logits, is_used) == draft)
        tl.store(ok_N + at_logits, is_right, is_used & (chunk == 0))
        return
    slot = tl.load(windows.slot_B + batch_row)
    temperature, mass = tl.load(knobs.temperature_S + slot), tl.load(cuts.mass_N + row)
    sharp = sharpness(temperature)
    threshold, best = tl.load(cuts.threshold_N + row), tl.load(cuts.best_N + row)
    seed = knobs.seed_S2 + slot * seed_stride
    seed_low, seed_high = tl.load(seed), tl.load(seed + 1)
    position = tl.load(windows.length_B + batch_row) + j
    logits_V, vocab_size = row_at(logits, at_logits), logits.vocab_size
    prob_V = drafts.prob_SKV + slot.to(tl.int64) * prob_stride_S + j * prob_stride_K.to(tl.int64)

    is_past, factor = False, 1.0
    if IS_BLOCK:
        is_sampled, is_accepted, is_past, factor = _of_block(blocks, batch_row, j)
    else:
        is_sampled = (draft >= 0) & (tl.load(drafts.onehot_S + slot) == 0)
        logit = tl.load(logits_V + draft, is_sampled & (draft < vocab_size), float("-inf"))
        q = tl.load(prob_V + draft, is_sampled & (draft < draft_vocab_size), 0.0)
        p = _prob(logit.to(tl.float32), threshold, best, sharp, mass)
        coin = uniform(seed_low, seed_high, position - j, ACCEPT + j * PER_DRAFT)
        is_accepted = is_sampled & (coin * q < p)
    if is_accepted | is_past:
        tl.store(cuts.token_N + at_logits, tl.maximum(draft, 0), chunk == 0)
        tl.store(ok_N + at_logits, is_accepted, chunk == 0)
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
            left = factor * prob - tl.load(prob_V + place, place < draft_vocab_size, 0.0)
            score, token = _first_to_arrive(left, noise, start)
            # Rounding may reject a draft although p = q everywhere: then p itself is drawn from.
            spare_score, spare_token = _first_to_arrive(prob, noise, start)
        else:
            keys = (temperature, key_1, key_2)
            score, token = race(logits_V, vocab_size, logit, start, threshold, float("-inf"), keys)
    if NUM_CHUNKS > 1:
        part = row * NUM_CHUNKS + chunk
        _keep(cuts.part_value_NC, cuts.part_index_NC, part, score, token)
        _keep(spare[0], spare[1], part, spare_score, spare_token)
    if is_last(ticket_N, row, NUM_CHUNKS):
        token = _winner(cuts, spare, row, score, token, spare_token, NUM_CHUNKS, PARTS)
        tl.store(cuts.token_N + at_logits, token)
        tl.store(ok_N + at_logits, (draft >= 0) & (is_sampled == 0) & (token == draft))


@triton.jit
def _winner(
    cuts, spare, row, score, token, spare_token, NUM_CHUNKS: tl.constexpr, PARTS: tl.constexpr
):
    """The best of what a row's programs left, else the best of the spare ones."""
    if NUM_CHUNKS > 1:
        parts = (cuts.part_value_NC, cuts.part_index_NC)
        score, token = best_part(*parts, row, NUM_CHUNKS, PARTS)
        _, spare_token = best_part(*spare, row, NUM_CHUNKS, PARTS)
    return tl.where(score == float("-inf"), spare_token, token)


@triton.jit
def _of_block(blocks, batch_row, j):
    """Whether the draft of position j is sampled and accepted, whether its window ends before j,
    and the factor of p in the residual."""
    num_accepted = tl.load(blocks.num_accepted_B + batch_row)
    num_drafts = tl.load(blocks.num_drafts_B + batch_row)
    is_past = (num_drafts > 0) & (j > num_accepted)
    return j < num_drafts, j < num_accepted, is_past, tl.load(blocks.factor_B + batch_row)


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
