"""The pages of each running request: hits, growth, names in the prefix cache, release.

Never chooses who runs; it says whether somebody fits.
"""

from __future__ import annotations

import numpy as np

from paceline.config import EngineConfig
from paceline.scheduler.inflight import SlotTable
from paceline.scheduler.live import LiveRequest
from paceline.scheduler.prefix_cache import ROOT, PrefixCache, chain_digests, page_digest
from paceline.step import Ints, PageAppends, RunnerInfo

NEVER = 2**31 - 1


class SequencePages:
    """Page lists by request, the pool and the prefix cache behind them."""

    def __init__(self, config: EngineConfig, info: RunnerInfo, table: SlotTable) -> None:
        self.page_size = info.page_size
        self.cache = PrefixCache(info.num_pages)
        self.pool = self.cache.pool
        self._table = table
        self._is_caching = config.cache.enable_prefix_caching
        self._max_model_len = info.max_model_len
        self._lookahead = info.draft_lookahead
        # Positions a window and the drafter may write past the newest token.
        self._overhang = info.max_k + info.draft_lookahead
        pool_len = info.num_pages * info.page_size
        # The longest sequence that can run alone: its newest token may still be followed by a
        # window and the drafter's lookahead, except at the model's own end.
        self.max_len = info.max_model_len
        if pool_len < info.max_model_len:
            self.max_len = max(pool_len - self._overhang + 1, 0)
        self._appends: list[tuple[int, int, int]] = []  # slot, index, page

    # ---- admission

    def find_hit(self, live: LiveRequest) -> list[int]:
        """Cached pages of a waiting request's beginning; at least one token stays to compute."""
        if not self._is_caching or live.wants_prompt_logprobs:
            return []
        num_pages = (len(live.tokens) - 1) // self.page_size
        chain_digests(live.tokens, self.page_size, live.digests, num_pages)
        return self.cache.find(live.digests[:num_pages])

    def fits(self, live: LiveRequest, hit: list[int], headroom: int) -> bool:
        """Whether the rest of the request's pages can be had, and `headroom` more for others."""
        num_idle = sum(self.pool.num_refs(page) == 0 for page in hit)
        missing = self._num_initial_pages(live) - len(hit)
        return missing + num_idle + headroom <= self.pool.num_available

    def admit(self, live: LiveRequest, hit: list[int]) -> None:
        """All pages up to the end of prefill and the drafter's lookahead after it."""
        for page in hit:
            self.pool.share(page)
        last = hit[-1] if hit else -1
        fresh = self.pool.allocate(self._num_initial_pages(live) - len(hit), last)
        assert fresh is not None, "admitted a request that does not fit"
        live.pages = hit + fresh
        live.num_launched = len(hit) * self.page_size
        live.num_hashed = len(hit)
        live.last_digest = live.digests[len(hit) - 1] if hit else ROOT
        table, slot = self._table, live.slot
        table.page_room_S[slot] = len(live.pages) * self.page_size
        table.page_need_S[slot] = min(live.max_len - 1 + self._overhang, self._max_model_len)
        table.hash_at_S[slot] = NEVER  # until the prompt's own pages are registered
        if not self._is_caching:
            live.num_hashed = NEVER
        elif not live.wants_prompt_logprobs:
            self.cache.num_queried_tokens += len(live.tokens)
            self.cache.num_hit_tokens += live.num_launched

    def _num_initial_pages(self, live: LiveRequest) -> int:
        end = min(len(live.tokens) + self._lookahead, self._max_model_len)
        return -(-end // self.page_size)

    # ---- growth

    def num_missing(self, live: LiveRequest, end: int) -> int:
        return max(0, -(-end // self.page_size) - len(live.pages))

    def grow(self, live: LiveRequest, end: int) -> bool:
        """Pages for every position below `end`; False when there are not enough."""
        count = -(-end // self.page_size) - len(live.pages)
        fresh = self.pool.allocate(count, live.pages[-1])
        if fresh is None:
            return False
        index = len(live.pages)
        live.pages += fresh
        self._table.page_room_S[live.slot] += count * self.page_size
        for page in fresh:
            self._appends.append((live.slot, index, page))
            index += 1
        return True

    def take_appends(self) -> PageAppends | None:
        """New page table entries since the last plan."""
        if not self._appends:
            return None
        columns = np.array(self._appends, np.int32).T
        self._appends.clear()
        return PageAppends(columns[0], columns[1], columns[2])

    def release(self, live: LiveRequest) -> None:
        """The request leaves its slot: its pages are free (or idle in the cache) at once.

        Steps in flight may still write them; whoever gets them next is launched later.
        """
        self.pool.release(live.pages)
        live.pages = []
        if self._appends:
            self._appends = [entry for entry in self._appends if entry[0] != live.slot]

    # ---- names in the prefix cache

    def register_launched(self, live: LiveRequest) -> None:
        """A chunk was planned: pages that it fills hold their final content in stream order."""
        num_full = live.num_launched // self.page_size
        if num_full > live.num_hashed:
            chain_digests(live.tokens, self.page_size, live.digests, num_full)
            for index in range(live.num_hashed, num_full):
                self.cache.register(live.digests[index], live.pages[index])
            live.num_hashed = num_full
            live.last_digest = live.digests[num_full - 1]
        if live.num_launched == len(live.tokens) and live.num_hashed != NEVER:
            self._table.hash_at_S[live.slot] = (live.num_hashed + 1) * self.page_size + 1

    def register_committed(self, live: LiveRequest) -> None:
        """Pages whose positions are all below the committed length - 1 are complete."""
        table, slot, size = self._table, live.slot, self.page_size
        num_full = (int(table.committed_S[slot]) - 1) // size
        for index in range(live.num_hashed, num_full):
            tokens = table.tokens_SL[slot, index * size : (index + 1) * size].tobytes()
            live.last_digest = page_digest(live.last_digest, tokens)
            self.cache.register(live.last_digest, live.pages[index])
        live.num_hashed = num_full
        table.hash_at_S[slot] = (num_full + 1) * size + 1

    def stop_hashing(self, live: LiveRequest) -> None:
        """After a reset: what this request computes builds on what was to be forgotten."""
        live.num_hashed = NEVER
        self._table.hash_at_S[live.slot] = NEVER

    def table_of(self, live: LiveRequest) -> Ints:
        return np.array(live.pages, np.int32)
