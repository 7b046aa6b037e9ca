"""The pages of each running request: hits, growth, names in the prefix cache, release.

Never chooses who runs; it says whether somebody fits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from paceline.config import EngineConfig
from paceline.scheduler.inflight import FOREVER, SlotTable
from paceline.scheduler.live import LiveRequest
from paceline.scheduler.prefix_cache import ROOT, PrefixCache
from paceline.step import Ints, PageAppends, RunnerInfo

logger = logging.getLogger(__name__)
NEVER = 2**31 - 1
NO_PAGE = -1  # in a page list: given back while its owner runs
MOST_AHEAD = 64  # pages held in advance while there are plenty


class SequencePages:
    """Page lists by request, the pool and the prefix cache behind them."""

    def __init__(self, config: EngineConfig, info: RunnerInfo, table: SlotTable) -> None:
        self.page_size = info.page_size
        # A drafter that reads features has, at a page's last position, KV of the token after it.
        num_successors = int(info.draft_reads_features)
        self.cache = PrefixCache(info.num_pages, info.page_size, num_successors)
        self.pool = self.cache.pool
        self._table = table
        self._is_caching = config.cache.enable_prefix_caching
        self._max_model_len = info.max_model_len
        self._lookahead = info.draft_lookahead
        self._window = info.kv_window
        # Positions a window and the drafter may write past the newest token.
        self._overhang = info.max_k + info.draft_lookahead
        self._max_row_appends = info.max_row_appends or NEVER
        pool_len = info.num_pages * info.page_size
        # The longest sequence that can run alone: its newest token may still be followed by a
        # window and the drafter's lookahead, except at the model's own end.
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
        # New page table entries since the last plan.
        self._append_slots: list[int] = []
        self._append_indices: list[int] = []
        self._append_pages: list[int] = []

    # ---- admission

    def find_hit(self, live: LiveRequest) -> list[int]:
        """Cached pages of a waiting request's beginning; at least one token stays to compute."""
        live.chain = ROOT
        if not self._is_caching or live.wants_prompt_logprobs:
            return []
        num_pages = (len(live.tokens) - 1) // self.page_size
        pages, live.chain = self.cache.find(live.tokens, num_pages)
        return pages

    def fits(self, live: LiveRequest, hit: list[int], headroom: int) -> bool:
        """Whether the rest of the request's pages can be had, and `headroom` more for others."""
        num_idle = sum(self.pool.num_refs(page) == 0 for page in hit)
        missing = self._num_initial_pages(live) - len(hit)
        return missing + num_idle + headroom <= self.pool.num_available

    def admit(self, live: LiveRequest, hit: list[int], num_ahead: int) -> None:
        """All pages up to the end of prefill and the drafter's lookahead after it."""
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
        if self._is_caching and not live.wants_prompt_logprobs:
            self.cache.num_queried_tokens += len(live.tokens)
            self.cache.num_hit_tokens += live.num_launched

    def _num_initial_pages(self, live: LiveRequest) -> int:
        end = min(len(live.tokens) + self._lookahead, self._max_model_len)
        return -(-end // self.page_size)

    # ---- growth

    def begin_decode(self, live: LiveRequest) -> None:
        """From its last chunk on, a request must be watched for page ends."""
        self._watch(live)

    def _watch(self, live: LiveRequest) -> None:
        num_pages = len(live.pages)
        self._table.page_room_S[live.slot] = (
            num_pages * self.page_size - self._lookahead if num_pages < live.most_pages else FOREVER
        )

    def num_missing(self, live: LiveRequest, length: int) -> int:
        """Pages that the request lacks to reach `length` and the drafter's lookahead."""
        wanted = (length + self._lookahead + self.page_size - 1) // self.page_size
        return min(wanted, live.most_pages) - len(live.pages)

    def num_ahead(self, num_running: int) -> int:
        """Pages a request may hold in advance, while the pool is far from full: they keep its
        run in one piece, and there are fewer page table entries to send. reclaim() takes them
        back before anybody has to wait or give way for them."""
        return min(MOST_AHEAD, self.pool.num_available // (2 * num_running + 2))

    def grow(self, live: LiveRequest, length: int, num_ahead: int = 0) -> bool:
        """Pages for `length` and the lookahead; False when there are not enough."""
        pages = live.pages
        index = len(pages)
        count = self.num_missing(live, length)
        ahead = min(num_ahead, live.most_pages - index - count, self._max_row_appends - count)
        # What a row needs it gets, even if its packet then complains.
        fresh = self.pool.allocate(count, pages[-1], max(ahead, 0))
        if fresh is None:
            return False
        pages += fresh
        self._watch(live)
        self._append_slots += [live.slot] * len(fresh)
        self._append_indices += range(index, len(pages))
        self._append_pages += fresh
        return True

    def reclaim(self, running: Sequence[LiveRequest]) -> bool:
        """Take back pages held in advance: those past what steps in flight, and the one being
        planned, may write. True when there were any."""
        upper_S = self._table.upper_S
        num_before = self.pool.num_available
        for live in running:
            end = int(upper_S[live.slot]) + self._overhang
            keep = -(-end // self.page_size)
            if keep < len(live.pages):
                self._drop_appends(live.slot, keep)
                self.pool.release(live.pages[keep:])
                del live.pages[keep:]
                if self._table.last_S[live.slot] >= 0:
                    self._watch(live)
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

    def release(self, live: LiveRequest) -> None:
        """The request leaves its slot: its pages are free (or idle in the cache) at once.

        Steps in flight may still write them; whoever gets them next is launched later.
        """
        self._register_committed(live)
        self.pool.release(live.pages[live.num_freed :])
        live.pages = []
        self._drop_appends(live.slot, 0)

    def free_behind_window(self, running: Sequence[LiveRequest]) -> None:
        """Give back pages that no layer will read again, whatever becomes of steps in flight: by
        committed progress, or by launched chunks of a prompt, never by what may be accepted.

        Steps in flight may still read them; whoever gets them next is launched later. They keep
        their names in the prefix cache: a hit is a prefix that is there from its first token on.
        """
        assert self._window is not None
        for live in running:
            # The lowest position that a step planned from now on can begin at.
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
        """Forget entries of this plan that are not to be."""
        if slot in self._append_slots:
            entries = zip(self._append_slots, self._append_indices, strict=True)
            stays = [i for i, (at, index) in enumerate(entries) if at != slot or index < first]
            self._append_slots = [self._append_slots[i] for i in stays]
            self._append_indices = [self._append_indices[i] for i in stays]
            self._append_pages = [self._append_pages[i] for i in stays]

    # ---- names in the prefix cache

    def register_launched(self, live: LiveRequest) -> None:
        """A chunk was planned: pages that it fills hold their final content in stream order."""
        num_known = min(live.num_launched, len(live.tokens) - self.cache.num_successors)
        num_full = num_known // self.page_size
        if num_full > live.num_hashed:
            self._register(live, live.tokens, num_full)

    def _register_committed(self, live: LiveRequest) -> None:
        """Output pages are registered when the request leaves its slot: until then nobody is
        likely to ask for them. Those whose positions are all below the committed length - 1 are
        complete; before the last chunk is launched the prompt's own are known already."""
        slot = live.slot
        if live.num_launched < len(live.tokens):
            return
        num_full = (int(self._table.committed_S[slot]) - 1) // self.page_size
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
        """After a reset: what this request computes builds on what was to be forgotten."""
        live.num_hashed = NEVER

    def table_of(self, live: LiveRequest) -> Ints:
        return np.array(live.pages, np.int32)
