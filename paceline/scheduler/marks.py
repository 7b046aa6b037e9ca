"""Where recurrent state is copied out, and which snapshot a request continues from.

Sees only lengths and bounds; what the device did is known from committed results.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline.scheduler.inflight import UNLIMITED, Flight, SlotTable
from paceline.scheduler.live_request import LiveRequest
from paceline.scheduler.prefix_cache import ROOT, PrefixCache
from paceline.scheduler.snapshots import SnapshotPool, SnapshotStats
from paceline.step import MARKS, RunnerInfo, SnapshotMarks, StepResult

# Registers the request's pages up to a length, and returns the chain value there.
Register = Callable[[LiveRequest, int], int]
Mark = tuple[int, int]  # length, entry
TAIL = 64  # tokens between the snapshots of an output's end


class Marks:
    """Marks are lengths in whole pages: every `interval` tokens, and where lookups end.

    The next turn of a conversation looks up the end of the output, which is not known before. So
    an output has a mark every TAIL tokens too, and its snapshot replaces the one before it.

    A mark in a prompt is passed by a known chunk, so its snapshot is registered when the chunk is
    launched. Other marks are *held*: listed in every plan from the first whose row may pass the
    length until a result shows that it was passed. The state passes a length once, so only one of
    these steps writes the entry.
    """

    def __init__(
        self,
        info: RunnerInfo,
        interval: int | None,
        cache: PrefixCache,
        table: SlotTable,
    ) -> None:
        self.pool = SnapshotPool(info.num_snapshots)
        self._num_hits = self._num_misses = 0
        self._cache = cache
        self._table = table
        self._page_size = info.page_size
        self._interval = interval or -(-512 // info.page_size) * info.page_size
        assert self._interval % info.page_size == 0, f"marks every {self._interval} tokens"
        self._tail = -(-TAIL // info.page_size) * info.page_size
        # A sequence whose marks would take more entries than this gets them at twice the distance.
        self._most = max(info.num_snapshots // 4, 1)
        self._next_S = np.full(info.num_slots, UNLIMITED, np.int32)  # of the output: the next mark
        self._held: dict[int, list[Mark]] = {}  # by slot
        self._passing: dict[int, list[Mark]] = {}  # by slot: registered, this plan's chunk writes

    # ---- hits

    def cut_hit(self, live: LiveRequest, pages: list[int]) -> list[int]:
        """The known pages up to the longest snapshot: one length for all layers."""
        live.num_matched = len(pages) * self._page_size
        for count in range(len(pages), 0, -1):
            chain = self._cache.chain_after(pages[count - 1])
            live.snapshot = self.pool.find(chain)
            if live.snapshot >= 0:
                live.chain = chain
                return pages[:count]
        live.chain, live.snapshot = ROOT, -1
        return []

    def admit(self, live: LiveRequest) -> None:
        """The request continues from what `cut_hit` found."""
        self._num_misses += live.num_matched > live.num_launched
        if live.snapshot >= 0:
            self._num_hits += 1
            self.pool.use(live.chain)

    # ---- placing

    def place(self, live: LiveRequest, length: int, register: Register) -> int:
        """Marks of the request's next chunk. Returns the length of the chunk: it is cut if more
        than MARKS snapshots would be taken in it."""
        start, num_tokens = live.num_launched, len(live.tokens)
        # The page of a mark has a name when the token after it is known too.
        num_known = num_tokens - self._cache.num_successors
        passing: list[Mark] = []
        held: list[Mark] = []
        for at in self._wanted(live, start, start + length):
            if len(passing) + len(held) == MARKS:
                length = max(passing + held)[0] - start
                break
            chain = register(live, at) if at <= num_known else None
            if chain is not None and chain in self.pool:
                continue
            if (entry := self.pool.take()) < 0:
                break
            if chain is None:
                held.append((at, entry))
            else:
                self.pool.keep(chain, entry, is_fresh=True)
                passing.append((at, entry))
        if passing:
            self._passing[live.slot] = passing
        if held:
            self._held[live.slot] = held
        if start + length == num_tokens:
            self._next_S[live.slot] = self._after(num_tokens)
        return length

    def _wanted(self, live: LiveRequest, start: int, end: int) -> list[int]:
        """Lengths in (start, end], ascending. Lookups end at the last page that leaves a token to
        compute, or a page before it where the next token differs and is part of the page's name.
        They also end where this request left the pages of others."""
        num_tokens, size = len(live.tokens), self._page_size
        last = (num_tokens - 1) // size * size
        distance = self._distance(num_tokens)
        lengths = {last, last - size, live.num_matched}
        lengths.update(range(start // distance * distance, end + 1, distance))
        return sorted(at for at in lengths if start < at <= end)

    def _distance(self, length: int) -> int:
        distance = self._interval
        while length // distance > self._most:
            distance *= 2
        return distance

    def _after(self, length: int) -> int:
        """The next mark of an output."""
        distances = (self._distance(length), self._tail)
        return min((length // distance + 1) * distance for distance in distances)

    def _extend(self) -> None:
        """Hold marks that a row may pass for the first time. A mark that gets no entry now could
        be passed without one, so it is left out."""
        upper_S = self._table.upper_S
        for slot in (upper_S >= self._next_S).nonzero()[0].tolist():
            held = self._held.setdefault(slot, [])
            at = int(self._next_S[slot])
            while at <= upper_S[slot]:
                if len(held) < MARKS and (entry := self.pool.take()) >= 0:
                    held.append((at, entry))
                at = self._after(at)
            self._next_S[slot] = at
            if not held:
                del self._held[slot]

    def launch(self, flight: Flight) -> SnapshotMarks | None:
        """The marks of a plan that is otherwise complete, before the bounds move."""
        self._extend()
        flight.fresh_snapshots = self.pool.launch()
        if not self._held and not self._passing:
            return None
        marks = np.full((2, len(flight.slots), MARKS), -1, np.int32)
        for slot in self._passing.keys() | self._held.keys():
            if (row := _row_of(flight, slot)) is not None:
                listed = self._passing.get(slot, []) + self._held.get(slot, [])
                marks[:, row, : len(listed)] = np.array(listed, np.int32).T
        self._passing.clear()
        return SnapshotMarks(*marks) if marks.max(initial=-1) >= 0 else None

    # ---- results

    def passed(self, flight: Flight, result: StepResult) -> list[tuple[int, list[Mark]]]:
        """Held marks that the step's rows have passed, by slot. After SlotTable.commit.

        A sampling row's state covers all tokens that the request had when the step began: the
        tokens that it sampled, accepted drafts among them, are applied by the next step.
        """
        found = []
        for slot, held in list(self._held.items()):
            row = _row_of(flight, slot)
            if row is None or not result.count_B[row]:
                continue
            state_len = int(self._table.committed_S[slot] - result.count_B[row])
            done = [mark for mark in held if mark[0] <= state_len]
            if done:
                found.append((slot, done))
                self._held[slot] = [mark for mark in held if mark[0] > state_len]
                if not self._held[slot]:
                    del self._held[slot]
        return found

    def register(self, live: LiveRequest, marks: list[Mark], register: Register) -> None:
        """Passed marks get their prefixes."""
        for at, entry in marks:
            if live.num_hashed >= at // self._page_size:
                # A sliding window has registered the page and given it back: it may be gone.
                self.pool.give_back(entry)
                continue
            chain = register(live, at)
            self.pool.drop(live.tail_chain)
            live.tail_chain = ROOT
            if chain in self.pool:
                self.pool.give_back(entry)
                continue
            self.pool.keep(chain, entry, is_fresh=False)
            if at % self._distance(at):
                live.tail_chain = chain

    def leave(self, slot: int) -> None:
        """The slot's request takes no more snapshots. Steps in flight may still write entries that
        it held: their next owners' steps run after those."""
        self._next_S[slot] = UNLIMITED
        for _, entry in self._held.pop(slot, ()):
            self.pool.give_back(entry)

    def forget(self, flight: Flight) -> None:
        """The step may end early: it writes no snapshot that can be relied on."""
        for chain in flight.fresh_snapshots:
            self.pool.drop(chain)

    def stats(self) -> SnapshotStats:
        pool = self.pool
        usage = 1.0 - pool.num_free / pool.num_entries if pool.num_entries else 0.0
        return SnapshotStats(usage, self._num_hits, self._num_misses, pool.num_evictions)


def _row_of(flight: Flight, slot: int) -> int | None:
    rows = (flight.slots == slot).nonzero()[0]
    return int(rows[0]) if len(rows) else None
