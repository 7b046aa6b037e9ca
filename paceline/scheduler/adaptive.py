"""Adaptive speculation: k of each request follows its own acceptance rate.

Changes how many drafts a step verifies, never the distribution of tokens. Rejected drafts lower k.
Missing drafts (the drafter proposed none) lower k only if steps have fixed shapes, because then
the row was computed for them all the same.
"""

from __future__ import annotations

import numpy as np

from paceline.config import SpeculativeConfig
from paceline.scheduler.inflight import Rows
from paceline.step import Ints, RunnerInfo, StepResult

# Acceptance is the ratio of two decaying sums. A new request starts with sums that keep k at its
# maximum.
START_DRAFTED = 6.0
START_ACCEPTED = 4.0
FADE = 0.5  # the sums are multiplied by this each time k is decided
DECIDE_EVERY = 4  # steps
STRETCH = 1.5  # verify more drafts than are accepted on average, so that k can grow
COLD = 0.1  # below this acceptance rate a request stops drafting
# Requests that stopped try again in the first two steps of every PROBE_PERIOD: the first step
# proposes, the second verifies. All of them try in the same steps, so that the drafter can be left
# out of the others.
PROBE_PERIOD = 32
PROBE_K = 2


class DraftLengths:
    """k by slot."""

    def __init__(self, info: RunnerInfo, speculative: SpeculativeConfig | None) -> None:
        rows = info.num_slots + 1  # with the spare row: see SlotTable
        self.max_k = info.max_k
        self._counts_missing = info.pays_for_missing_drafts
        self._is_adaptive = (
            info.max_k > 0
            and speculative is not None
            and speculative.adaptive
            # Synthetic acceptance does not depend on the drafts, and has its mean over all K.
            and speculative.rejection_sample_method == "standard"
        )
        self._cap_S = np.zeros(info.num_slots, np.int32)  # the request's own limit
        self._k_S = np.zeros(info.num_slots, np.int32)
        self._drafted_S = np.ones(rows, np.float32)
        self._accepted_S = np.zeros(rows, np.float32)

    def start(self, slot: int, wanted: int | None) -> None:
        """A request takes the slot."""
        cap = self.max_k if wanted is None else min(wanted, self.max_k)
        self._cap_S[slot] = self._k_S[slot] = cap
        self._drafted_S[slot] = START_DRAFTED
        self._accepted_S[slot] = START_ACCEPTED

    def wanted(self, step: int) -> Ints:
        """k of each slot for this step."""
        if self._is_adaptive and step % PROBE_PERIOD < 2:
            return np.maximum(self._k_S, np.minimum(self._cap_S, PROBE_K))
        return self._k_S

    def learn(self, slots: Rows, k_B: Ints, result: StepResult) -> None:
        """Count the drafts that a step verified and accepted."""
        if not self._is_adaptive:
            return
        self._drafted_S[slots] += k_B if self._counts_missing else result.num_drafts_B
        self._accepted_S[slots] += result.num_accepted_B
        if result.step % DECIDE_EVERY == 0:
            self._decide()

    def _decide(self) -> None:
        acceptance_S = self._accepted_S[:-1] / self._drafted_S[:-1]
        k_S = np.ceil(acceptance_S * (STRETCH * self.max_k))
        k_S *= acceptance_S >= COLD
        np.minimum(k_S, self._cap_S, out=self._k_S, casting="unsafe")
        # Sums at or below the starting value do not decay: a single draft after a long pause must
        # not decide k alone.
        fades_S = self._drafted_S > START_DRAFTED
        scale_S = np.where(fades_S, np.float32(FADE), np.float32(1.0))
        self._drafted_S *= scale_S
        self._accepted_S *= scale_S
