"""The host's view of each slot while steps are in flight: committed tokens and length bounds.

The true lengths live on the device (state/slots.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.step import NO_REQUEST, Bools, Ints, RunnerInfo, StepPlan, StepResult

UNLIMITED = 2**31 - 1
Rows = npt.NDArray[np.intp]  # indices in the type that numpy gathers fastest with


@dataclass(slots=True)
class Flight:
    """A launched step whose result has not been committed."""

    plan: StepPlan
    slots: Rows  # slot of each row; the table's spare row once the request has left its slot
    samples_S: Bools  # slots that gain at least one token in this step ...
    width_S: Ints  # ... and at most this many
    strays: list[int] = field(default_factory=list)  # rows whose requests have left their slots
    fresh_pages: list[int] = field(default_factory=list)  # cached from its launch on
    fresh_snapshots: list[int] = field(default_factory=list)  # the same: chain values
    is_forced_R: list[bool] = field(default_factory=list)  # of the plan's host drafts


class SlotTable:
    """Per-slot arrays. Let n be the true number of tokens of the request in slot s. Then

    committed_S[s] <= lower_S[s] <= n <= upper_S[s], until the device ends the request. In every
    sampling step in flight a row gains at least one token (lower) and at most 1 + k_i (upper).

    Arrays that take results have one spare row behind the slots. Results of requests that have
    left their slots are added there, so that a result is added whole, without selecting rows.
    """

    def __init__(self, info: RunnerInfo) -> None:
        self.num_slots = slots = info.num_slots
        self.uid_S = np.full(slots + 1, NO_REQUEST, np.int64)
        self.all_committed_S = np.zeros(slots + 1, np.int32)  # with the spare row
        self.committed_S = self.all_committed_S[:-1]
        # Over the sampling steps in flight: their number, and the sum of their widths.
        self._num_sampling_S = np.zeros(slots, np.int32)
        self._width_S = np.zeros(slots, np.int32)
        # From the launch of the last prompt chunk on: the last position that a token may take.
        # Before, and in free slots: -1. A slot decodes while lower_S <= last_S.
        self.last_S = np.full(slots, -1, np.int32)
        # The length that a decoding row can reach with its pages, drafter lookahead included.
        self.page_room_S = np.full(slots, UNLIMITED, np.int32)
        # Host copy of committed tokens. Cells past the count of a result are written too, so a
        # row has room for a whole window past max_model_len.
        self.tokens_SL = np.empty((slots + 1, info.max_model_len + info.window_k + 1), np.int32)
        self.in_flight: deque[Flight] = deque()
        self._tokens_flat = self.tokens_SL.reshape(-1)
        self._row_start_S = np.arange(slots + 1, dtype=np.int64) * self.tokens_SL.shape[1]
        self._offsets_W = np.arange(info.window_k + 1, dtype=np.int64)

    @property
    def lower_S(self) -> Ints:
        return self.committed_S + self._num_sampling_S

    @property
    def upper_S(self) -> Ints:
        return self.committed_S + self._width_S

    def occupy(self, slot: int, uid: int, tokens: Ints) -> None:
        """A request takes the slot. `tokens` are all that it has."""
        assert self.uid_S[slot] == NO_REQUEST, f"slot {slot} belongs to request {self.uid_S[slot]}"
        length = len(tokens)
        self.uid_S[slot] = uid
        self.committed_S[slot] = length
        self._num_sampling_S[slot] = self._width_S[slot] = 0
        self.tokens_SL[slot, :length] = tokens

    def vacate(self, slot: int) -> int:
        """Free the slot now. Returns how many of its rows are still in flight."""
        assert self.uid_S[slot] != NO_REQUEST, f"slot {slot} is free already"
        self.uid_S[slot] = NO_REQUEST
        self.last_S[slot] = -1
        self.page_room_S[slot] = UNLIMITED
        num_strays = 0
        for flight in self.in_flight:
            rows = (flight.slots == slot).nonzero()[0]
            if len(rows):
                flight.slots[rows] = self.num_slots
                flight.strays.append(int(rows[0]))
                flight.samples_S[slot] = False
                flight.width_S[slot] = 0
                num_strays += 1
        return num_strays

    def length(self, slot: int) -> int:
        """Committed tokens."""
        return int(self.committed_S[slot])

    def committed_tokens(self, slot: int) -> Ints:
        return self.tokens_SL[slot, : self.committed_S[slot]].copy()

    def launch(self, flight: Flight) -> None:
        """The bounds change at the launch, before the result is known."""
        self._num_sampling_S += flight.samples_S
        self._width_S += flight.width_S
        self.in_flight.append(flight)

    def commit(self, flight: Flight, result: StepResult) -> None:
        """Replace the bounds of the oldest step by what it did."""
        assert self.in_flight[0] is flight, "results out of order"
        self.in_flight.popleft()
        slots = flight.slots
        committed_B = self.all_committed_S.take(slots)
        # Cells past the count get -1 and are overwritten before they are read.
        at_B = self._row_start_S.take(slots)
        at_B += committed_B
        width = result.token_BW.shape[1]
        self._tokens_flat[at_B[:, None] + self._offsets_W[:width]] = result.token_BW
        committed_B += result.count_B
        self.all_committed_S[slots] = committed_B
        self.all_committed_S[self.num_slots] = 0
        self._num_sampling_S -= flight.samples_S
        self._width_S -= flight.width_S
