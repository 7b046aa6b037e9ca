"""Triton twin of kernels/sampling.draw: race first, then ask whether the winner is kept.

The winner among all tokens is the winner among those that min_p, top_k and top_p keep, if it is one
of them, and it is one when little enough lies above it: no cut has to be found. If too much does,
the cut lies above it as well, and the next race is among the tokens above it.

`survey` spreads a row over programs: each leaves its chunk's best logit and a bound on the scores
there. `settle`, one program per row, scores only the chunks whose bound says that the winner may be
there. Float sums run in an order that the vocabulary alone decides.

Shape letters: B rows, W window positions, N = B * W logits rows, C chunks of a row, S slots,
V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.rng.triton import SAMPLE, stream_key
from paceline.kernels.rows import WindowRows
from paceline.kernels.sampling.reference import SlotKnobs
from paceline.kernels.sampling.triton.chunks import (
    MOST_ROWS,
    NUM_WARPS,
    Logits,
    Split,
    best_part,
    from_ordered_bits,
    is_last,
    logits_row,
    ordered_bits,
    row_at,
    sharpness,
    tickets,
)
from paceline.kernels.sampling.triton.race import lower, race, score_bound
from paceline.kernels.sampling.triton.search import WALKED, highest_covering

_SURVEYING_WARPS = 4
_SETTLING_WARPS = 16
_AT_ONCE = tl.constexpr(4)  # chunks of a walk: one program waits for memory most of the time


def greedy(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits_NV.shape
    assert num_rows <= MOST_ROWS
    split = Split.of(vocab_size)
    token_N, bad_N = _outputs(logits_NV)
    part_value_NC = _of_chunks(num_rows, split, logits_NV)
    part_index_NC = torch.empty_like(part_value_NC, dtype=torch.int32)
    if num_rows:
        _greedy_kernel[(num_rows * split.num_chunks,)](
            *(Logits.of(logits_NV), tickets(logits_NV.device)),
            *(token_N, bad_N, part_value_NC, part_index_NC),
            CHUNK=split.chunk,
            NUM_CHUNKS=split.num_chunks,
            PARTS=split.parts,
            num_warps=NUM_WARPS,
        )
    return token_N, bad_N


def draw(
    logits_NV: Tensor, windows: WindowRows, knobs: SlotKnobs, ok_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Every window position is drawn, whatever is accepted before it."""
    num_rows = windows.num_positions
    split = Split.of(logits_NV.shape[1])
    best_NC = _of_chunks(num_rows, split, logits_NV)
    parts = (best_NC, torch.empty_like(best_NC))
    token_N, bad_N = _outputs(logits_NV)
    where = (Logits.of(logits_NV), windows, windows.width, knobs, knobs.seed_S2.stride(0))
    _survey_kernel[(num_rows * split.num_chunks,)](
        *(*where, parts),
        CHUNK=split.chunk,
        NUM_CHUNKS=split.num_chunks,
        num_warps=_SURVEYING_WARPS,
    )
    _settle_kernel[(num_rows,)](
        *(*where, parts, token_N, bad_N),
        CHUNK=split.chunk,
        NUM_CHUNKS=split.num_chunks,
        PARTS=split.parts,
        WALKED=min(WALKED, split.chunk),
        num_warps=_SETTLING_WARPS,
    )
    return token_N, bad_N


def _outputs(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row, and whether the row is unusable."""
    token_N = torch.empty(len(logits_NV), dtype=torch.int32, device=logits_NV.device)
    return token_N, torch.empty_like(token_N, dtype=torch.bool)


def _of_chunks(num_rows: int, split: Split, like: Tensor) -> Tensor:
    return torch.empty(num_rows, split.num_chunks, dtype=torch.float32, device=like.device)


@triton.jit
def _greedy_kernel(  # noqa: PLR0913
    logits,
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
    logit = _chunk_logits(row_at(logits, row), logits.vocab_size, chunk, CHUNK)
    logit = tl.where(logit == logit, logit, float("inf"))
    best, token = tl.max(logit, 0, return_indices=True, return_indices_tie_break_left=True)
    token += chunk * CHUNK
    if NUM_CHUNKS > 1:
        tl.store(part_value_NC + row * NUM_CHUNKS + chunk, best)
        tl.store(part_index_NC + row * NUM_CHUNKS + chunk, token)
    if is_last(ticket_N, row, NUM_CHUNKS):
        if NUM_CHUNKS > 1:
            best, token = best_part(part_value_NC, part_index_NC, row, NUM_CHUNKS, PARTS)
        tl.store(token_N + row, token)
        tl.store(bad_N + row, (best == float("inf")) | (best == float("-inf")))


@triton.jit(do_not_specialize=["width"])
def _survey_kernel(
    logits,
    windows,
    width,
    knobs,
    seed_stride,
    parts,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
):
    best_NC, bound_NC = parts
    row, chunk = tl.program_id(0) // NUM_CHUNKS, tl.program_id(0) % NUM_CHUNKS
    if row % width >= tl.load(windows.width_B + row // width):
        return
    logits_V = row_at(logits, logits_row(windows, row, width))
    logit = _chunk_logits(logits_V, logits.vocab_size, chunk, CHUNK)
    logit = tl.where(logit == logit, logit, float("inf"))
    best = tl.max(logit)
    tl.store(best_NC + row * NUM_CHUNKS + chunk, best)
    slot = tl.load(windows.slot_B + row // width)
    temperature = tl.load(knobs.temperature_S + slot)
    if temperature > 0:
        key_1, key_2 = _key(windows, knobs, seed_stride, slot, row, width)
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        bound = tl.max(score_bound(logit, temperature, key_1, key_2, place))
        # A chunk that has any token to choose is looked at, however low its logits are.
        bound = tl.where(best > float("-inf"), tl.maximum(bound, -1e38), float("-inf"))
        tl.store(bound_NC + row * NUM_CHUNKS + chunk, bound)


@triton.jit(do_not_specialize=["width"])
def _settle_kernel(  # noqa: PLR0913
    logits,
    windows,
    width,
    knobs,
    seed_stride,
    parts,
    token_N,
    bad_N,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    WALKED: tl.constexpr,
):
    best_NC, bound_NC = parts
    row = tl.program_id(0)
    if row % width >= tl.load(windows.width_B + row // width):
        return
    slot = tl.load(windows.slot_B + row // width)
    temperature = tl.load(knobs.temperature_S + slot)
    at_logits = logits_row(windows, row, width)
    logits_V, vocab_size = row_at(logits, at_logits), logits.vocab_size
    chunk = tl.arange(0, PARTS)
    at, is_chunk = row * NUM_CHUNKS + chunk, chunk < NUM_CHUNKS
    best_C = tl.load(best_NC + at, is_chunk, other=float("-inf"))
    best, first = tl.max(best_C, 0, return_indices=True, return_indices_tie_break_left=True)
    is_bad = (best == float("inf")) | (best == float("-inf"))
    tl.store(bad_N + at_logits, is_bad)
    if is_bad | (temperature == 0):
        logit = _chunk_logits(logits_V, vocab_size, first, CHUNK)
        logit = tl.where(logit == logit, logit, float("inf"))
        _, spot = tl.max(logit, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(token_N + at_logits, first * CHUNK + spot)
        return
    bound_C = tl.load(bound_NC + at, is_chunk, other=float("-inf"))
    key_1, key_2 = _key(windows, knobs, seed_stride, slot, row, width)
    top_k, top_p = tl.load(knobs.top_k_S + slot), tl.load(knobs.top_p_S + slot)
    top_k = tl.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    min_p = tl.load(knobs.min_p_S + slot)
    # A threshold must never pass the best token, whatever rounding did.
    low = tl.minimum(best + temperature * tl.log(tl.maximum(min_p, 1e-37)), best)
    low = tl.where(min_p > 0, low, float("-inf"))
    if (top_k < vocab_size) & (top_k <= CHUNK):
        low = tl.maximum(low, _below_kth(logits_V, vocab_size, top_k, CHUNK, NUM_CHUNKS))
    noise = (temperature, key_1, key_2)
    source = (logits_V, vocab_size, best, sharpness(temperature))
    above = float("-inf")  # no token at or below it is kept
    is_kept = False
    while not is_kept:
        token = _winner(logits_V, vocab_size, bound_C, noise, low, above, CHUNK)
        own = tl.load(logits_V + token).to(tl.float32)
        # The best token is always kept. A race that came no further would never end.
        is_kept = (own >= best) | (own <= above) | ((top_k == vocab_size) & (top_p >= 1))
        if not is_kept:
            is_kept = _is_kept(source, own, low, top_k, top_p, CHUNK, NUM_CHUNKS, WALKED)
        above = own
        tl.store(token_N + at_logits, token)


@triton.jit
def _key(windows, knobs, seed_stride, slot, row, width):
    seed_2 = knobs.seed_S2 + slot * seed_stride
    position = tl.load(windows.length_B + row // width) + row % width
    return stream_key(tl.load(seed_2), tl.load(seed_2 + 1), position, SAMPLE)


@triton.jit
def _chunk_logits(logits_V, vocab_size, chunk, CHUNK: tl.constexpr):
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    return tl.load(logits_V + place, place < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _winner(logits_V, vocab_size, bound_C, noise, low, above, CHUNK: tl.constexpr):
    """The winner among the row's tokens that reach `low` and pass `above`; of equals the first.

    Chunks come in the order of their bounds, until no bound reaches the best score.
    """
    score, token = float("-inf"), 0
    chunk_C = tl.arange(0, bound_C.shape[0])
    bound, chunk = tl.max(bound_C, 0, return_indices=True)
    while bound > float("-inf"):
        logit = _chunk_logits(logits_V, vocab_size, chunk, CHUNK)
        best, found = race(logits_V, vocab_size, logit, chunk * CHUNK, low, above, noise)
        token = tl.where((best > score) | ((best == score) & (found < token)), found, token)
        score = tl.maximum(best, score)
        is_open = (bound_C >= lower(score)) & (chunk_C != chunk)
        bound_C = tl.where(is_open, bound_C, float("-inf"))
        bound, chunk = tl.max(bound_C, 0, return_indices=True)
    return token


@triton.jit
def _below_kth(logits_V, vocab_size, top_k, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr):
    """A value that at least k tokens reach, and few more: k of the best of every CHUNK-th token do.

    To the precision of bf16, which is enough for that.
    """
    most = tl.full((CHUNK,), float("-inf"), tl.float32)
    for first in range(0, NUM_CHUNKS, _AT_ONCE):
        for i in tl.static_range(_AT_ONCE):
            most = tl.maximum(most, _chunk_logits(logits_V, vocab_size, first + i, CHUNK))
    key = ordered_bits(most) >> 16
    low, high = -32768, 32767
    while low < high:
        middle = (low + high + 1) >> 1
        covers = tl.sum((key >= middle).to(tl.int32)) >= top_k
        low = tl.where(covers, middle, low)
        high = tl.where(covers, high, middle - 1)
    value = from_ordered_bits(low << 16)
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def _is_kept(
    source,
    own,
    low,
    top_k,
    top_p,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    WALKED: tl.constexpr,
):
    """Whether top_k and top_p keep a token with this logit. All that they keep reaches `low`."""
    vocab_size, best, sharp = source[1], source[2], source[3]
    is_kept = True
    if top_k < vocab_size:
        total, above, num_low, num_above = _weigh(source, own, low, CHUNK, NUM_CHUNKS, True)
        is_kept = num_above < top_k
        # Tokens that reach `low` and are not among the first k weigh no more than one that is.
        weight = tl.exp2((own - best) * sharp)
        least = tl.maximum(above + weight, total - tl.maximum(num_low - top_k, 0) * weight)
        if is_kept & (top_p < 1) & (above >= top_p * least) & (above < top_p * total):
            # More than k tokens reach `low`, so it does not matter how much lower the walk begins.
            under = low - 1e-3 - 1e-3 * tl.abs(low)
            _, mass = highest_covering(
                source, under, float("inf"), top_k.to(tl.int64), WALKED, False
            )
            total = mass.to(tl.float32)
    else:
        total, above, num_low, num_above = _weigh(source, own, low, CHUNK, NUM_CHUNKS, False)
    return is_kept & ((top_p >= 1) | (above < top_p * total))


@triton.jit
def _weigh(source, own, low, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, COUNTS: tl.constexpr):
    """The mass of the tokens that reach `low` and of those above `own`, and how many those are."""
    logits_V, vocab_size, best, sharp = source
    masses, masses_above = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    counts, counts_above = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.int32)
    for first in range(0, NUM_CHUNKS, _AT_ONCE):
        for i in tl.static_range(_AT_ONCE):
            logit = _chunk_logits(logits_V, vocab_size, first + i, CHUNK)
            weight = tl.exp2((logit - best) * sharp)
            masses += tl.where(logit >= low, weight, 0.0)
            masses_above += tl.where(logit > own, weight, 0.0)
            if COUNTS:
                counts += ((logit >= low) & (logit > float("-inf"))).to(tl.int32)
                counts_above += (logit > own).to(tl.int32)
    return tl.sum(masses), tl.sum(masses_above), tl.sum(counts), tl.sum(counts_above)
