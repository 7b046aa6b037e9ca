"""Finds pages that hold the KV of a known prefix. A key is a page's tokens and its whole prefix.

Takes no references: the pool may evict an unreferenced page at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.scheduler.page_pool import PagePool
from paceline.step import Ints

ROOT = 0  # the chain value before the first page of every sequence


class PrefixCache:
    """The key of a page is the chain value of the page before it and its own tokens.

    Each page gets a new, unique chain value when it is registered. So two prefixes have the same
    chain value only if all their tokens are equal, and no hash can collide. A page whose parent
    was evicted cannot be found any more; it is evicted when its turn comes.

    With `num_successors` 1 the KV of a page also depends on the token after it (drafters that
    read features), and that token is part of the key.
    """

    # Told the chain value after a page that is forgotten: what else has this prefix is stale.
    on_forget: Callable[[int], None] | None = None

    def __init__(self, num_pages: int, page_size: int, num_successors: int = 0) -> None:
        self.pool = PagePool(num_pages, on_evict=self._drop)
        self.num_hit_tokens = 0
        self.num_successors = num_successors
        self._page_size = page_size
        self._page_of: dict[bytes, int] = {}  # parent's chain value and tokens -> page
        self._key_of: list[bytes | None] = [None] * num_pages
        self._chain_of = [ROOT] * num_pages
        self._newest_chain = ROOT

    def __len__(self) -> int:
        return len(self._page_of)

    def find(self, tokens: Ints, num_pages: int) -> tuple[list[int], int]:
        """The longest known prefix of `tokens`: at most `num_pages` pages, and the chain value
        after them. `tokens` has `num_successors` more tokens than the pages hold."""
        pages: list[int] = []
        chain = ROOT
        size, seen = 4 * self._page_size, 4 * (self._page_size + self.num_successors)
        data = tokens[: num_pages * self._page_size + self.num_successors].tobytes()
        for at in range(0, num_pages * size, size):
            page = self._page_of.get(chain.to_bytes(8, "little") + data[at : at + seen])
            if page is None:
                break
            pages.append(page)
            chain = self._chain_of[page]
        return pages, chain

    def chain_after(self, page: int) -> int:
        """The chain value after a page that `find` has found."""
        return self._chain_of[page]

    def register(self, chain: int, tokens: Ints, pages: list[int]) -> int:
        """Register referenced pages whose KV, written or to be written by a launched step, is that
        of `tokens` after the prefix of `chain`. Returns the chain value after them. `tokens` has
        `num_successors` more tokens than the pages hold.

        If a key is known already, its first page stays.
        """
        page_of, key_of, chain_of = self._page_of, self._key_of, self._chain_of
        is_kept, newest = self.pool.is_kept, self._newest_chain
        size, seen = 4 * self._page_size, 4 * (self._page_size + self.num_successors)
        data = tokens.tobytes()
        at = 0
        for page in pages:
            key = chain.to_bytes(8, "little") + data[at : at + seen]
            at += size
            known = page_of.setdefault(key, page)
            if known == page:
                newest += 1
                key_of[page] = key
                is_kept[page] = 1
                chain_of[page] = newest
            chain = chain_of[known]
        self._newest_chain = newest
        return chain

    def reset(self) -> None:
        """Forget everything. Requests keep the pages that they hold."""
        pages = list(self._page_of.values())
        self._page_of.clear()
        for page in pages:
            self._lose(page)
            self.pool.forget(page)

    def forget(self, pages: Iterable[int]) -> None:
        """What these pages were to hold never came to be."""
        for page in pages:
            if (key := self._key_of[page]) is not None:
                del self._page_of[key]
                self._lose(page)
                self.pool.forget(page)

    def _drop(self, pages: range) -> None:
        for page in pages:
            key = self._key_of[page]
            assert key is not None, f"page {page} is not registered"
            del self._page_of[key]
            self._lose(page)

    def _lose(self, page: int) -> None:
        self._key_of[page] = None
        if self.on_forget is not None:
            self.on_forget(self._chain_of[page])
