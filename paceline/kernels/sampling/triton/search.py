"""The last part of `cuts`: a row's exact cut, between two values around it.

The few values between are gathered and searched; where too many lie close together for that, the
row itself is walked in every round.

Shape letters: N logits rows, S slots, V vocabulary, L values that are gathered.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.rows import WindowRows
from paceline.kernels.sampling.reference import SlotKnobs
from paceline.kernels.sampling.triton.chunks import (
    NUM_WARPS,
    Logits,
    from_ordered_bits,
    logits_row,
    ordered_bits,
    row_at,
    sharpness,
)
from paceline.kernels.sampling.triton.cuts import CUT, OPEN, Cuts

# Masses are whole numbers of this part of the best token's, so that their sum does not depend on
# the order in which programs gathered them.
_FIXED_POINT = tl.constexpr(float(2**40))
_STEP = 2048  # of gathering: scattered stores take many registers
WALKED = 1024


def finish_cuts(logits_NV: Tensor, windows: WindowRows, knobs: SlotKnobs, cuts: Cuts) -> None:
    """Thresholds and masses of OPEN rows."""
    num_rows, vocab_size = windows.num_positions, logits_NV.shape[1]
    gathered = cuts.gathered_NL.shape[1]
    step = min(_STEP, triton.next_power_of_2(vocab_size))
    num_steps = triton.cdiv(vocab_size, step)
    logits = Logits.of(logits_NV)
    _gather_kernel[(num_rows * num_steps,)](
        *(logits, windows, windows.width, cuts),
        STEP=step,
        NUM_STEPS=num_steps,
        GATHERED=gathered,
        num_warps=NUM_WARPS,
    )
    _search_kernel[(num_rows,)](
        *(logits, windows, windows.width, knobs, cuts),
        GATHERED=gathered,
        WALKED=min(WALKED, step),
        num_warps=NUM_WARPS,
    )


@triton.jit(do_not_specialize=["width"])
def _gather_kernel(
    logits,
    windows,
    width,
    cuts,
    STEP: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    GATHERED: tl.constexpr,
):
    row, step = tl.program_id(0) // NUM_STEPS, tl.program_id(0) % NUM_STEPS
    if tl.load(cuts.state_N + row) != OPEN:
        return
    bracket_4 = cuts.bracket_N4 + row * 4
    low_k, high_k = tl.load(bracket_4), tl.load(bracket_4 + 1)
    low_p, high_p = tl.load(bracket_4 + 2), tl.load(bracket_4 + 3)
    place = step * STEP + tl.arange(0, STEP)
    logits_V = row_at(logits, logits_row(windows, row, width))
    logit = tl.load(logits_V + place, place < logits.vocab_size, float("-inf")).to(tl.float32)
    enclosed = ((logit > low_k) & (logit < high_k)) | ((logit > low_p) & (logit < high_p))
    counts = enclosed.to(tl.int32)
    num_enclosed = tl.sum(counts)
    if num_enclosed > 0:
        start = tl.atomic_add(cuts.num_gathered_N + row, num_enclosed, sem="relaxed")
        at = start + tl.cumsum(counts, 0) - 1
        gathered_L = cuts.gathered_NL + row.to(tl.int64) * GATHERED
        tl.store(gathered_L + at, logit, enclosed & (at < GATHERED))


@triton.jit(do_not_specialize=["width"])
def _search_kernel(
    logits, windows, width, knobs, cuts, GATHERED: tl.constexpr, WALKED: tl.constexpr
):
    row = tl.program_id(0)
    if tl.load(cuts.state_N + row) != OPEN:
        return
    slot = tl.load(windows.slot_B + row // width)
    temperature, best = tl.load(knobs.temperature_S + slot), tl.load(cuts.best_N + row)
    sharp = sharpness(temperature)
    top_p = tl.load(knobs.top_p_S + slot).to(tl.float64)
    missing = tl.load(knobs.top_k_S + slot) - tl.load(cuts.above_N + row)
    bracket_4, mass_4 = cuts.bracket_N4 + row * 4, cuts.bracket_mass_N4 + row * 4
    low_k, high_k = tl.load(bracket_4), tl.load(bracket_4 + 1)
    ends = (low_k, high_k, tl.load(bracket_4 + 2), tl.load(bracket_4 + 3))
    num_gathered = tl.load(cuts.num_gathered_N + row)
    logits_V = row_at(logits, logits_row(windows, row, width))
    if num_gathered <= GATHERED:
        at = tl.arange(0, GATHERED)
        gathered_L = cuts.gathered_NL + row.to(tl.int64) * GATHERED
        logit = tl.load(gathered_L + at, at < num_gathered, other=float("-inf"))
        gathered = (logit, _whole(tl.exp2((logit - best) * sharp)))
        threshold, mass = _cut(gathered, ends, mass_4, missing, top_p, 0)
    else:
        walked = (logits_V, logits.vocab_size, best, sharp)
        threshold, mass = _cut(walked, ends, mass_4, missing, top_p, WALKED)
    tl.store(cuts.threshold_N + row, threshold)
    tl.store(cuts.mass_N + row, mass.to(tl.float32))
    tl.store(cuts.state_N + row, CUT)


@triton.jit
def _cut(source, ends, mass_4, missing, top_p, WALKED: tl.constexpr):
    """The row's threshold, and the mass at or above it."""
    low_k, high_k, low_p, high_p = ends
    missing = tl.cast(missing, tl.int64)
    cut, mass = highest_covering(source, low_k, high_k, missing, WALKED, False)
    mass = tl.where(cut == low_k, tl.load(mass_4), tl.load(mass_4 + 1) + mass)
    if top_p < 1:
        above = tl.load(mass_4 + 3)
        missing = tl.ceil((top_p * mass - above) * _FIXED_POINT).to(tl.int64)
        found, mass_p = highest_covering(source, low_p, high_p, missing, WALKED, True)
        # Rounding must not undo what top_k cut.
        is_lower = found < cut
        mass_p = tl.where(found == low_p, tl.load(mass_4 + 2), above + mass_p)
        mass = tl.where(is_lower, mass, mass_p)
        cut = tl.where(is_lower, cut, found)
    return cut, mass


@triton.jit
def highest_covering(source, low, high, missing, WALKED: tl.constexpr, BY_MASS: tl.constexpr):
    """The highest value in (low, high) such that [value, high) holds what is `missing`, else `low`.

    Also the mass that [value, high) holds. Rounds aim by interpolation and halve in turn; each
    moves an end of the range to a value that is there.
    """
    amount, mass, at, _ = _weigh(source, low, low, high, WALKED, BY_MASS)
    covers = (amount >= missing) & (at < high)  # nothing lies between: then nothing does
    _, _, _, last = _weigh(source, high, low, high, WALKED, BY_MASS)
    last = tl.where(covers, last, at)
    beyond = tl.zeros_like(amount)
    aims = 1
    while last > at:
        share = (amount - missing).to(tl.float32) / (amount - beyond).to(tl.float32)
        aim = at + share * (last - at)
        middle = (ordered_bits(at).to(tl.int64) + ordered_bits(last).to(tl.int64) + 1) >> 1
        aim = tl.where(aims > 0, aim, from_ordered_bits(middle.to(tl.int32)))
        aim = tl.where((aim > at) & (aim < last), aim, last)
        tried, tried_mass, above, below = _weigh(source, aim, low, high, WALKED, BY_MASS)
        if tried >= missing:
            at, amount, mass = above, tried, tried_mass
        else:
            last, beyond = below, tried
        aims = 1 - aims
    cut = tl.where(covers, at, low)
    return cut, mass.to(tl.float64) / _FIXED_POINT


@triton.jit
def _weigh(source, at, low, high, WALKED: tl.constexpr, BY_MASS: tl.constexpr):
    """Of the values in (low, high): how many (or what mass) reach `at`, that mass, the least that
    does and the greatest that does not.
    """
    if WALKED == 0:
        inside = (source[0] > low) & (source[0] < high)
        reaches = inside & (source[0] >= at)
        mass = tl.sum(tl.where(reaches, source[1], 0))
        amount = mass
        if not BY_MASS:
            amount = tl.sum(reaches.to(tl.int32)).to(tl.int64)
        above = tl.min(tl.where(reaches, source[0], float("inf")))
        below = tl.max(tl.where(inside & (source[0] < at), source[0], float("-inf")))
    else:
        logits_V, vocab_size, best, sharp = source
        masses = tl.zeros((WALKED,), tl.int64)
        counts = tl.zeros((WALKED,), tl.int32)
        aboves = tl.full((WALKED,), float("inf"), tl.float32)
        belows = tl.full((WALKED,), float("-inf"), tl.float32)
        start = 0
        while start < vocab_size:
            place = start + tl.arange(0, WALKED)
            logit = tl.load(logits_V + place, place < vocab_size, other=float("-inf"))
            logit = logit.to(tl.float32)
            inside = (logit > low) & (logit < high)
            reaches = inside & (logit >= at)
            masses += tl.where(reaches, _whole(tl.exp2((logit - best) * sharp)), 0)
            counts += reaches.to(tl.int32)
            aboves = tl.minimum(aboves, tl.where(reaches, logit, float("inf")))
            belows = tl.maximum(belows, tl.where(inside & (logit < at), logit, float("-inf")))
            start += WALKED
        mass = tl.sum(masses)
        amount = mass
        if not BY_MASS:
            amount = tl.sum(counts).to(tl.int64)
        above = tl.min(aboves)
        below = tl.max(belows)
    return amount, mass, above, below


@triton.jit
def _whole(mass):
    return (mass * _FIXED_POINT).to(tl.int64)
