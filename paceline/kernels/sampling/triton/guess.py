"""Where a row's cut may be, from a sample of it: what `cuts` tries.

Device functions only. Nothing here decides a token: a guess that is off costs time.
"""

from __future__ import annotations

import triton
import triton.language as tl

_PIECE = tl.constexpr(128)


@triton.jit
def guess(  # noqa: PLR0913
    logits_V,
    vocab_size,
    best,
    sharp,
    total,
    low,
    top_k,
    top_p,
    SAMPLED: tl.constexpr,
    GRID: tl.constexpr,
    TRIED: tl.constexpr,
):
    """TRIED logits around the cut: the first is `low`; with two cuts each gets half of them.

    What is below a value is estimated, not what is above it: the total is known, and below are many
    small ones, which a sample knows well, while few large ones may be above.
    """
    sample = _sampled(logits_V, vocab_size, tl.arange(0, SAMPLED), SAMPLED)
    weight = tl.exp2((sample - best) * sharp)
    highest = tl.max(sample)
    # The grid is finer towards the top; what is far below has no mass to speak of.
    lowest = tl.min(tl.where(sample >= highest - 180.0 / sharp, sample, highest))
    ends = (highest, highest - lowest)
    grid = _grid_value(ends, tl.arange(0, GRID).to(tl.float32), GRID)[None, :]
    # Piece by piece: the whole sample against the whole grid would not fit into registers.
    counts, masses = tl.zeros((_PIECE, GRID), tl.float32), tl.zeros((_PIECE, GRID), tl.float32)
    for start in tl.static_range(0, SAMPLED, _PIECE):
        piece = _sampled(logits_V, vocab_size, start + tl.arange(0, _PIECE), SAMPLED)[:, None]
        counts += tl.where(piece < grid, 1.0, 0.0)
        masses += tl.where(piece < grid, tl.exp2((piece - best) * sharp), 0.0)
    count, mass = tl.sum(counts, 0), tl.sum(masses, 0)

    share = vocab_size / SAMPLED
    is_limited = (top_k > 0) & (top_k < vocab_size)
    rank_k = top_k / share
    count_k = SAMPLED - rank_k
    cut_k = tl.where(is_limited, _crossing(count, count_k, ends, GRID), float("-inf"))
    outside = tl.sum(tl.where(sample < tl.maximum(low, cut_k), weight, 0.0))
    mass_p = (1.0 - top_p) * total / share + top_p * outside
    cut_p = _crossing(mass, mass_p, ends, GRID)
    # How far off the sample may be: about a count, and about a sum of small masses.
    off_k = 1.0 + tl.sqrt(rank_k)
    below = tl.where(sample < cut_p, weight, 0.0)
    off_p = tl.exp2((cut_p - best) * sharp) + tl.sqrt(tl.sum(below * below))

    # Close to the guess and far from it. The first half is about top_p, if there is one.
    tried = tl.arange(0, TRIED)
    is_p = tried < tl.where(top_p < 1, tl.where(is_limited, TRIED // 2, TRIED), 0)
    side = (tried % (TRIED // 2) - TRIED // 4).to(tl.float32)
    away = 0.1 * tl.abs(side) + 0.5 * side * side
    away = tl.where(side < 0, away, -away)
    wanted = tl.where(is_p, mass_p + away * off_p, count_k + away * off_k)
    amount = tl.where(is_p[None, :], mass[:, None], count[:, None])
    cuts = _crossings(amount, wanted, ends, GRID)
    # Whatever the masses say, the lower ones leave more than a few tokens above them.
    few = tl.where(side > 0, SAMPLED - 3.0 * tl.exp2(2.0 * side - 2.0), SAMPLED * 1.0)
    cuts = tl.minimum(cuts, _crossings(count[:, None] + tl.zeros_like(amount), few, ends, GRID))
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
    """Where amounts below the points of a grid, which grow, come up to what is wanted."""
    is_under = amount <= wanted
    index = tl.sum(is_under.to(tl.float32)) - 1.0
    under = tl.max(tl.where(is_under, amount, 0.0))
    over = tl.min(tl.where(is_under, 1e30, amount))
    part = (wanted - under) / (over - under + 1e-30)
    return _grid_value(ends, tl.maximum(index + part, 0.0), GRID)


@triton.jit
def _crossings(amount, wanted, ends, GRID: tl.constexpr):
    """`_crossing` of several at once: [GRID, TRIED] and [TRIED]."""
    is_under = amount <= wanted[None, :]
    index = tl.sum(is_under.to(tl.float32), 0) - 1.0
    under = tl.max(tl.where(is_under, amount, 0.0), 0)
    over = tl.min(tl.where(is_under, 1e30, amount), 0)
    part = (wanted - under) / (over - under + 1e-30)
    return _grid_value(ends, tl.maximum(index + part, 0.0), GRID)
