"""Who already computed this prefix: full pages by the hash of everything up to their end.

Never holds a page against its pool: an unreferenced page may be evicted at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from paceline.scheduler.blocks import PagePool
from paceline.step import Ints

ROOT = b""  # what the first page of every sequence follows


def page_digest(parent: bytes, tokens: bytes) -> bytes:
    """The name of a page: its tokens and, through its parent, all tokens before them."""
    return blake2b(parent + tokens, digest_size=16).digest()


def chain_digests(tokens: Ints, page_size: int, digests: list[bytes], num_pages: int) -> None:
    """Extend `digests`, those of the first pages of `tokens`, to `num_pages` pages."""
    data = memoryview(tokens[: num_pages * page_size].tobytes())
    size = page_size * tokens.itemsize
    parent = digests[-1] if digests else ROOT
    for at in range(len(digests) * size, num_pages * size, size):
        parent = blake2b(parent + data[at : at + size], digest_size=16).digest()
        digests.append(parent)


class PrefixCache:
    """digest -> page, for pages whose content is (or will be, in stream order) complete."""

    def __init__(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages, on_evict=self._drop)
        self.num_hit_tokens = 0
        self.num_queried_tokens = 0
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The pages of the longest known beginning of `digests`; takes no reference."""
        pages = []
        page_of = self._page_of
        for digest in digests:
            page = page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def register(self, digest: bytes, page: int) -> None:
        """The content of a page that somebody holds is known by `digest`. The first one stays."""
        if digest in self._page_of:
            return
        assert page not in self._digest_of, f"page {page} is registered twice"
        self._page_of[digest] = page
        self._digest_of[page] = digest
        self.pool.keep(page)

    def reset(self) -> None:
        """Forget everything. Pages in use stay with their owners."""
        for page in list(self._digest_of):
            self.pool.forget(page)
        self._page_of.clear()
        self._digest_of.clear()

    def _drop(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]
