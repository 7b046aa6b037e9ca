"""Drafts and what they are drawn from, on the GPU.

Verification needs q, so the cut of a draft is looked for (`cuts`), unlike that of a draw. One row
is spread over programs by its vocabulary alone. Any float type is read as it is. Shape letters: B
rows, N logits rows, C chunks of a row, S slots, K drafts, V vocabulary.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.rng.triton import DRAFT, stream_key
from paceline.kernels.rows import WindowRows
from paceline.kernels.sampling.reference import SlotKnobs
from paceline.kernels.sampling.triton.chunks import (
    MOST_ROWS,
    NUM_WARPS,
    Split,
    best_part,
    is_last,
    kept_tensor,
    sharpness,
    tickets,
)
from paceline.kernels.sampling.triton.cuts import SETTLED, begin_cuts
from paceline.kernels.sampling.triton.race import race
from paceline.kernels.sampling.triton.search import finish_cuts


def draft(
    logits_BV: Tensor,
    slot_B: Tensor,
    position_B: Tensor,
    knobs: SlotKnobs,
    prob_SKV: Tensor,
    j: int,
) -> Tensor:
    first_B, one_B = (t[: len(slot_B)] for t in _single_windows(slot_B.device))
    none_B0 = slot_B.new_empty((len(slot_B), 0))
    windows = WindowRows(slot_B, first_B, one_B, position_B, none_B0)
    cuts = begin_cuts(logits_BV, windows, knobs)
    finish_cuts(logits_BV, windows, knobs, cuts)
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
def _single_windows(device: torch.device) -> tuple[Tensor, Tensor]:
    """First logits rows and widths of windows of one position each."""
    one_B = kept_tensor(1, MOST_ROWS, device=device)
    return (one_B.cumsum(0) - 1).to(torch.int32), one_B


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
