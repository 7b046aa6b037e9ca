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

from paceline.kernels.rng.triton import DRAFT, PER_DRAFT, stream_key
from paceline.kernels.rows import WindowRows
from paceline.kernels.sampling.reference import SlotKnobs
from paceline.kernels.sampling.triton.chunks import (
    MOST_ROWS,
    NUM_WARPS,
    Logits,
    Split,
    best_part,
    is_last,
    kept_tensor,
    row_at,
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
        *(Logits.of(logits_BV), slot_B, position_B, knobs, cuts),
        *(prob_SKV[:, j], prob_SKV.stride(0), knobs.seed_S2.stride(0), tickets(logits_BV.device)),
        j,
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


@triton.jit(do_not_specialize=["j"])
def _draft_kernel(  # noqa: PLR0913
    logits,
    slot_B,
    position_B,
    knobs,
    cuts,
    prob_SV,
    prob_stride,
    seed_stride,
    ticket_N,
    j,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    row, chunk = tl.program_id(0) // NUM_CHUNKS, tl.program_id(0) % NUM_CHUNKS
    slot = tl.load(slot_B + row)
    temperature = tl.load(knobs.temperature_S + slot)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    is_inside = place < logits.vocab_size
    prob_V = prob_SV + slot.to(tl.int64) * prob_stride
    if tl.load(cuts.state_N + row) == SETTLED:
        # A broken row proposes its argmax for certain: verification needs its q to say so.
        if (tl.load(cuts.bad_N + row) != 0) & (temperature > 0):
            is_token = place == tl.load(cuts.token_N + row)
            tl.store(prob_V + place, is_token.to(tl.float32), is_inside)
        return
    threshold = tl.load(cuts.threshold_N + row)
    logits_V = row_at(logits, row)
    logit = tl.load(logits_V + place, is_inside, other=float("-inf")).to(tl.float32)
    weight = tl.exp2((logit - tl.load(cuts.best_N + row)) * sharpness(temperature))
    prob = tl.where(logit >= threshold, weight / tl.load(cuts.mass_N + row), 0.0)
    tl.store(prob_V + place, prob, is_inside)
    start, above = chunk * CHUNK, float("-inf")
    score, token = float("-inf"), start
    # Most chunks of a peaked row keep nothing, and noise is what costs.
    if tl.max(logit, 0) >= threshold:
        start_position, domain = tl.load(position_B + row) - j, DRAFT + j * PER_DRAFT
        seed = knobs.seed_S2 + slot * seed_stride
        key_1, key_2 = stream_key(tl.load(seed), tl.load(seed + 1), start_position, domain)
        noise = (temperature, key_1, key_2)
        score, token = race(logits_V, logits.vocab_size, logit, start, threshold, above, noise)
    if NUM_CHUNKS > 1:
        tl.store(cuts.part_value_NC + row * NUM_CHUNKS + chunk, score)
        tl.store(cuts.part_index_NC + row * NUM_CHUNKS + chunk, token)
    if is_last(ticket_N, row, NUM_CHUNKS):
        if NUM_CHUNKS > 1:
            parts = (cuts.part_value_NC, cuts.part_index_NC)
            score, token = best_part(*parts, row, NUM_CHUNKS, PARTS)
        tl.store(cuts.token_N + row, token)
