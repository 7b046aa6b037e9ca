"""How many drafts each request should verify: k follows the request's own acceptance.

Never changes the distribution of tokens, only how many drafts a step looks at. Rejected drafts
lower k. A drafter that proposed nothing does not, where nothing was computed for it; with fixed
shapes the row was computed all the same, and a missing draft counts as a wrong one.
"""

from __future__ import annotations

import numpy as np

from paceline.config import SpeculativeConfig
from paceline.scheduler.inflight import Rows
from paceline.step import Ints, RunnerInfo, StepResult

# Acceptance is a ratio of two fading sums. A new request gets the benefit of the doubt: as many
# accepted drafts as keep its k.
START_DRAFTED = 6.0
START_ACCEPTED = 4.0
FADE = 0.5  # of the sums, each time k is decided again
DECIDE_EVERY = 4  # steps
STRETCH = 1.5  # verify somewhat more drafts than the average accepts, so that k can grow
COLD = 0.1  # below this acceptance a row stops drafting
# Rows without drafts try again in two steps of every PROBE_PERIOD, all in the same ones: the
# first proposes, the second verifies, and the others can do without the drafter.
PROBE_PERIOD = 32
PROBE_K = 2


class DraftLengths:
    """k by slot."""

    def __init__(self, info: RunnerInfo, speculative: SpeculativeConfig | None) -> None:
        rows = info.num_slots + 1  # one for rows whose requests left their slots
        self.max_k = info.max_k
        self._counts_missing = info.pays_for_missing_drafts
        self._is_adaptive = (
            info.max_k > 0
            and speculative is not None
            and speculative.adaptive
            # Coins say nothing about the drafts, and keep their mean only over all K of them.
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
        """Rows that had room for k drafts say how many there were and how many were right."""
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
        # The prior fades with the rest, but a sum of drafts never fades to nothing: one lucky or
        # unlucky draft after a long silence must not decide alone.
        fades_S = self._drafted_S > START_DRAFTED
        scale_S = np.where(fades_S, np.float32(FADE), np.float32(1.0))
        self._drafted_S *= scale_S
        self._accepted_S *= scale_S
