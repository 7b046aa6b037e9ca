"""Continuations that the host proposes for running requests: forced tokens, or looked up ones.

They travel as host drafts of a plan. Verification decides: a wrong one costs time, no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.scheduler.inflight import Flight, Rows, SlotTable
from paceline.step import HostDrafts, Ints, Longs, RunnerInfo


class Offers(NamedTuple):
    """New continuations of many slots; see Continuations.offer."""

    slot_R: Rows
    length_R: Longs
    token_RC: Ints  # -1 after the end
    end_R: Longs  # the length at which each ends; 0: none
    most_R: Longs
    least_R: Longs


class Continuations:
    """At most one for each slot, until it is replaced, used up or found wrong."""

    def __init__(self, info: RunnerInfo, table: SlotTable) -> None:
        self.most = info.max_host_drafts  # drafts of a row
        # One step in flight may emit a whole window before the drafts of the next one are taken.
        self.longest = 2 * self.most + 1
        self._table = table
        slots = info.num_slots
        self._token_SC = np.full((slots, self.longest), -1, np.int32)
        self._length_S = np.zeros(slots, np.int32)  # tokens of the request before it
        self._end_S = np.zeros(slots, np.int32)  # the length at which it ends; 0: none
        self._most_S = np.zeros(slots, np.int32)
        self._least_S = np.ones(slots, np.int32)
        self._is_forced_S = np.zeros(slots, np.bool_)
        self._has_forced = False  # some slot had forced tokens

    @property
    def is_on(self) -> bool:
        return self.most > 0

    def __bool__(self) -> bool:
        return bool(self._end_S.any())

    def offer(
        self,
        slot: int,
        length: int,
        tokens: Sequence[int],
        *,
        is_forced: bool = False,
        most: int | None = None,
        least: int = 1,
    ) -> None:
        """Replace the slot's continuation, which follows the first `length` tokens of its request.
        Without tokens it has none. At most `most` of them are drafts of one step, and none if
        fewer than `least` are left."""
        if not self.most or not len(tokens):
            self._end_S[slot] = 0
            return
        count = min(len(tokens), self.longest)
        row_C = self._token_SC[slot]
        row_C[:count] = tokens[:count]
        row_C[count:] = -1
        self._length_S[slot], self._end_S[slot] = length, length + count
        self._most_S[slot] = self.most if most is None else min(most, self.most)
        self._least_S[slot], self._is_forced_S[slot] = least, is_forced
        self._has_forced |= is_forced

    def offer_all(self, offers: Offers) -> None:
        """Replace the continuations of these slots, except forced tokens."""
        if self._has_forced:
            is_forced_R = self._is_forced_S[offers.slot_R]
            is_forced_R &= self._end_S[offers.slot_R] > offers.length_R
            free: list[Any] = [x[~is_forced_R] for x in offers]
            offers = Offers(*free)
        slot_R = offers.slot_R
        self._token_SC[slot_R] = offers.token_RC
        self._length_S[slot_R], self._end_S[slot_R] = offers.length_R, offers.end_R
        self._most_S[slot_R], self._least_S[slot_R] = offers.most_R, offers.least_R
        self._is_forced_S[slot_R] = False

    def drop(self, slot: int) -> None:
        self._end_S[slot] = 0

    def drop_looked_up(self, slot_R: Rows) -> None:
        if self._has_forced:
            slot_R = slot_R[~self._is_forced_S[slot_R]]
        self._end_S[slot_R] = 0

    # ---- planning

    def widen(self, k_S: Ints, left_S: Ints, spare: int) -> Ints:
        """k of each slot with room for its host drafts. In all, at most `spare` more tokens.

        Each step in flight emits a token at least, so that much of a continuation is over.
        """
        wanted_S = np.minimum(self._end_S - self._table.lower_S, self._most_S)
        more_S = np.maximum(np.minimum(wanted_S, left_S) - k_S, 0)
        if int(more_S.sum()) > spare:
            before_S = np.cumsum(more_S) - more_S
            more_S = np.minimum(more_S, np.maximum(spare - before_S, 0))
        widened_S: Ints = (k_S + more_S).astype(np.int32)
        return widened_S

    def drafts(self, slots: Rows, k_B: Ints) -> tuple[HostDrafts | None, list[bool]]:
        """The host drafts of a plan's rows, and which of them are forced. Continuations that the
        tokens committed meanwhile are not the beginning of are dropped."""
        if not self:
            return None, []
        is_open_B = (self._end_S[slots] > self._table.lower_S[slots]) & (k_B > 0)
        if not is_open_B.any():
            return None, []
        row_R = is_open_B.nonzero()[0]
        slot_R = slots[row_R]
        host = self._host_drafts(row_R, slot_R)
        is_new = (self._table.committed_S[slot_R] == host.length_R).all()
        if not is_new and not (left_R := self._num_left(host, slot_R)).all():
            self._end_S[slots[row_R[left_R == 0]]] = 0
            row_R = row_R[left_R > 0]
            if not len(row_R):
                return None, []
            host = self._host_drafts(row_R, slots[row_R])
        return host, self._is_forced_S[slots[row_R]].tolist()

    def _host_drafts(self, row_R: Rows, slot_R: Rows) -> HostDrafts:
        length_R = self._length_S[slot_R]
        width = int((self._end_S[slot_R] - length_R).max())
        token_RC = self._token_SC[slot_R, :width]
        return HostDrafts(row_R.astype(np.int32), length_R, token_RC, self._least_S[slot_R])

    # ---- results

    def taken(self, flight: Flight) -> Rows:
        """The rows of the oldest step in flight that verify host drafts.

        All results before it are committed, so this is what the device finds. Rows whose requests
        have left their slots are not known any more.
        """
        host = flight.plan.host_drafts
        if host is None:
            return NO_ROWS
        rows: Rows = host.row_R[self._taken(flight, host) > 0].astype(np.intp)
        return rows

    def taken_tokens(self, flight: Flight) -> dict[int, Ints]:
        """Those drafts, by row."""
        host = flight.plan.host_drafts
        if host is None:
            return {}
        left_R = self._taken(flight, host)
        end_R = (host.token_RC >= 0).sum(axis=1)
        return {
            int(host.row_R[r]): host.token_RC[r, end_R[r] - left_R[r] : end_R[r]]
            for r in left_R.nonzero()[0].tolist()
        }

    def _taken(self, flight: Flight, host: HostDrafts) -> Ints:
        slot_R = flight.slots[host.row_R]
        taken_R: Ints = self._num_left(host, slot_R) * (slot_R != self._table.num_slots)
        return taken_R

    def _num_left(self, host: HostDrafts, slot_R: Rows) -> Ints:
        return host.num_left(slot_R, self._table.tokens_SL, self._table.all_committed_S)


NO_ROWS = np.empty(0, np.intp)
