"""The last part of `thresholds_triton`: the exact cut of one row, between two values around it.

Device functions only. `source` is what lies between: gathered values with their masses, or the row
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
def search(
    source,
    ends,
    mass_4,
    missing,
    top_p,
    best,
    CHUNK: tl.constexpr,
    WALKS: tl.constexpr,
):
    """The row's threshold, and the mass at or above it."""
    low_k, high_k, low_p, high_p = ends
    missing = tl.cast(missing, tl.int64)
    cut = _highest_covering(source, low_k, high_k, missing, best, CHUNK, WALKS, False)
    mass = _amount(source, cut, high_k, best, CHUNK, WALKS, True).to(tl.float64) / _FIXED_POINT
    mass = tl.where(cut == low_k, tl.load(mass_4), tl.load(mass_4 + 1) + mass)
    if top_p < 1:
        above = tl.load(mass_4 + 3)
        missing = tl.ceil((top_p * mass - above) * _FIXED_POINT).to(tl.int64)
        found = _highest_covering(source, low_p, high_p, missing, best, CHUNK, WALKS, True)
        cut = tl.maximum(cut, found)
        mass = _amount(source, cut, high_p, best, CHUNK, WALKS, True).to(tl.float64)
        mass = tl.where(cut == low_p, tl.load(mass_4 + 2), above + mass / _FIXED_POINT)
    return cut, mass


@triton.jit
def _highest_covering(
    source,
    low,
    high,
    missing,
    best,
    CHUNK: tl.constexpr,
    WALKS: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """The highest t > `low` such that [t, high) holds what is `missing`; `low` if there is none."""
    first = ordered_bits(low).to(tl.int64) + 1
    end = tl.minimum(ordered_bits(high), ordered_bits(best)).to(tl.int64) + 1
    if not WALKS:
        enclosed = (source[0] > low) & (source[0] < high)
        bits = ordered_bits(source[0])
        first = tl.min(tl.where(enclosed, bits, 0x7FFFFFFE)).to(tl.int64)
        end = tl.max(tl.where(enclosed, bits, -0x7FFFFFFE)).to(tl.int64) + 1
    at = first - 1
    while end - at > 1:
        middle = (at + end) >> 1
        value = from_ordered_bits(middle.to(tl.int32))
        covers = _amount(source, value, high, best, CHUNK, WALKS, BY_MASS) >= missing
        at = tl.where(covers, middle, at)
        end = tl.where(covers, end, middle)
    return tl.where(at < first, low, from_ordered_bits(at.to(tl.int32)))


@triton.jit
def _amount(
    source, low, high, best, CHUNK: tl.constexpr, WALKS: tl.constexpr, BY_MASS: tl.constexpr
):
    """int64: how many values lie in [low, high), or their mass."""
    if WALKS:
        logits_V, vocab_size, temperature = source
        amounts = tl.zeros((CHUNK,), tl.int64)
        for start in range(0, vocab_size, CHUNK):
            place = start + tl.arange(0, CHUNK)
            logit = tl.load(logits_V + place, place < vocab_size, other=float("-inf"))
            value = tl.div_rn(logit.to(tl.float32), temperature)
            each = whole(tl.exp(value - best)) if BY_MASS else 1
            amounts += tl.where((value >= low) & (value < high), each, 0)
        total = tl.sum(amounts)
    else:
        is_between = (source[0] >= low) & (source[0] < high)
        if BY_MASS:
            total = tl.sum(tl.where(is_between, source[1], 0))
        else:
            total = tl.sum(is_between.to(tl.int32)).to(tl.int64)
    return total


@triton.jit
def whole(mass):
    return (mass * _FIXED_POINT).to(tl.int64)
