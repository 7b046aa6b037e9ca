"""Who is here: requests from add to their end, who holds which slot, who gives way to whom.

Never fills a step: it answers who may run, and moves requests into and out of slots.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from paceline.config import EngineConfig
from paceline.errors import InvalidRequest, PromptTooLong
from paceline.request import EngineRequest
from paceline.scheduler.adaptive import DraftLengths
from paceline.scheduler.events import Events, TokenConstraint
from paceline.scheduler.inflight import Rows, SlotTable
from paceline.scheduler.live import LiveRequest, WaitingQueue
from paceline.scheduler.sequence_pages import SequencePages
from paceline.step import Ints, RunnerInfo, SlotInit


class Roster:
    """Requests, slots, pages and the waiting queue, kept in agreement."""

    def __init__(self, config: EngineConfig, info: RunnerInfo) -> None:
        self.info = info
        self.table = SlotTable(info)
        self.pages = SequencePages(config, info, self.table)
        self.draft_lengths = DraftLengths(info, config.speculative)
        self.requests: dict[int, LiveRequest] = {}
        self.waiting = WaitingQueue(self._waiting_request)
        self.prefilling: dict[int, LiveRequest] = {}  # by uid
        self.events = Events()
        self.num_preemptions = 0
        self.num_constrained = 0  # running ones
        self._is_priority = config.scheduler.scheduling_policy == "priority"
        self._by_slot: list[LiveRequest | None] = [None] * info.num_slots
        self._free_slots = list(range(info.num_slots - 1, -1, -1))
        # (uid, pool releases) of a head that found no room: no need to look again before a release
        self._blocked_at: tuple[int, int] | None = None

    @property
    def num_running(self) -> int:
        return self.info.num_slots - len(self._free_slots)

    def running(self) -> list[LiveRequest]:
        return [live for live in self._by_slot if live is not None]

    def owner(self, slot: int) -> LiveRequest:
        live = self._by_slot[slot]
        assert live is not None, f"slot {slot} is free"
        return live

    def add(self, request: EngineRequest, constraint: TokenConstraint | None) -> None:
        """Queue a request; raises InvalidRequest when it could never run."""
        assert request.uid not in self.requests, f"request {request.uid} was added twice"
        tokens: Ints = np.array(request.prompt_token_ids, np.int32)
        self._check_length(len(tokens))
        max_tokens = request.params.max_tokens
        limit = self.pages.max_len
        max_len = limit if max_tokens is None else min(len(tokens) + max_tokens, limit)
        key = (request.priority if self._is_priority else 0, request.uid)
        live = LiveRequest(request, key, tokens, len(tokens), max_len, constraint)
        self.requests[request.uid] = live
        self.waiting.push(live)

    def _check_length(self, length: int) -> None:
        if length == 0:
            raise InvalidRequest("the prompt is empty; give at least one token.", param="prompt")
        if length >= self.info.max_model_len:
            raise PromptTooLong(
                f"prompt has {length} tokens; this model serves {self.info.max_model_len} with at "
                "least one for the output. Shorten it or raise --max-model-len.",
                param="prompt",
            )
        if length >= self.pages.max_len:
            raise PromptTooLong(
                f"prompt has {length} tokens; the KV cache of {self.info.num_pages} pages of "
                f"{self.info.page_size} holds one request of {self.pages.max_len} with at least "
                "one for the output. Shorten it or raise --kv-cache-memory-bytes.",
                param="prompt",
            )

    def _waiting_request(self, uid: int) -> LiveRequest | None:
        live = self.requests.get(uid)
        return live if live is not None and live.slot < 0 else None

    # ---- room

    def grow(self, slots: Rows, bound_S: Ints) -> None:
        """Pages for rows that cross into new ones; the last in order give way if they must."""
        pages = self.pages
        wanted = [
            (self.owner(slot), length)
            for slot, length in zip(slots.tolist(), bound_S[slots].tolist(), strict=True)
        ]
        # Nothing in advance while somebody waits for pages.
        num_ahead = pages.num_ahead(self.num_running) if self._blocked_at is None else 0
        if num_ahead == 0:
            missing = sum(pages.num_missing(live, length) for live, length in wanted)
            if missing > pages.pool.num_available:
                wanted.sort(key=lambda pair: pair[0].key)
        for live, length in wanted:
            while live.slot >= 0 and not pages.grow(live, length, num_ahead):
                num_ahead = 0
                if not pages.reclaim(self.running()):
                    self.preempt(max(self.running(), key=lambda other: other.key))

    def make_room_for_head(self) -> None:
        """Priority order: a waiting request may push out running ones of lower priority."""
        head = self.waiting.head()
        if head is None or head.num_draining:
            return
        running = self.running()
        victims = [live for live in running if live.key[0] > head.key[0]]
        if not victims or self.room_for(head) is not None:
            return
        pool = self.pages.pool
        held = (page for live in victims for page in live.pages[live.num_freed :])
        gain = sum(pool.num_refs(page) == 1 for page in held)
        headroom = len(running) - len(victims) - gain
        if not self.pages.fits(head, self.pages.find_hit(head), headroom):
            return  # not even without all of them
        victims.sort(key=lambda live: live.key)
        while victims and self.room_for(head) is None:
            self.preempt(victims.pop())

    def room_for(self, head: LiveRequest) -> list[int] | None:
        """The head's cached pages when it can be admitted now, else None.

        Each running request keeps a page to grow into, so that an admission does not cause a
        preemption soon after.
        """
        if not self._free_slots or head.num_draining:
            return None
        if (head.uid, self.pages.pool.num_releases) == self._blocked_at:
            return None
        hit = self.pages.find_hit(head)
        does_fit = self.pages.fits(head, hit, self.num_running)
        if not does_fit and self.pages.reclaim(self.running()):
            does_fit = self.pages.fits(head, hit, self.num_running)
        if does_fit:
            self._blocked_at = None
            return hit
        self._blocked_at = (head.uid, self.pages.pool.num_releases)
        return None

    # ---- into a slot and out of it

    def admit(self, live: LiveRequest, hit: list[int]) -> SlotInit:
        """The head of the queue takes a slot, and the pages that room_for() found."""
        self.waiting.pop()
        live.slot = slot = self._free_slots.pop()
        self._by_slot[slot] = live
        self.prefilling[live.uid] = live
        self.table.occupy(slot, live.uid, live.tokens)
        self.draft_lengths.start(slot, live.request.params.num_speculative_tokens)
        self.num_constrained += live.constraint is not None
        self.pages.admit(live, hit, self.pages.num_ahead(self.num_running))
        self.events.admitted.append((live.uid, live.num_launched))
        return SlotInit(
            slot=slot,
            request=live.request,
            tokens=live.tokens,
            prompt_len=live.prompt_len,
            num_cached=live.num_launched,
            max_len=live.max_len,
            pages=self.pages.table_of(live),
        )

    def preempt(self, live: LiveRequest) -> None:
        """Give slot and pages back now; compute again from the tokens later."""
        live.tokens, live.num_draining = self.table.committed_tokens(live.slot), self._leave(live)
        self.num_preemptions += 1
        self.events.preempted.append(live.uid)
        self.waiting.push(live)

    def end(self, live: LiveRequest) -> None:
        """The request is over, wherever it is; what is in flight for it will be wasted."""
        del self.requests[live.uid]
        if live.slot >= 0:
            self._leave(live)
        else:
            self.waiting.left()

    def _leave(self, live: LiveRequest) -> int:
        """Slot and pages are free for the next plan. Returns the rows still in flight."""
        self.pages.release(live)
        num_in_flight = self.table.vacate(live.slot)
        self._by_slot[live.slot] = None
        self._free_slots.append(live.slot)
        self.prefilling.pop(live.uid, None)
        self.num_constrained -= live.constraint is not None
        live.drafts = []
        live.slot = -1
        return num_in_flight

    def check(self) -> None:
        """For tests: slots, pages, counts and queues agree with each other."""
        running = self.running()
        assert sorted(self._free_slots + [live.slot for live in running]) == list(
            range(self.info.num_slots)
        )
        for live in running:
            assert self._by_slot[live.slot] is live
            assert self.requests[live.uid] is live
            assert self.table.uid_S[live.slot] == live.uid
        assert self.waiting.count == sum(live.slot < 0 for live in self.requests.values())
        assert self.num_constrained == sum(live.constraint is not None for live in running)
        owners = Counter(page for live in running for page in live.pages[live.num_freed :])
        pool = self.pages.pool
        assert all(pool.num_refs(page) == owners[page] for page in range(pool.num_pages))
        pool.check()
