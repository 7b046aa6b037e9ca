"""Where a row's cut may be, from a sample of it: the values that `thresholds_triton` tries.

Device functions only. Nothing here decides a token: a guess that is off costs time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def guess(  # noqa: PLR0913
    logits_V,
    vocab_size,
    best,
    sharp,
    low,
    top_k,
    top_p,
    SAMPLED: tl.constexpr,
    GRID: tl.constexpr,
    TRIED: tl.constexpr,
):
    """Logits around the cut, as far as a sample of the row can tell; the first is `low`.

    Amounts above the points of a grid stand for the sample's order.
    """
    sample = _sampled(logits_V, vocab_size, tl.arange(0, SAMPLED), SAMPLED)
    weight = tl.exp2((sample - best) * sharp)
    highest = tl.max(sample)
    # Finer towards the top; what is far below has no mass to speak of.
    lowest = tl.min(tl.where(sample >= highest - 180.0 / sharp, sample, highest))
    ends = (highest, highest - lowest)
    grid = _grid_value(ends, tl.arange(0, GRID).to(tl.float32), GRID)[None, :]
    # Piece by piece: the whole sample against the whole grid would not fit into registers.
    counts, masses = tl.zeros((128, GRID), tl.float32), tl.zeros((128, GRID), tl.float32)
    for start in range(0, SAMPLED, 128):
        piece = _sampled(logits_V, vocab_size, start + tl.arange(0, 128), SAMPLED)[:, None]
        counts += tl.where(piece >= grid, 1.0, 0.0)
        masses += tl.where(piece >= grid, tl.exp2((piece - best) * sharp), 0.0)
    count, mass = tl.sum(counts, 0), tl.sum(masses, 0)

    share = vocab_size / SAMPLED
    is_limited = (top_k > 0) & (top_k < vocab_size)
    rank_k = top_k / share
    cut_k = tl.where(is_limited, _crossing(count, rank_k, ends, GRID), float("-inf"))
    inside = sample >= tl.maximum(low, cut_k)
    # The best token is known and counts for itself: what is peaked is seldom in the sample.
    mass_inside = tl.sum(tl.where(inside, weight, 0.0))
    mass_p = (top_p * (1.0 + share * mass_inside) - 1.0) / share
    cut_p = _crossing(mass, mass_p, ends, GRID)
    # How far off the sample may be: about a count, and about a share of the mass.
    off_k = 1.0 + tl.sqrt(rank_k)
    off = tl.where(inside, weight * (tl.where(sample >= cut_p, 1.0, 0.0) - top_p), 0.0)
    off_p = tl.sqrt(tl.sum(off * off))

    # Close to the guess and far from it; both cuts share the places if there are both.
    tried = tl.arange(0, TRIED)
    both = is_limited & (top_p < 1)
    side = tl.where(tried < 4, tried - tl.where(both, 2.0, 4.0), tried - tl.where(both, 5.5, 4.0))
    away = tl.where(both, 2.0, 0.5) * side * side + tl.where(both, 0.0, 0.1) * tl.abs(side)
    away = tl.where(side < 0, -away, away)
    first_p = tl.where(top_p < 1, tl.where(is_limited, 4, 0), TRIED)
    is_p = tried >= first_p
    wanted = tl.where(is_p, mass_p + away * off_p, rank_k + away * off_k)
    amount = tl.where(is_p[None, :], mass[:, None], count[:, None])
    cuts = _crossings(amount, wanted, ends, GRID)
    # Whatever the masses say, the last leaves more than a few tokens above it.
    few = _crossing(count, 24.0, ends, GRID)
    cuts = tl.minimum(tl.where(tried == TRIED - 1, tl.minimum(cuts, few), cuts), highest)
    # Values that are there, on both sides: then many equal ones do not lie between two tried.
    sign = tl.where(side < 0, -1.0, 1.0)[None, :]
    signed = sample[:, None] * sign
    cuts = tl.max(tl.where(signed <= cuts[None, :] * sign, signed, float("-inf")), 0)
    cuts = tl.where(side < 0, -cuts, cuts)
    return tl.where(tried == 0, low, tl.maximum(cuts, low))


@triton.jit
def _sampled(logits_V, vocab_size, index, SAMPLED: tl.constexpr):
    """Runs of 32 logits from all over the row."""
    place = (index // 32) * (vocab_size // (SAMPLED // 32)) + index % 32
    return tl.load(logits_V + place).to(tl.float32)


@triton.jit
def _grid_value(ends, index, GRID: tl.constexpr):
    highest, length = ends
    from_top = tl.maximum(1.0 - index / (GRID - 1), 0.0)
    return highest - length * from_top * from_top


@triton.jit
def _crossing(amount, wanted, ends, GRID: tl.constexpr):
    """Where amounts above the points of a grid, which fall, come down to what is wanted."""
    reaches = amount >= wanted
    index = tl.sum(reaches.to(tl.float32)) - 1.0
    upper = tl.min(tl.where(reaches, amount, 1e30))
    lower = tl.max(tl.where(reaches, 0.0, amount))
    part = (upper - wanted) / (upper - lower + 1e-30)
    return tl.where(index < 0, float("-inf"), _grid_value(ends, index + part, GRID))


@triton.jit
def _crossings(amount, wanted, ends, GRID: tl.constexpr):
    """`_crossing` of several at once: [GRID, TRIED] and [TRIED]."""
    reaches = amount >= wanted[None, :]
    index = tl.sum(reaches.to(tl.float32), 0) - 1.0
    upper = tl.min(tl.where(reaches, amount, 1e30), 0)
    lower = tl.max(tl.where(reaches, 0.0, amount), 0)
    part = (upper - wanted) / (upper - lower + 1e-30)
    return tl.where(index < 0, float("-inf"), _grid_value(ends, index + part, GRID))
