"""Which fixed shape a plan runs in: buckets of rows, tokens and drafts. Arithmetic only.

A plan takes the smallest shape that holds it; shapes up to the largest bucket are captured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paceline.kernels.step_rows import StepShape
from paceline.step import Ints, StepPlan, StepSize

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Steps with prompt chunks: rows cost little there, and tokens cost much.
MIXED_ROWS = (4, 16, 64, 256, 512)
MIXED_TOKENS = (
    *(32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048),
    *(2560, 3072, 4096, 5120, 6144, 8192, 10240, 12288, 16384),
)
EAGER_TOKENS = 64  # larger steps run eagerly, with tokens rounded up to a multiple of this
# Above this product of tokens and weight bytes, GPU time exceeds launch time: a graph would only
# cost memory.
FEWEST_CAPTURED, HOST_BOUND = 2048, 2048 * 16e9


@dataclass(frozen=True, slots=True)
class Buckets:
    """The shapes of one engine."""

    rows: tuple[int, ...]
    mixed_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    # 0, the drafter's K, smaller ones for "auto", and the host's where that is larger.
    k_tiers: tuple[int, ...]
    max_k: int  # the drafter's: larger tiers are captured when host drafts have been met
    has_draft_model: bool = False  # its first pass is wider behind drafts of the host

    @classmethod
    def of(
        cls,
        max_rows: int,
        max_tokens: int,
        max_k: int,
        weight_bytes: int | None = None,
        window_k: int = 0,
        k_tiers: tuple[int, ...] = (),
        *,
        has_draft_model: bool = False,
    ) -> Buckets:
        """Without `weight_bytes` only steps of few tokens are captured, as for a large model.
        `window_k`: the most drafts of a row, if the host proposes more than the drafter.
        `k_tiers`: more widths, up to the drafter's."""
        most = FEWEST_CAPTURED
        if weight_bytes is not None:
            most = max(most, min(int(HOST_BOUND / weight_bytes), MIXED_TOKENS[-1]))
        tokens = tuple(t for t in MIXED_TOKENS if t < max_tokens and t <= most)
        return cls(
            rows=_up_to(ROWS, max_rows),
            mixed_rows=_up_to(MIXED_ROWS, max_rows),
            mixed_tokens=(*tokens, max_tokens) if max_tokens <= most else tokens,
            k_tiers=tuple(sorted({0, *k_tiers, max_k, max(max_k, window_k)})),
            max_k=max_k,
            has_draft_model=has_draft_model,
        )

    def shape_of(self, step_size: StepSize) -> StepShape:
        """The smallest shape with room for it; above the largest bucket, its size rounded up."""
        k = self.k_tiers[bisect_left(self.k_tiers, step_size.k)]
        if step_size.is_uniform:
            rows = _at_least(self.rows, max(step_size.rows, 1))
            return self._uniform(rows, k, has_host_drafts=step_size.has_host_drafts)
        rows = _at_least(self.mixed_rows, step_size.rows)
        index = bisect_left(self.mixed_tokens, step_size.tokens)
        if index < len(self.mixed_tokens):
            return StepShape(rows, self.mixed_tokens[index], k, False)
        return StepShape(rows, -(-step_size.tokens // EAGER_TOKENS) * EAGER_TOKENS, k, False)

    def is_captured(self, shape: StepShape) -> bool:
        """False for shapes above the largest bucket."""
        return shape.is_uniform or shape.tokens in self.mixed_tokens

    def decode_shapes(self, k: int) -> Iterator[StepShape]:
        """Largest first: its memory serves all that follow."""
        for rows in reversed(self.rows):
            yield self._uniform(rows, k, has_host_drafts=k > self.max_k)

    def _uniform(self, rows: int, k: int, *, has_host_drafts: bool) -> StepShape:
        is_wide = self.has_draft_model and has_host_drafts
        return StepShape(rows, rows * (k + 1), k, True, k + 2 if is_wide else 2)

    def mixed_shapes(self, k: int) -> Iterator[StepShape]:
        for tokens in reversed(self.mixed_tokens):
            for rows in reversed(self.mixed_rows):
                if rows <= tokens:
                    yield StepShape(rows, tokens, k, False)


def row_starts(plan: StepPlan, shape: StepShape) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The first token entry of each row of the plan."""
    if shape.is_uniform:
        return np.arange(plan.num_rows) * shape.width
    return np.cumsum(plan.query_len_B) - plan.query_len_B


def draft_rows(plan: StepPlan, shape: StepShape) -> tuple[Ints, Ints]:
    """The first entry of each row in a draft model's own first pass, and the most it may have."""
    length_B = plan.draft_len_B
    if shape.is_uniform:
        return np.arange(plan.num_rows, dtype=np.int32) * shape.own_width, length_B
    return np.cumsum(length_B, dtype=np.int32) - length_B, length_B


def _up_to(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    return (*(s for s in sizes if s < most), most)


def _at_least(sizes: tuple[int, ...], count: int) -> int:
    return sizes[bisect_left(sizes, count)]
