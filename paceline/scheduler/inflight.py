"""What the host knows of each slot while results are unknown: committed tokens and two bounds.

Never the truth about a running request: that lives on the device (state/slots.py).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.step import Ints, RunnerInfo, StepPlan, StepResult

NOBODY = -1
Rows = npt.NDArray[np.intp]  # indices: what numpy gathers with fastest


class SlotTable:
    """Per-slot arrays. For a request in slot s, with n its true number of tokens on the device:

    committed_S[s] <= lower_S[s] <= n <= upper_S[s], until the device ends the request. In every
    sampling step in flight a row gains at least one token (lower) and at most 1 + k_i (upper).
    """

    def __init__(self, info: RunnerInfo) -> None:
        slots = info.num_slots
        self.uid_S = np.full(slots, NOBODY, np.int64)
        self.committed_S = np.zeros(slots, np.int32)
        self.lower_S = np.zeros(slots, np.int32)
        self.upper_S = np.zeros(slots, np.int32)
        self.max_len_S = np.zeros(slots, np.int32)
        self.is_decoding_S = np.zeros(slots, np.bool_)  # every prefill chunk has been launched
        # Positions that the slot's pages can hold, and the most it may ever need.
        self.page_room_S = np.zeros(slots, np.int32)
        self.page_need_S = np.zeros(slots, np.int32)
        # The committed length from which on another full page can be hashed.
        self.hash_at_S = np.zeros(slots, np.int32)
        # Host mirror of committed tokens; a window may end past max_model_len before it is cut.
        self.tokens_SL = np.empty((slots, info.max_model_len + info.max_k + 1), np.int32)
        self._tokens_flat = self.tokens_SL.reshape(-1)
        self._row_start_S = np.arange(slots, dtype=np.int64) * self.tokens_SL.shape[1]
        self._offsets_W = np.arange(info.max_k + 1, dtype=np.int64)

    def occupy(self, slot: int, uid: int, tokens: Ints, max_len: int) -> None:
        """A request takes the slot with these tokens, all still to be computed or cached."""
        assert self.uid_S[slot] == NOBODY, f"slot {slot} belongs to request {self.uid_S[slot]}"
        self.uid_S[slot] = uid
        self.committed_S[slot] = self.lower_S[slot] = self.upper_S[slot] = len(tokens)
        self.max_len_S[slot] = max_len
        self.is_decoding_S[slot] = False
        self.tokens_SL[slot, : len(tokens)] = tokens

    def vacate(self, slot: int) -> None:
        """The slot is free at once."""
        assert self.uid_S[slot] != NOBODY, f"slot {slot} is free already"
        self.uid_S[slot] = NOBODY
        self.is_decoding_S[slot] = False

    def committed_tokens(self, slot: int) -> Ints:
        return self.tokens_SL[slot, : self.committed_S[slot]].copy()

    def launch(self, slot_B: Rows, width_B: Ints | int) -> None:
        """A step in which these rows sample, at most `width_B` tokens each, was launched."""
        self.lower_S[slot_B] += 1
        self.upper_S[slot_B] += width_B

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """A result of rows that all still own their slots."""
        slot_B, count_B = plan.slot_B, result.count_B
        committed_B = self.committed_S[slot_B]
        # Cells past the count hold -1 and are overwritten before anybody reads them.
        width = result.token_BW.shape[1]
        start_B = self._row_start_S[slot_B]
        start_B += committed_B
        self._tokens_flat[start_B[:, None] + self._offsets_W[:width]] = result.token_BW
        committed_B += count_B
        self.committed_S[slot_B] = committed_B
        samples_B = plan.samples_B
        self.lower_S[slot_B] += count_B - samples_B
        self.upper_S[slot_B] += count_B - (1 + plan.k_B) * samples_B
