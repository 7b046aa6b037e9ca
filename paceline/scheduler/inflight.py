"""What the host knows of each slot while results are unknown: committed tokens and two bounds.

Never the truth about a running request: that lives on the device (state/slots.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.step import Bools, Ints, RunnerInfo, StepPlan, StepResult

NOBODY = -1
FOREVER = 2**31 - 1
Rows = npt.NDArray[np.intp]  # indices: what numpy gathers with fastest


@dataclass(slots=True)
class Flight:
    """A launched step, as the host remembers it until its result is there."""

    plan: StepPlan
    slots: Rows  # slot of each row; the table's nobody row once the request has left it
    samples_S: Bools  # slots that gain between 1 …
    width_S: Ints  # … and this many tokens
    strays: list[int] = field(default_factory=list)  # rows whose requests have left their slots


class SlotTable:
    """Per-slot arrays. For a request in slot s, with n its true number of tokens on the device:

    committed_S[s] <= lower_S[s] <= n <= upper_S[s], until the device ends the request. In every
    sampling step in flight a row gains at least one token (lower) and at most 1 + k_i (upper).

    Arrays have one row more than there are slots: results of requests that left their slots
    land there, so that no row of a result needs to be picked out before it is added.
    """

    def __init__(self, info: RunnerInfo) -> None:
        self.num_slots = slots = info.num_slots
        self.uid_S = np.full(slots + 1, NOBODY, np.int64)
        self._committed_S = np.zeros(slots + 1, np.int32)
        self.committed_S = self._committed_S[:-1]
        # Over the sampling steps in flight: how many there are, and their widths summed up.
        self._num_sampling_S = np.zeros(slots, np.int32)
        self._width_S = np.zeros(slots, np.int32)
        # The last position a token may come to lie at, from the launch of the last prefill chunk
        # on; else -1: a slot decodes while its lower bound is not above.
        self.last_S = np.full(slots, -1, np.int32)
        # The length a decoding row may reach within its pages (and the drafter's lookahead).
        self.page_room_S = np.full(slots, FOREVER, np.int32)
        # Host mirror of committed tokens; a window may end past max_model_len before it is cut.
        self.tokens_SL = np.empty((slots + 1, info.max_model_len + info.max_k + 1), np.int32)
        self.in_flight: deque[Flight] = deque()
        self._tokens_flat = self.tokens_SL.reshape(-1)
        self._row_start_S = np.arange(slots + 1, dtype=np.int64) * self.tokens_SL.shape[1]
        self._offsets_W = np.arange(info.max_k + 1, dtype=np.int64)

    @property
    def lower_S(self) -> Ints:
        return self.committed_S + self._num_sampling_S

    @property
    def upper_S(self) -> Ints:
        return self.committed_S + self._width_S

    def occupy(self, slot: int, uid: int, tokens: Ints) -> None:
        """A request takes the slot with these tokens, all still to be computed or cached."""
        assert self.uid_S[slot] == NOBODY, f"slot {slot} belongs to request {self.uid_S[slot]}"
        length = len(tokens)
        self.uid_S[slot] = uid
        self.committed_S[slot] = length
        self._num_sampling_S[slot] = self._width_S[slot] = 0
        self.tokens_SL[slot, :length] = tokens

    def vacate(self, slot: int) -> int:
        """The slot is free at once. Returns how many of its rows are still in flight."""
        assert self.uid_S[slot] != NOBODY, f"slot {slot} is free already"
        self.uid_S[slot] = NOBODY
        self.last_S[slot] = -1
        self.page_room_S[slot] = FOREVER
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

    def committed_tokens(self, slot: int) -> Ints:
        return self.tokens_SL[slot, : self.committed_S[slot]].copy()

    def launch(self, flight: Flight) -> None:
        """Bounds move when a step is launched, before anybody knows what it did."""
        self._num_sampling_S += flight.samples_S
        self._width_S += flight.width_S
        self.in_flight.append(flight)

    def commit(self, flight: Flight, result: StepResult) -> None:
        """The oldest step's result is there: what it promised gives way to what it did."""
        assert self.in_flight[0] is flight, "results out of order"
        self.in_flight.popleft()
        slots = flight.slots
        committed_B = self._committed_S.take(slots)
        # Cells past the count hold -1 and are overwritten before anybody reads them.
        at_B = self._row_start_S.take(slots)
        at_B += committed_B
        width = result.token_BW.shape[1]
        self._tokens_flat[at_B[:, None] + self._offsets_W[:width]] = result.token_BW
        committed_B += result.count_B
        self._committed_S[slots] = committed_B
        self._committed_S[self.num_slots] = 0
        self._num_sampling_S -= flight.samples_S
        self._width_S -= flight.width_S
