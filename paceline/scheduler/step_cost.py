"""How long a step takes by what it computes, measured in service; and which drafts pay for it.

Host side, plain numbers: it sees sizes and times of committed steps, never a token.

Shape letters: R rows that sample, K drafts, F features of a step's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.step import Floats

Doubles = npt.NDArray[np.float64]

# Time grows with each of these: a constant, tokens, tokens beyond each knot, draft passes, drafts
# that they make, KV tokens. So the fit is monotone and, in tokens, piecewise linear and convex.
KNOTS = (8.0, 32.0, 128.0, 512.0, 2048.0)
# Shares before any step was measured, against the constant. Fixed shapes mean a GPU, where few
# tokens cost nearly nothing.
_PRIOR = (1.0, 0.08, *(0.01,) * len(KNOTS), 0.03, 0.01, 2e-5)
_PRIOR_FIXED = (1.0, 0.001, *(0.001,) * len(KNOTS), 0.05, 1e-4, 1e-6)
_TRUST = 0.05  # how many measured steps the prior of a share weighs as much as
_FADE = 0.995  # of older steps, at each new one
_LEAST_RATIO, _MOST_RATIO = 0.25, 2.5  # a time that is farther off what was expected is cut
_FIT_EVERY = 8  # steps


class StepCost:
    """Times of steps: a fit with non-negative shares to the steps of the last minutes.

    Errors are relative to the expected time, so that small steps count as much as large ones.
    """

    def __init__(self, *, is_fixed: bool = False) -> None:
        self._prior_F: Doubles = np.array(_PRIOR_FIXED if is_fixed else _PRIOR)
        self._share_F: Doubles = np.ones(len(_PRIOR))  # against the prior
        self._gram_FF: Doubles = np.eye(len(_PRIOR)) * _TRUST
        self._moment_F: Doubles = np.full(len(_PRIOR), _TRUST)
        self._unit_s = 0.0  # seconds of the prior's constant; 0: nothing was measured
        self.num_measured = 0

    def measured(self, seconds: float, tokens: int, k: int, drafts: int, kv_tokens: int) -> None:
        """A step of this size, with k draft passes that made `drafts`, took so long."""
        if seconds <= 0.0:
            return
        beyond = (max(tokens - knot, 0.0) for knot in KNOTS)  # the row that _sizes makes, faster
        size_F = np.array([1.0, tokens, *beyond, k, drafts, kv_tokens]) * self._prior_F
        if not self._unit_s:
            self._unit_s = seconds / float(size_F.sum())
        expected = float(size_F @ self._share_F) or 1.0
        ratio = min(max(seconds / (self._unit_s * expected), _LEAST_RATIO), _MOST_RATIO)
        size_F /= expected
        # What fades of the prior is replaced by the last fit: it keeps shares that no step shows.
        prior = _TRUST * (1.0 - _FADE)
        self._gram_FF *= _FADE
        self._gram_FF += size_F[:, None] * size_F
        self._gram_FF.flat[:: len(size_F) + 1] += prior
        self._moment_F *= _FADE
        self._moment_F += size_F * ratio + prior * self._share_F
        self.num_measured += 1
        if self.num_measured <= _FIT_EVERY or self.num_measured % _FIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        """Least squares; shares that would be negative are left out."""
        used = np.arange(len(self._share_F))
        share_F: npt.NDArray[np.floating[Any]] = self._moment_F[:0]
        while len(used):
            share_F = np.linalg.solve(self._gram_FF[np.ix_(used, used)], self._moment_F[used])
            if (share_F >= 0.0).all():
                break
            used = used[share_F > 0.0]
        self._share_F[:] = 0.0
        self._share_F[used] = share_F

    def times(self, tokens_N: Any, k: int, drafts_N: Any, kv_tokens: int = 0) -> Doubles:
        """Time of steps of these sizes; in seconds once a step was measured."""
        size_NF = self._sizes(np.asarray(tokens_N), k, drafts_N, kv_tokens)
        return size_NF @ self._share_F * (self._unit_s or 1.0)

    def of_one_more(self, tokens: int) -> float:
        """Time that one more token adds to a step of this many."""
        before, after = self.times([tokens, tokens + 1], 0, 0).tolist()
        return float(after - before)

    def _sizes(self, tokens_N: Any, k: int, drafts_N: Any, kv_tokens: int) -> Doubles:
        size_NF = np.empty((len(tokens_N), len(self._prior_F)))
        size_NF[:, 0] = 1.0
        size_NF[:, 1] = tokens_N
        for f, knot in enumerate(KNOTS, 2):
            size_NF[:, f] = np.maximum(tokens_N - knot, 0.0)
        size_NF[:, -3], size_NF[:, -2], size_NF[:, -1] = k, drafts_N, kv_tokens
        return size_NF * self._prior_F


class Choice(NamedTuple):
    """What a batch of rows verifies."""

    k: int  # the most drafts of a row
    least: float  # drafts with this survival or more, among the first k, are verified
    rate: float  # expected tokens per unit of time

    def of(self, survival_RK: Floats) -> npt.NDArray[np.int64]:
        """Drafts of each row. Survival falls along a row, so these are its first ones."""
        counts_R: npt.NDArray[np.int64] = (survival_RK[:, : self.k] >= self.least).sum(axis=1)
        return counts_R


def choose(
    survival_RK: Floats,
    cost: StepCost,
    ks: Sequence[int],
    kv_tokens: int = 0,
    *,
    base: tuple[float, float] | None = None,
    is_padded: bool = False,
) -> Choice:
    """The drafts with the most expected tokens per time. `survival_RK` is the chance that a draft
    and all before it are accepted; 0: not allowed.

    A draft is admitted if its survival, times the time that a token is worth, exceeds what it adds
    to the step. `ks` are the possible numbers of draft passes, 0 first. `base`: tokens that the
    step computes and emits without these drafts, if not one of each row. `is_padded`: all rows are
    as wide as the widest, so the drafts of narrower ones are free.
    """
    rows = len(survival_RK)
    computed, emitted = base or (rows, rows)
    # Time by the number of admitted drafts; passes are added below.
    drafts_N = np.arange(survival_RK.size + 1)
    time_N = cost.times(computed + drafts_N, 0, drafts_N, kv_tokens)
    per_pass = float(cost.times([rows], 1, 0)[0] - cost.times([rows], 0, 0)[0])
    best = Choice(0, 1.0, emitted / float(time_N[0]))
    # No draft costs less than the first one and its share of a pass.
    if survival_RK.max() <= best.rate * (time_N[1] - time_N[0] + per_pass / rows):
        return best
    for k in ks[1:]:
        if is_padded:
            least_N: Any = np.array([_LEAST])
            gain_N: Any = survival_RK[:, :k].sum()
            own_N = time_N[[rows * k]]
        else:
            least_N = np.sort(survival_RK[:, :k], axis=None)[::-1]
            least_N = least_N[: np.count_nonzero(least_N >= _LEAST)]
            gain_N = least_N.cumsum(dtype=np.float64)
            own_N = time_N[1 : 1 + len(least_N)]
        if not len(least_N):
            continue
        rate_N = (emitted + gain_N) / (own_N + k * per_pass)
        at = int(rate_N.argmax())
        if rate_N[at] > best.rate:
            best = Choice(k, float(least_N[at]), float(rate_N[at]))
    return best


_LEAST = 1e-6  # a smaller survival is none
