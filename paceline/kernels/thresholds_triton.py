"""Where min_p, top_k and top_p cut each row, without sorting it: four kernels before a draw.

The first finds the best token and guesses from a sample of the row a few values around the cut;
the second counts and weighs exactly what lies above each of them; the third gathers the few values
between the two that enclose the cut, the last searches those. A bad guess costs time, no token.
All of them compare logits as they are: a temperature changes masses, not the order. Float sums run
in an order that the vocabulary alone decides, the others are integers.

Shape letters: B rows, W window positions, N = B * W logits rows, V vocabulary, S slots, C chunks
of a row, G values that are tried, L values that are gathered.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.chunks_triton import (
    MOST_ROWS,
    NUM_WARPS,
    Split,
    best_part,
    is_last,
    sharpness,
    tickets,
)
from paceline.kernels.guess_triton import guess
from paceline.kernels.rows import WindowRows
from paceline.kernels.sampling import SlotKnobs
from paceline.kernels.search_triton import search, whole

# What is left to do for a row.
SETTLED = tl.constexpr(0)  # nobody looks, or greedy, or broken: its token stands
CUT = tl.constexpr(1)  # its threshold is known
OPEN = tl.constexpr(2)

_TRIED = 8
_SAMPLED = 1024
_GRID = 32
_GATHERED = 4096
_GATHER_STEP = 2048  # scattered stores take many registers


class Cuts(NamedTuple):
    """What is known of each row before it is drawn. A row of 128256 tokens takes 19 KiB."""

    token_N: Tensor  # int32: the best one
    bad_N: Tensor  # bool
    state_N: Tensor  # int32: SETTLED, CUT or OPEN
    best_N: Tensor  # float32: the best logit
    threshold_N: Tensor  # float32: tokens with a logit at or above it are kept
    mass_N: Tensor  # float32: of kept tokens, the sum of exp((logit - best) / T), where asked for
    part_value_NC: Tensor  # float32
    part_index_NC: Tensor  # int32
    tried_NG: Tensor  # float32
    count_NCG: Tensor  # int32
    mass_NCG: Tensor  # float32
    bracket_N4: Tensor  # float32: around the cut of top_k (low, high) and of top_p
    bracket_mass_N4: Tensor  # float64: mass at or above each of them
    above_N: Tensor  # int32: tokens at or above the upper end of top_k's bracket
    gathered_NL: Tensor  # float32
    num_gathered_N: Tensor  # int32

    @classmethod
    def empty(cls, num_rows: int, split: Split, device: torch.device) -> Cuts:
        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((num_rows, *shape), dtype=dtype, device=device)

        i32, parts = torch.int32, split.num_chunks
        return cls(
            token_N=new(dtype=i32),
            bad_N=new(dtype=torch.bool),
            state_N=new(dtype=i32),
            best_N=new(),
            threshold_N=new(),
            mass_N=new(),
            part_value_NC=new(parts),
            part_index_NC=new(parts, dtype=i32),
            tried_NG=new(_TRIED),
            count_NCG=new(parts, _TRIED, dtype=i32),
            mass_NCG=new(parts, _TRIED),
            bracket_N4=new(4),
            bracket_mass_N4=new(4, dtype=torch.float64),
            above_N=new(dtype=i32),
            gathered_NL=new(min(_GATHERED, split.chunk * split.num_chunks)),
            num_gathered_N=new(dtype=i32),
        )


def find_cuts(
    logits_NV: Tensor, rows: WindowRows, knobs: SlotKnobs, *, with_mass: bool = False
) -> Cuts:
    """The best token of each row, whether it is unusable, and its threshold."""
    num_rows, vocab_size = logits_NV.shape
    assert num_rows <= MOST_ROWS
    assert logits_NV.stride(1) == 1
    split = Split.of(vocab_size)
    cuts = Cuts.empty(num_rows, split, logits_NV.device)
    grid = (num_rows * split.num_chunks,)
    ticket_N = tickets(logits_NV.device)
    where = (logits_NV, logits_NV.stride(0), vocab_size, rows.slot_B, rows.width)
    filters = (knobs.top_k_S, knobs.top_p_S)
    sizes = {"CHUNK": split.chunk, "NUM_CHUNKS": split.num_chunks, "num_warps": NUM_WARPS}
    _survey_kernel[grid](
        *(*where, rows.width_B, knobs.temperature_S, *filters, knobs.min_p_S, ticket_N),
        *(cuts.token_N, cuts.bad_N.view(torch.int8), cuts.state_N, cuts.best_N, cuts.threshold_N),
        *(cuts.part_value_NC, cuts.part_index_NC, cuts.tried_NG, cuts.num_gathered_N),
        PARTS=split.parts,
        SAMPLED=_SAMPLED,
        GRID=_GRID,
        TRIED=_TRIED,
        **sizes,
    )
    _weigh_kernel[grid](
        *(*where, knobs.temperature_S, *filters, ticket_N, int(with_mass)),
        *(cuts.state_N, cuts.best_N, cuts.tried_NG, cuts.count_NCG, cuts.mass_NCG),
        *(cuts.bracket_N4, cuts.bracket_mass_N4, cuts.above_N, cuts.mass_N),
        PARTS=split.parts,
        TRIED=_TRIED,
        **sizes,
    )
    step = min(_GATHER_STEP, split.chunk)
    num_steps = triton.cdiv(vocab_size, step)
    _gather_kernel[(num_rows * num_steps,)](
        *(logits_NV, logits_NV.stride(0), vocab_size, cuts.state_N, cuts.bracket_N4),
        *(cuts.gathered_NL, cuts.num_gathered_N),
        GATHERED=cuts.gathered_NL.shape[1],
        CHUNK=step,
        NUM_CHUNKS=num_steps,
        num_warps=NUM_WARPS,
    )
    _search_kernel[(num_rows,)](
        *(*where, knobs.temperature_S, *filters),
        *(cuts.state_N, cuts.best_N, cuts.threshold_N, cuts.mass_N),
        *(cuts.bracket_N4, cuts.bracket_mass_N4, cuts.above_N),
        *(cuts.gathered_NL, cuts.num_gathered_N),
        GATHERED=cuts.gathered_NL.shape[1],
        WALKED=min(1024, split.chunk),
        num_warps=NUM_WARPS,
    )
    return cuts


@triton.jit(do_not_specialize=["width"])
def _survey_kernel(  # noqa: PLR0913
    logits_NV,
    row_stride,
    vocab_size,
    slot_B,
    width,
    width_B,
    temperature_S,
    top_k_S,
    top_p_S,
    min_p_S,
    ticket_N,
    token_N,
    bad_N,
    state_N,
    best_N,
    threshold_N,
    part_value_NC,
    part_index_NC,
    tried_NG,
    num_gathered_N,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    SAMPLED: tl.constexpr,
    GRID: tl.constexpr,
    TRIED: tl.constexpr,
):
    row, chunk = tl.program_id(0) // NUM_CHUNKS, tl.program_id(0) % NUM_CHUNKS
    if row % width >= tl.load(width_B + row // width):
        if chunk == 0:
            tl.store(token_N + row, 0)
            tl.store(bad_N + row, 0)
            tl.store(state_N + row, SETTLED)
        return
    slot = tl.load(slot_B + row // width)
    logits_V = logits_NV + row.to(tl.int64) * row_stride
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits_V + place, place < vocab_size, other=float("-inf")).to(tl.float32)
    temperature, min_p = tl.load(temperature_S + slot), tl.load(min_p_S + slot)
    top_k, top_p = tl.load(top_k_S + slot), tl.load(top_p_S + slot)
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
        is_drawn = (temperature > 0) & (is_bad == 0)
        is_open = is_drawn & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1))
        tl.store(token_N + row, token)
        tl.store(bad_N + row, is_bad.to(tl.int8))
        tl.store(best_N + row, best)
        tl.store(state_N + row, tl.where(is_open, OPEN, tl.where(is_drawn, CUT, SETTLED)))
        if is_drawn:
            # A threshold must never pass the best token, whatever rounding did.
            low = tl.minimum(best + temperature * tl.log(tl.maximum(min_p, 1e-38)), best)
            low = tl.where(min_p > 0, low, float("-inf"))
            tl.store(threshold_N + row, low)
            tried = tl.arange(0, TRIED)
            values = tl.where(tried == 0, low, float("inf"))
            if is_open and NUM_CHUNKS > 1:
                values = guess(
                    *(logits_V, vocab_size, best, sharpness(temperature), low, top_k, top_p),
                    *(SAMPLED, GRID, TRIED),
                )
            tl.store(tried_NG + row * TRIED + tried, values)
            tl.store(num_gathered_N + row, 0)


@triton.jit(do_not_specialize=["width", "with_mass"])
def _weigh_kernel(  # noqa: PLR0913
    logits_NV,
    row_stride,
    vocab_size,
    slot_B,
    width,
    temperature_S,
    top_k_S,
    top_p_S,
    ticket_N,
    with_mass,
    state_N,
    best_N,
    tried_NG,
    count_NCG,
    mass_NCG,
    bracket_N4,
    bracket_mass_N4,
    above_N,
    mass_N,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    TRIED: tl.constexpr,
):
    row, chunk = tl.program_id(0) // NUM_CHUNKS, tl.program_id(0) % NUM_CHUNKS
    state = tl.load(state_N + row)
    if (state == SETTLED) | ((state == CUT) & (with_mass == 0)):
        return
    slot = tl.load(slot_B + row // width)
    sharp = sharpness(tl.load(temperature_S + slot))
    best = tl.load(best_N + row)
    top_k, top_p = tl.load(top_k_S + slot), tl.load(top_p_S + slot)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < vocab_size
    logits_V = logits_NV + row.to(tl.int64) * row_stride
    logit = tl.load(logits_V + place, inside, other=float("-inf")).to(tl.float32)
    part = (row * NUM_CHUNKS + chunk) * TRIED
    # What nobody needs stays as it is, and nobody looks at it.
    if (top_p < 1) | (with_mass > 0):
        weight = tl.exp2((logit - best) * sharp)
        for g in tl.static_range(TRIED):
            kept = logit >= tl.load(tried_NG + row * TRIED + g)
            tl.store(mass_NCG + part + g, tl.sum(tl.where(kept, weight, 0.0)))
    if (top_k > 0) & (top_k < vocab_size):
        for g in tl.static_range(TRIED):
            kept = inside & (logit >= tl.load(tried_NG + row * TRIED + g))
            tl.store(count_NCG + part + g, tl.sum(kept.to(tl.int32)))
    if is_last(ticket_N, row, NUM_CHUNKS):
        tried = tl.arange(0, TRIED)
        parts = tl.arange(0, PARTS)[:, None]
        at = (row * NUM_CHUNKS + parts) * TRIED + tried[None, :]
        count = tl.load(count_NCG + at, parts < NUM_CHUNKS, other=0, cache_modifier=".cg")
        mass = tl.load(mass_NCG + at, parts < NUM_CHUNKS, other=0.0, cache_modifier=".cg")
        count, mass = tl.sum(count, 0), tl.sum(mass.to(tl.float64), 0)
        tl.store(mass_N + row, tl.sum(tl.where(tried == 0, mass, 0.0)).to(tl.float32))
        if state == OPEN:
            values = tl.load(tried_NG + row * TRIED + tried)
            _enclose(
                *(values, count, mass, top_k, top_p.to(tl.float64), vocab_size),
                *(bracket_N4 + row * 4, bracket_mass_N4 + row * 4, above_N + row),
                TRIED,
            )


@triton.jit
def _enclose(  # noqa: PLR0913
    value,
    count,
    mass,
    top_k,
    top_p,
    vocab_size,
    bracket_4,
    bracket_mass_4,
    above_1,
    TRIED: tl.constexpr,
):
    """Of the values tried: the last that keeps enough and the first that does not, for both cuts.

    A bracket whose two ends are equal is empty: its cut is known.
    """
    tried = tl.arange(0, TRIED)
    low = tl.sum(tl.where(tried == 0, value, 0.0))
    count_low = tl.sum(tl.where(tried == 0, count, 0))
    mass_low = tl.sum(tl.where(tried == 0, mass, 0.0))
    is_limited = (top_k > 0) & (top_k < vocab_size) & (count_low > top_k)
    covers = count >= top_k
    low_k = tl.where(is_limited, tl.max(tl.where(covers, value, float("-inf"))), low)
    high_k = tl.where(is_limited, tl.min(tl.where(covers, float("inf"), value)), low)
    mass_low_k = tl.min(tl.where(covers, mass, float("inf")))
    mass_low_k = tl.where(is_limited, mass_low_k, mass_low)
    mass_high_k = tl.max(tl.where(covers, 0.0, mass))
    mass_high_k = tl.where(is_limited, mass_high_k, mass_low)
    tl.store(above_1, tl.max(tl.where(covers, 0, count)))
    # The mass that top_p takes its share of lies between those at the ends of top_k's bracket.
    is_nucleus = top_p < 1
    covers = mass >= top_p * mass_low_k
    low_p = tl.where(is_nucleus, tl.max(tl.where(covers, value, float("-inf"))), low)
    mass_low_p = tl.min(tl.where(covers, mass, float("inf")))
    fails = mass < top_p * mass_high_k
    high_p = tl.where(is_nucleus, tl.min(tl.where(fails, value, float("inf"))), low)
    mass_high_p = tl.max(tl.where(fails, mass, 0.0))
    tl.store(bracket_4, low_k)
    tl.store(bracket_4 + 1, high_k)
    tl.store(bracket_4 + 2, low_p)
    tl.store(bracket_4 + 3, high_p)
    tl.store(bracket_mass_4, mass_low_k)
    tl.store(bracket_mass_4 + 1, mass_high_k)
    tl.store(bracket_mass_4 + 2, mass_low_p)
    tl.store(bracket_mass_4 + 3, mass_high_p)


@triton.jit
def _gather_kernel(  # noqa: PLR0913
    logits_NV,
    row_stride,
    vocab_size,
    state_N,
    bracket_N4,
    gathered_NL,
    num_gathered_N,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    GATHERED: tl.constexpr,
):
    row, chunk = tl.program_id(0) // NUM_CHUNKS, tl.program_id(0) % NUM_CHUNKS
    if tl.load(state_N + row) != OPEN:
        return
    low_k, high_k = tl.load(bracket_N4 + row * 4), tl.load(bracket_N4 + row * 4 + 1)
    low_p, high_p = tl.load(bracket_N4 + row * 4 + 2), tl.load(bracket_N4 + row * 4 + 3)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    logits_V = logits_NV + row.to(tl.int64) * row_stride
    logit = tl.load(logits_V + place, place < vocab_size, other=float("-inf")).to(tl.float32)
    enclosed = ((logit > low_k) & (logit < high_k)) | ((logit > low_p) & (logit < high_p))
    counts = enclosed.to(tl.int32)
    num_enclosed = tl.sum(counts)
    if num_enclosed > 0:
        start = tl.atomic_add(num_gathered_N + row, num_enclosed, sem="relaxed")
        at = start + tl.cumsum(counts, 0) - 1
        gathered_L = gathered_NL + row.to(tl.int64) * GATHERED
        tl.store(gathered_L + at, logit, enclosed & (at < GATHERED))


@triton.jit(do_not_specialize=["width"])
def _search_kernel(  # noqa: PLR0913
    logits_NV,
    row_stride,
    vocab_size,
    slot_B,
    width,
    temperature_S,
    top_k_S,
    top_p_S,
    state_N,
    best_N,
    threshold_N,
    mass_N,
    bracket_N4,
    bracket_mass_N4,
    above_N,
    gathered_NL,
    num_gathered_N,
    GATHERED: tl.constexpr,
    WALKED: tl.constexpr,
):
    row = tl.program_id(0)
    if tl.load(state_N + row) != OPEN:
        return
    slot = tl.load(slot_B + row // width)
    sharp = sharpness(tl.load(temperature_S + slot))
    best = tl.load(best_N + row)
    top_p = tl.load(top_p_S + slot).to(tl.float64)
    missing = tl.load(top_k_S + slot) - tl.load(above_N + row)
    bracket_4, mass_4 = bracket_N4 + row * 4, bracket_mass_N4 + row * 4
    low_k, high_k = tl.load(bracket_4), tl.load(bracket_4 + 1)
    ends = (low_k, high_k, tl.load(bracket_4 + 2), tl.load(bracket_4 + 3))
    num_gathered = tl.load(num_gathered_N + row)
    if num_gathered <= GATHERED:
        at = tl.arange(0, GATHERED)
        gathered_L = gathered_NL + row.to(tl.int64) * GATHERED
        logit = tl.load(gathered_L + at, at < num_gathered, other=float("-inf"))
        gathered = (logit, whole(tl.exp2((logit - best) * sharp)))
        threshold, mass = search(gathered, ends, mass_4, missing, top_p, 0)
    else:
        walked = (logits_NV + row.to(tl.int64) * row_stride, vocab_size, best, sharp)
        threshold, mass = search(walked, ends, mass_4, missing, top_p, WALKED)
    tl.store(threshold_N + row, threshold)
    tl.store(mass_N + row, mass.to(tl.float32))
