"""How many drafts each request should verify: k follows the request's own acceptance.

Never changes tokens, only how many drafts a step looks at. Rejected drafts lower k; a drafter
that proposed nothing does not, because nothing was computed for it.
"""

from __future__ import annotations

import numpy as np

from paceline.config import SpeculativeConfig
from paceline.scheduler.inflight import Rows
from paceline.step import Ints, RunnerInfo, StepPlan, StepResult

START = 0.5  # acceptance assumed of a new request
WEIGHT = 0.25  # of the newest step in the average
STRETCH = 1.5  # verify somewhat more drafts than the average accepts, so that k can grow
COLD = 0.1  # below this acceptance a row stops drafting
# Rows without drafts try again in two steps of every PROBE_PERIOD, all in the same ones: the
# first proposes, the second verifies, and the others can do without the drafter.
PROBE_PERIOD = 32
PROBE_K = 2


class DraftLengths:
    """k by slot."""

    def __init__(self, info: RunnerInfo, speculative: SpeculativeConfig | None) -> None:
        self.max_k = info.max_k
        self._is_adaptive = bool(info.max_k and speculative and speculative.adaptive)
        self._cap_S = np.zeros(info.num_slots, np.int32)  # the request's own limit
        self._k_S = np.zeros(info.num_slots, np.int32)
        self._acceptance_S = np.zeros(info.num_slots, np.float32)

    def start(self, slot: int, wanted: int | None) -> None:
        """A request takes the slot."""
        cap = self.max_k if wanted is None else min(wanted, self.max_k)
        self._cap_S[slot] = self._k_S[slot] = cap
        self._acceptance_S[slot] = START

    def wanted(self, slot_B: Rows, step: int) -> Ints:
        """k of each row for this step."""
        k_B: Ints = self._k_S[slot_B]
        if self._is_adaptive and step % PROBE_PERIOD < 2:
            np.maximum(k_B, np.minimum(self._cap_S[slot_B], PROBE_K), out=k_B)
        return k_B

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """Rows that verified drafts say how many were right; all still own their slots."""
        if not self._is_adaptive:
            return
        rows = np.flatnonzero(result.num_drafts_B)
        if not len(rows):
            return
        slots = plan.slot_B[rows]
        rate = result.num_accepted_B[rows] / result.num_drafts_B[rows]
        acceptance = self._acceptance_S[slots]
        acceptance += WEIGHT * (rate - acceptance)
        self._acceptance_S[slots] = acceptance
        cap = self._cap_S[slots]
        k = np.minimum(np.ceil(acceptance * (STRETCH * self.max_k)), cap)
        self._k_S[slots] = np.where(acceptance < COLD, 0, k)
