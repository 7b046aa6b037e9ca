"""Triton twins of kernels/sampling at fixed shapes: argmax, draws, and drafts with their q.

One row is spread over programs by its vocabulary alone; `sampling_thresholds_triton` finds the cut
of drafts, draws need none. Any float type is read as it is. Shape letters: B rows, N logits rows, C
chunks of a row, S slots, K drafts, V vocabulary.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.rng_triton import DRAFT, stream_key
from paceline.kernels.rows import WindowRows
from paceline.kernels.sampling import SlotKnobs
from paceline.kernels.sampling_chunks_triton import (
    MOST_ROWS,
    NUM_WARPS,
    Split,
    best_part,
    is_last,
    kept_tensor,
    sharpness,
    tickets,
)
from paceline.kernels.sampling_draw_triton import draw
from paceline.kernels.sampling_race_triton import race
from paceline.kernels.sampling_search_triton import finish_cuts
from paceline.kernels.sampling_thresholds_triton import SETTLED, begin_cuts

__all__ = ["draft", "draw", "greedy"]


def greedy(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits_NV.shape
    assert num_rows <= MOST_ROWS
    assert logits_NV.stride(1) == 1
    split = Split.of(vocab_size)
    device = logits_NV.device
    token_N = torch.empty(num_rows, dtype=torch.int32, device=device)
    bad_N = torch.empty(num_rows, dtype=torch.bool, device=device)
    part_value_NC = torch.empty(num_rows, split.num_chunks, dtype=torch.float32, device=device)
    part_index_NC = torch.empty(num_rows, split.num_chunks, dtype=torch.int32, device=device)
    if num_rows:
        _greedy_kernel[(num_rows * split.num_chunks,)](
            *(logits_NV, logits_NV.stride(0), vocab_size, tickets(device)),
            *(token_N, bad_N.view(torch.int8), part_value_NC, part_index_NC),
            CHUNK=split.chunk,
            NUM_CHUNKS=split.num_chunks,
            PARTS=split.parts,
            num_warps=NUM_WARPS,
        )
    return token_N, bad_N


def draft(
    logits_BV: Tensor,
    slot_B: Tensor,
    position_B: Tensor,
    knobs: SlotKnobs,
    prob_SKV: Tensor,
    j: int,
) -> Tensor:
    none_B0 = slot_B.new_empty((len(slot_B), 0))
    rows = WindowRows(slot_B, _ones(slot_B.device)[: len(slot_B)], position_B, none_B0)
    cuts = begin_cuts(logits_BV, rows, knobs)
    finish_cuts(logits_BV, rows, knobs, cuts)
    num_rows, vocab_size = logits_BV.shape
    split = Split.of(vocab_size)
    _draft_kernel[(num_rows * split.num_chunks,)](
        *(logits_BV, logits_BV.stride(0), vocab_size, slot_B, position_B),
        *(knobs.temperature_S, knobs.seed_S2, knobs.seed_S2.stride(0), tickets(logits_BV.device)),
        *(cuts.state_N, cuts.best_N, cuts.threshold_N, cuts.mass_N, cuts.token_N),
        *(cuts.bad_N.view(torch.int8), cuts.part_value_NC, cuts.part_index_NC),
        *(prob_SKV[:, j], prob_SKV.stride(0)),
        CHUNK=split.chunk,
        NUM_CHUNKS=split.num_chunks,
        PARTS=split.parts,
        num_warps=NUM_WARPS,
    )
    return cuts.token_N


@cache
def _ones(device: torch.device) -> Tensor:
    return kept_tensor(1, MOST_ROWS, device=device)


@triton.jit
def _greedy_kernel(  # noqa: PLR0913
    logits_NV,
    row_stride,
    vocab_size,
    ticket_N,
    token_N,
    bad_N,
    part_value_NC,
    part_index_NC,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    row, chunk = tl.program_id(0) // NUM_CHUNKS, tl.program_id(0) % NUM_CHUNKS
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    logits_V = logits_NV + row.to(tl.int64) * row_stride
    logit = tl.load(logits_V + place, place < vocab_size, other=float("-inf")).to(tl.float32)
    logit = tl.where(logit == logit, logit, float("inf"))
    best, token = tl.max(logit, 0, return_indices=True, return_indices_tie_break_left=True)
    token += chunk * CHUNK
    if NUM_CHUNKS > 1:
        tl.store(part_value_NC + row * NUM_CHUNKS + chunk, best)
        tl.store(part_index_NC + row * NUM_CHUNKS + chunk, token)
    if is_last(ticket_N, row, NUM_CHUNKS):
        if NUM_CHUNKS > 1:
            best, token = best_part(part_value_NC, part_index_NC, row, NUM_CHUNKS, PARTS)
        is_bad = (best == float("inf")) | (best == float("-inf"))
        tl.store(token_N + row, token)
        tl.store(bad_N + row, is_bad.to(tl.int8))


@triton.jit
def _draft_kernel(  # noqa: PLR0913
    logits_NV,
    row_stride,
    vocab_size,
    slot_B,
    position_B,
    temperature_S,
    seed_S2,
    seed_stride,
    ticket_N,
    state_N,
    best_N,
    threshold_N,
    mass_N,
    token_N,
    bad_N,
    part_value_NC,
    part_index_NC,
    prob_SV,
    prob_stride,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    row, chunk = tl.program_id(0) // NUM_CHUNKS, tl.program_id(0) % NUM_CHUNKS
    slot = tl.load(slot_B + row)
    temperature = tl.load(temperature_S + slot)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    prob_V = prob_SV + slot.to(tl.int64) * prob_stride
    if tl.load(state_N + row) == SETTLED:
        # A broken row proposes its argmax for certain: verification needs its q to say so.
        if (tl.load(bad_N + row) != 0) & (temperature > 0):
            is_token = place == tl.load(token_N + row)
            tl.store(prob_V + place, is_token.to(tl.float32), place < vocab_size)
        return
    threshold = tl.load(threshold_N + row)
    logits_V = logits_NV + row.to(tl.int64) * row_stride
    logit = tl.load(logits_V + place, place < vocab_size, other=float("-inf")).to(tl.float32)
    weight = tl.exp2((logit - tl.load(best_N + row)) * sharpness(temperature))
    prob = tl.where(logit >= threshold, weight / tl.load(mass_N + row), 0.0)
    tl.store(prob_V + place, prob, place < vocab_size)
    start = chunk * CHUNK
    score, token = float("-inf"), start
    # Most chunks of a peaked row keep nothing, and noise is what costs.
    if tl.max(logit, 0) >= threshold:
        position = tl.load(position_B + row)
        seed = seed_S2 + slot * seed_stride
        key_1, key_2 = stream_key(tl.load(seed), tl.load(seed + 1), position, DRAFT)
        noise = (temperature, key_1, key_2)
        score, token = race(logits_V, vocab_size, logit, start, threshold, float("-inf"), noise)
    if NUM_CHUNKS > 1:
        tl.store(part_value_NC + row * NUM_CHUNKS + chunk, score)
        tl.store(part_index_NC + row * NUM_CHUNKS + chunk, token)
    if is_last(ticket_N, row, NUM_CHUNKS):
        if NUM_CHUNKS > 1:
            score, token = best_part(part_value_NC, part_index_NC, row, NUM_CHUNKS, PARTS)
        tl.store(token_N + row, token)
