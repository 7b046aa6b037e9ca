"""The tests of `paceline verify` on counts: chi-square, and an excess over a baseline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

MIN_EXPECTED = 10.0  # draws of a chi-square cell


def chi_square(counts: Counter[int], chances: Mapping[int, float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom. Tokens too rare for a cell share one."""
    total = counts.total()
    cells = {t: p for t, p in chances.items() if p * total >= MIN_EXPECTED}
    rest = 1.0 - sum(cells.values())
    while cells and rest * total < MIN_EXPECTED:
        rest += cells.pop(min(cells, key=lambda token: cells[token]))
    seen_rest = total - sum(counts[token] for token in cells)
    pairs = [(counts[token], p * total) for token, p in cells.items()]
    pairs.append((seen_rest, rest * total))
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs), len(pairs) - 1


def chi_square_tail(statistic: float, freedom: int) -> float:
    """The chance of a larger value, by the finite sums for whole degrees of freedom."""
    half, odd = statistic / 2, freedom % 2
    if half <= 0:
        return 1.0
    powers = (k + odd / 2 for k in range(freedom // 2))
    terms = [math.exp(x * math.log(half) - half - math.lgamma(x + 1)) for x in powers]
    return min(1.0, sum(terms) + (math.erfc(math.sqrt(half)) if odd else 0.0))


def excess(tried: tuple[int, int], baseline: tuple[int, int]) -> float:
    """The chance of this many divergences or more, if both kinds are equally likely per token."""
    count, total = tried[0], tried[0] + baseline[0]
    share = tried[1] / max(1, tried[1] + baseline[1])
    tail = (math.comb(total, k) * share**k * (1 - share) ** (total - k) for k in range(count))
    return max(0.0, 1.0 - sum(tail))
