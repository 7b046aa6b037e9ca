"""Gives slots and pages to requests and takes them back: admission, growth, preemption.

Never fills a step; the scheduler asks which request may run and decides what a step computes.
"""

from __future__ import annotations

from paceline.config import EngineConfig
from paceline.scheduler.adaptive import DraftLengths
from paceline.scheduler.continuations import Continuations
from paceline.scheduler.events import Events
from paceline.scheduler.inflight import Rows, SlotTable
from paceline.scheduler.live_request import LiveRequest
from paceline.scheduler.lookups import Lookups
from paceline.scheduler.request_table import RequestTable
from paceline.scheduler.sequence_pages import SequencePages
from paceline.step import Ints, RunnerInfo, SlotInit


class Allocator:
    """Keeps the request table, the slot table and the page lists in agreement."""

    def __init__(
        self, config: EngineConfig, info: RunnerInfo, requests: RequestTable, events: Events
    ) -> None:
        self.slots = SlotTable(info)
        self.pages = SequencePages(config, info, self.slots)
        self.draft_lengths = DraftLengths(info, config.speculative)
        self.continuations = Continuations(info, self.slots)
        self.lookups = Lookups(
            config.speculative, self.slots, self.continuations, self.draft_lengths
        )
        self._draft_max_len = info.draft_max_len
        self.num_preemptions = 0
        self._requests = requests
        self._events = events
        # (uid, pool releases) of the head of the queue when it did not fit: there is no need to
        # look again before pages are released.
        self._blocked_at: tuple[int, int] | None = None

    # ---- room

    def grow(self, slots: Rows, bound_S: Ints) -> None:
        """Pages for rows that reach the end of theirs. If pages run out, the request that is last
        in order is preempted."""
        pages, requests = self.pages, self._requests
        wanted = [
            (requests.owner(slot), length)
            for slot, length in zip(slots.tolist(), bound_S[slots].tolist(), strict=True)
        ]
        # No pages in advance while a waiting request lacks some.
        num_ahead = pages.num_ahead(requests.num_running) if self._blocked_at is None else 0
        if num_ahead == 0:
            missing = sum(pages.num_missing(live, length) for live, length in wanted)
            if missing > pages.pool.num_available:
                wanted.sort(key=lambda pair: pair[0].key)
        for live, length in wanted:
            while live.slot >= 0 and not pages.grow(live, length, num_ahead):
                num_ahead = 0
                if not pages.reclaim(requests.running()):
                    self.preempt(max(requests.running(), key=lambda other: other.key))

    def make_room_for_head(self) -> None:
        """Priority scheduling: preempt running requests of lower priority for the waiting head."""
        head = self._requests.waiting.head()
        if head is None or head.num_draining:
            return
        running = self._requests.running()
        victims = [live for live in running if live.key[0] > head.key[0]]
        if not victims or self.room_for(head) is not None:
            return
        pool = self.pages.pool
        held = (page for live in victims for page in live.pages[live.num_freed :])
        gain = sum(pool.num_refs(page) == 1 for page in held)
        headroom = len(running) - len(victims) - gain
        if not self.pages.fits(head, self.pages.find_hit(head), headroom):
            return  # it would not fit even if all of them were preempted
        victims.sort(key=lambda live: live.key)
        while victims and self.room_for(head) is None:
            self.preempt(victims.pop())

    def room_for(self, head: LiveRequest) -> list[int] | None:
        """The head's cached pages if it can be admitted now, else None.

        One page per running request is left free for growth, so that an admission does not cause
        a preemption soon after.
        """
        pages, requests = self.pages, self._requests
        if not requests.has_free_slot or head.num_draining:
            return None
        if (head.uid, pages.pool.num_releases) == self._blocked_at:
            return None
        hit = pages.find_hit(head)
        does_fit = pages.fits(head, hit, requests.num_running)
        if not does_fit and pages.reclaim(requests.running()):
            does_fit = pages.fits(head, hit, requests.num_running)
        self._blocked_at = None if does_fit else (head.uid, pages.pool.num_releases)
        return hit if does_fit else None

    # ---- into a slot and out of it

    def admit(self, live: LiveRequest, hit: list[int]) -> SlotInit:
        """The head of the queue takes a slot, and the pages that room_for() found."""
        slot = self._requests.take_slot(live)
        self.slots.occupy(slot, live.uid, live.tokens)
        is_long = self._draft_max_len is not None and len(live.tokens) >= self._draft_max_len
        self.draft_lengths.start(slot, 0 if is_long else self.lookups.start(live))
        self.pages.admit(live, hit, self.pages.num_ahead(self._requests.num_running))
        self._events.admitted.append((live.uid, live.num_launched))
        return SlotInit(
            slot=slot,
            request=live.request,
            tokens=live.tokens,
            prompt_len=len(live.request.prompt_token_ids),
            num_cached=live.num_launched,
            max_len=live.max_len,
            pages=self.pages.table_of(live),
            snapshot=live.snapshot,
        )

    def preempt(self, live: LiveRequest) -> None:
        """Free the slot and the pages now; the request is computed again from its tokens later."""
        live.tokens, live.num_draining = self.slots.committed_tokens(live.slot), self._leave(live)
        self.num_preemptions += 1
        self._events.preempted.append(live.uid)
        self._requests.waiting.push(live)

    def end(self, live: LiveRequest, *, is_complete: bool = False) -> None:
        """The request is over, running or waiting. Its rows in flight are wasted. `is_complete`:
        the device has ended it."""
        del self._requests.by_uid[live.uid]
        if live.slot >= 0:
            self._leave(live, is_over=True, is_complete=is_complete)
        else:
            self._requests.waiting.discard()

    def _leave(self, live: LiveRequest, *, is_over: bool = False, is_complete: bool = False) -> int:
        """Slot and pages are free for the next plan. Returns the number of rows in flight."""
        self.pages.release(live, is_complete=is_complete)
        self.continuations.drop(live.slot)
        self.lookups.leave(live, is_over=is_over)
        num_in_flight = self.slots.vacate(live.slot)
        self._requests.leave_slot(live)
        return num_in_flight
