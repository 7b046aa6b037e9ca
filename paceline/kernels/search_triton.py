"""The last part of `thresholds_triton`: the exact cut of one row, between two values around it.

Device functions only. `source` is what lies between: gathered logits with their masses, or the row
itself, walked in every round, where too many lie close together to be gathered.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.chunks_triton import from_ordered_bits, ordered_bits

# Masses are whole numbers of this part of the best token's, so that their sum does not depend on
# the order in which programs gathered them.
_FIXED_POINT = tl.constexpr(float(2**40))


@triton.jit
def search(source, ends, mass_4, missing, top_p, WALKED: tl.constexpr):
    """The row's threshold, and the mass at or above it."""
    low_k, high_k, low_p, high_p = ends
    missing = tl.cast(missing, tl.int64)
    cut, mass = _highest_covering(source, low_k, high_k, missing, WALKED, False)
    mass = tl.where(cut == low_k, tl.load(mass_4), tl.load(mass_4 + 1) + mass)
    if top_p < 1:
        above = tl.load(mass_4 + 3)
        missing = tl.ceil((top_p * mass - above) * _FIXED_POINT).to(tl.int64)
        found, mass_p = _highest_covering(source, low_p, high_p, missing, WALKED, True)
        # Rounding must not undo what top_k cut.
        is_lower = found < cut
        mass_p = tl.where(found == low_p, tl.load(mass_4 + 2), above + mass_p)
        mass = tl.where(is_lower, mass, mass_p)
        cut = tl.where(is_lower, cut, found)
    return cut, mass


@triton.jit
def _highest_covering(source, low, high, missing, WALKED: tl.constexpr, BY_MASS: tl.constexpr):
    """The highest value in (low, high) such that [value, high) holds what is `missing`, else `low`.

    Also the mass that [value, high) holds. Rounds aim by interpolation and halve in turn; each
    moves an end of the range to a value that is there.
    """
    amount, mass, at, _ = _weigh(source, low, low, high, WALKED, BY_MASS)
    _, _, _, last = _weigh(source, high, low, high, WALKED, BY_MASS)
    covers = (amount >= missing) & (at < high)  # nothing lies between: then nothing does
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
        above = tl.full((WALKED,), float("inf"), tl.float32)
        below = tl.full((WALKED,), float("-inf"), tl.float32)
        start = 0
        while start < vocab_size:
            place = start + tl.arange(0, WALKED)
            logit = tl.load(logits_V + place, place < vocab_size, other=float("-inf"))
            logit = logit.to(tl.float32)
            inside = (logit > low) & (logit < high)
            reaches = inside & (logit >= at)
            masses += tl.where(reaches, whole(tl.exp2((logit - best) * sharp)), 0)
            counts += reaches.to(tl.int32)
            above = tl.minimum(above, tl.where(reaches, logit, float("inf")))
            below = tl.maximum(below, tl.where(inside & (logit < at), logit, float("-inf")))
            start += WALKED
        mass = tl.sum(masses)
        amount = mass
        if not BY_MASS:
            amount = tl.sum(counts).to(tl.int64)
        above = tl.min(above)
        below = tl.max(below)
    return amount, mass, above, below


@triton.jit
def whole(mass):
    return (mass * _FIXED_POINT).to(tl.int64)
