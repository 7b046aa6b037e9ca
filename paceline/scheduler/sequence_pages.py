"""The page lists of running requests: prefix hits, growth, registration, release.

Says whether a request fits; the allocator decides which one runs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from paceline.config import EngineConfig
from paceline.scheduler.inflight import UNLIMITED, SlotTable
from paceline.scheduler.live_request import LiveRequest
from paceline.scheduler.marks import Mark, Marks
from paceline.scheduler.prefix_cache import ROOT, PrefixCache
from paceline.step import Ints, PageAppends, RunnerInfo

logger = logging.getLogger(__name__)
NEVER = 2**31 - 1  # as num_hashed: this request registers no pages
NO_PAGE = -1  # in a page list: a page given back while the request runs
MOST_AHEAD = 64  # the most pages that a request holds in advance


class SequencePages:
    """Owns the page pool and the prefix cache; the lists themselves are in LiveRequest.pages."""

    def __init__(self, config: EngineConfig, info: RunnerInfo, table: SlotTable) -> None:
        self.page_size = info.page_size
        # With a drafter that reads features, the KV at a page's last position depends on the next
        # token.
        num_successors = int(info.draft_reads_features)
        self.cache = PrefixCache(info.num_pages, info.page_size, num_successors)
        self.pool = self.cache.pool
        self._table = table
        self._is_caching = config.cache.enable_prefix_caching
        self.marks: Marks | None = None  # of models with recurrent state
        if info.is_recurrent and self._is_caching:
            interval = config.cache.state_snapshot_interval
            self.marks = Marks(info, interval, self.cache, table)
            self.cache.on_forget = self.marks.pool.forget
        self._max_model_len = info.max_model_len
        self._lookahead = info.draft_lookahead
        self._num_late = info.max_late_drafter_rows
        self._window = info.kv_window
        # Positions past the newest token that a step (window and drafter) may write.
        self._overhang = info.max_k + info.draft_lookahead
        # The same with host drafts. They end where the request must, so no sequence gets longer.
        self._reach = info.window_k + info.draft_lookahead
        self._max_row_appends = info.max_row_appends or NEVER
        pool_len = info.num_pages * info.page_size
        # The longest sequence that can run alone. A step may write `overhang` positions past its
        # newest token, except at max_model_len.
        self.max_len = info.max_model_len
        if pool_len < info.max_model_len:
            self.max_len = max(pool_len - self._overhang + 1, 0)
            logger.warning(
                "the KV cache holds %d tokens, fewer than max_model_len %d: requests end at %d. "
                "Raise --kv-cache-memory-bytes for longer ones.",
                pool_len,
                info.max_model_len,
                self.max_len,
            )
        # New page table entries since the last plan, as three parallel lists.
        self._append_slots: list[int] = []
        self._append_indices: list[int] = []
        self._append_pages: list[int] = []
        self._fresh_pages: list[int] = []  # that the plan's chunks fill

    # ---- admission

    def find_hit(self, live: LiveRequest) -> list[int]:
        """Cached pages of a waiting request's prefix. At least one token is left to compute."""
        live.chain, live.snapshot, live.num_matched = ROOT, -1, 0
        if not self._is_caching or live.wants_prompt_logprobs:
            return []
        num_pages = (len(live.tokens) - 1) // self.page_size
        pages, live.chain = self.cache.find(live.tokens, num_pages)
        return pages if self.marks is None else self.marks.cut_hit(live, pages)

    def fits(self, live: LiveRequest, hit: list[int], headroom: int) -> bool:
        """Whether the pages that the request lacks, and `headroom` more, are available."""
        num_idle = sum(self.pool.num_refs(page) == 0 for page in hit)
        missing = self._num_initial_pages(live) - len(hit)
        return missing + num_idle + headroom <= self.pool.num_available

    def admit(self, live: LiveRequest, hit: list[int], num_ahead: int) -> None:
        """Take all pages up to the end of the prompt and the drafter's lookahead after it."""
        for page in hit:
            self.pool.share(page)
        end = min(live.max_len - 1 + self._overhang, self._max_model_len)
        live.most_pages = -(-end // self.page_size)
        last = hit[-1] if hit else -1
        count = self._num_initial_pages(live)
        ahead = min(num_ahead, live.most_pages - count)
        fresh = self.pool.allocate(count - len(hit), last, ahead)
        assert fresh is not None, "admitted a request that does not fit"
        live.pages = hit + fresh
        live.num_freed = 0
        live.num_launched = len(hit) * self.page_size
        live.num_hashed = len(hit) if self._is_caching else NEVER
        if self.marks is not None:
            self.marks.admit(live)
        if self._is_caching and not live.wants_prompt_logprobs:
            self.cache.num_hit_tokens += live.num_launched

    def _num_initial_pages(self, live: LiveRequest) -> int:
        end = min(len(live.tokens) + self._lookahead, self._max_model_len)
        return -(-end // self.page_size)

    # ---- growth

    def set_room(self, live: LiveRequest) -> None:
        """Set the length at which the request needs new pages."""
        num_pages = len(live.pages)
        self._table.page_room_S[live.slot] = (
            num_pages * self.page_size - self._lookahead
            if num_pages < live.most_pages
            else UNLIMITED
        )

    def num_missing(self, live: LiveRequest, length: int) -> int:
        """Pages that the request lacks for `length` and the drafter's lookahead."""
        wanted = (length + self._lookahead + self.page_size - 1) // self.page_size
        return min(wanted, live.most_pages) - len(live.pages)

    def num_ahead(self, num_running: int) -> int:
        """Pages that a request may hold in advance while the pool is far from full. They keep its
        pages consecutive, and page table entries are sent less often. reclaim() takes them back
        before a request has to wait or is preempted."""
        return min(MOST_AHEAD, self.pool.num_available // (2 * num_running + 2))

    def grow(self, live: LiveRequest, length: int, num_ahead: int = 0) -> bool:
        """Take pages for `length` and the lookahead. False if there are not enough."""
        pages = live.pages
        index = len(pages)
        count = self.num_missing(live, length)
        ahead = min(num_ahead, live.most_pages - index - count, self._max_row_appends - count)
        # The limit of appends per row cuts only pages in advance. If the row needs more than that,
        # the packet refuses the step.
        fresh = self.pool.allocate(count, pages[-1], max(ahead, 0))
        if fresh is None:
            return False
        pages += fresh
        self.set_room(live)
        self._append_slots += [live.slot] * len(fresh)
        self._append_indices += range(index, len(pages))
        self._append_pages += fresh
        return True

    def reclaim(self, running: Sequence[LiveRequest]) -> bool:
        """Take back pages held in advance: those that neither the steps in flight nor the step
        being planned can write. True if there were any."""
        upper_S = self._table.upper_S
        num_before = self.pool.num_available
        for live in running:
            end = int(upper_S[live.slot]) + self._reach
            keep = -(-end // self.page_size)
            if keep < len(live.pages):
                self._drop_appends(live.slot, keep)
                self.pool.release(live.pages[keep:])
                del live.pages[keep:]
                if self._table.last_S[live.slot] >= 0:
                    self.set_room(live)
        return self.pool.num_available > num_before

    def take_appends(self) -> PageAppends | None:
        """New page table entries since the last plan."""
        if not self._append_slots:
            return None
        appends = PageAppends(
            np.array(self._append_slots, np.int32),
            np.array(self._append_indices, np.int32),
            np.array(self._append_pages, np.int32),
        )
        self._append_slots, self._append_indices, self._append_pages = [], [], []
        return appends

    def release(self, live: LiveRequest, *, is_complete: bool) -> None:
        """The request leaves its slot: its pages become free, or idle in the prefix cache.
        `is_complete`: the device has ended it.

        Steps in flight may still write them. That is safe: the next owner's steps are launched
        later and run after them.
        """
        self._register_committed(live, 0 if is_complete else self._num_late)
        if self.marks is not None:
            self.marks.leave(live.slot)
        self.pool.release(live.pages[live.num_freed :])
        live.pages = []
        self._drop_appends(live.slot, 0)

    def free_behind_window(self, running: Sequence[LiveRequest]) -> None:
        """Sliding window: give back pages that no future step can read.

        Progress is what was committed, or for a prompt what was launched; drafts in flight do not
        count. Steps in flight may still read the pages, and the next owner's steps run after
        them. The pages stay in the prefix cache.
        """
        assert self._window is not None
        for live in running:
            # The first position of the next step that will be planned.
            position = live.num_launched
            if position >= len(live.tokens):
                position = int(self._table.committed_S[live.slot]) - 1
            num_dead = (position + 1 - self._window) // self.page_size
            if num_dead <= live.num_freed:
                continue
            if num_dead > live.num_hashed:
                self._register(live, self._table.tokens_SL[live.slot], num_dead)
            first, live.num_freed = live.num_freed, num_dead
            self.pool.release(live.pages[first:num_dead])
            live.pages[first:num_dead] = [NO_PAGE] * (num_dead - first)

    def _drop_appends(self, slot: int, first: int) -> None:
        """Drop new entries of a slot from index `first` on."""
        if slot in self._append_slots:
            entries = zip(self._append_slots, self._append_indices, strict=True)
            stays = [i for i, (at, index) in enumerate(entries) if at != slot or index < first]
            self._append_slots = [self._append_slots[i] for i in stays]
            self._append_indices = [self._append_indices[i] for i in stays]
            self._append_pages = [self._append_pages[i] for i in stays]

    # ---- registration in the prefix cache

    def place_marks(self, live: LiveRequest, length: int) -> int:
        """Snapshots of the request's next chunk. Returns the chunk's length, which may shrink."""
        if self.marks is None or live.num_hashed == NEVER:
            return length
        return self.marks.place(live, length, self._register_chunk)

    def register_launched(self, live: LiveRequest) -> None:
        """A chunk was planned: register the pages that it fills. Later steps run after it."""
        num_known = min(live.num_launched, len(live.tokens) - self.cache.num_successors)
        self._register_chunk(live, num_known)

    def _register_chunk(self, live: LiveRequest, length: int) -> int:
        num_full = length // self.page_size
        if num_full > live.num_hashed:
            self._fresh_pages += live.pages[live.num_hashed : num_full]
            self._register(live, live.tokens, num_full)
        return live.chain

    def register_passed(self, live: LiveRequest, marks: list[Mark]) -> None:
        """Results show that the request has passed these marks: register their pages too."""
        assert self.marks is not None

        def register(live: LiveRequest, length: int) -> int:
            num_full = length // self.page_size
            if num_full > live.num_hashed:
                self._register(live, self._table.tokens_SL[live.slot], num_full)
            return live.chain

        self.marks.register(live, marks, register)

    def take_fresh(self) -> list[int]:
        """Pages that got their names since the last plan, and whose content is to be computed."""
        fresh, self._fresh_pages = self._fresh_pages, []
        return fresh

    def _register_committed(self, live: LiveRequest, num_late: int) -> None:
        """Output pages are registered when the request leaves its slot; earlier a hit is unlikely.
        Pages whose positions are all below the committed length - 1 are complete, except that the
        drafter may lack the last `num_late`. Before the last
        chunk is launched there is no output, and prompt pages are registered already."""
        slot = live.slot
        if live.num_launched < len(live.tokens):
            return
        num_full = (int(self._table.committed_S[slot]) - 1 - num_late) // self.page_size
        if num_full > live.num_hashed:
            self._register(live, self._table.tokens_SL[slot], num_full)

    def _register(self, live: LiveRequest, tokens: Ints, num_full: int) -> None:
        first, size = live.num_hashed, self.page_size
        end = num_full * size + self.cache.num_successors
        live.chain = self.cache.register(
            live.chain, tokens[first * size : end], live.pages[first:num_full]
        )
        live.num_hashed = num_full

    def stop_registering(self, live: LiveRequest) -> None:
        """After a cache reset: register no more pages of this request."""
        live.num_hashed = NEVER
        if self.marks is not None:
            self.marks.leave(live.slot)

    def table_of(self, live: LiveRequest) -> Ints:
        return np.array(live.pages, np.int32)
