"""From rounds to figures: medians, spread, ratios per round, and the required ratios.

Pure arithmetic; runs nothing and prints nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Spread:
    """The median of several values, and the smallest and largest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def text(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}..{self.high:.{digits}f})"


@dataclass(frozen=True)
class Bar:
    """A ratio ours / theirs and its requirement; without `must` it is only reported.

    Several names in `theirs` are variants of one peer: the better median counts.
    """

    ours: str
    theirs: tuple[str, ...]
    must: float | None = None
    reach: float | None = None
    lower_is_better: bool = False

    def limit_text(self, limit: float | None) -> str:
        if limit is None:
            return "-"
        return f"{'<=' if self.lower_is_better else '>='} {limit}"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    bar: Bar
    theirs: str  # the variant that counts
    ratio: Spread
    ours_median: float
    theirs_median: float

    @property
    def verdict(self) -> str:
        if self.bar.must is None:
            return "said"
        if not self._holds(self.bar.must):
            return "miss"
        if self.bar.reach is not None and self._holds(self.bar.reach):
            return "PASS, reached"
        return "PASS"

    def _holds(self, limit: float) -> bool:
        ratio = self.ratio.median
        return ratio <= limit if self.bar.lower_is_better else ratio >= limit

    def record(self) -> dict[str, Any]:
        return {
            "ours": self.bar.ours,
            "theirs": self.theirs,
            "ratio": asdict(self.ratio),
            "must": self.bar.must,
            "reach": self.bar.reach,
            "lower_is_better": self.bar.lower_is_better,
            "verdict": self.verdict,
        }


def judge(bar: Bar, values: Mapping[str, Sequence[float]]) -> Row | None:
    """None if one side did not run. `values` holds one figure per round and contender.

    Ratios are taken per round, because both sides of a round ran under the same conditions.
    """
    present = [name for name in bar.theirs if name in values]
    if bar.ours not in values or not present:
        return None
    pick = min if bar.lower_is_better else max
    theirs = pick(present, key=lambda name: median(values[name]))
    ours = values[bar.ours]
    ratios = [a / b for a, b in zip(ours, values[theirs], strict=True)]
    return Row(bar, theirs, Spread.of(ratios), median(ours), median(values[theirs]))


def same_answers(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> str:
    """`9/10`: how many answers are equal token by token."""
    equal = sum(list(a) == list(b) for a, b in zip(ours, theirs, strict=True))
    return f"{equal}/{len(ours)}"


def table(cells: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first line is the head."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
