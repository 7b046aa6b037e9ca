"""The page pool: who holds which KV page, how often, and which free page comes next.

Never knows what a page holds; the prefix cache is told when a page it kept is taken away.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence

# Idle pages given back to the free gaps at once when no free page is left: neighbours were used
# together, so a batch tends to make one gap instead of many.
EVICTION_BATCH = 16


class PagePool:
    """Reference-counted pages 0 … num_pages - 1.

    A page is *used* (referenced), *idle* (unreferenced, but the prefix cache keeps its content)
    or *free*. Free pages live in gaps, maximal runs that are known by both ends, so that a
    request can grow into the page right after its last one: consecutive pages let attention on
    CPU read the KV without a gather copy. Idle pages are evicted oldest first.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None] | None = None) -> None:
        assert num_pages > 0, f"a pool of {num_pages} pages"
        self.num_pages = num_pages
        self.num_releases = 0  # grows whenever pages may have become available
        self._on_evict = on_evict
        self._num_free = num_pages
        self._num_refs = [0] * num_pages
        self._is_kept = bytearray(num_pages)
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._idle_since = [0] * num_pages
        self._clock = 0
        self._end_of = {0: num_pages}  # gap start -> end
        self._start_of = {num_pages: 0}  # gap end -> start
        # (-size, end) of every gap; sizes are those at the push and may have shrunk since.
        self._by_size = [(-num_pages, num_pages)]

    @property
    def num_available(self) -> int:
        """Pages that allocate() can hand out: free and idle ones."""
        return self._num_free + len(self._idle)

    @property
    def usage(self) -> float:
        return 1.0 - self.num_available / self.num_pages

    def num_refs(self, page: int) -> int:
        return self._num_refs[page]

    # ---- taking

    def allocate(self, count: int, after: int = -1) -> list[int] | None:
        """`count` pages, each right after the one before where possible, the first after `after`.

        None when fewer than `count` are available; nothing is taken then.
        """
        if count > self._num_free + len(self._idle):
            return None
        pages: list[int] = []
        start = after + 1 if after >= 0 else self._open_run(count)
        while True:
            self._take_run(start, count - len(pages), pages)
            if len(pages) == count:
                return pages
            start = self._open_run(count - len(pages))

    def share(self, page: int) -> None:
        """One more owner of a used or idle page."""
        if self._num_refs[page] == 0:
            assert page in self._idle, f"page {page} is free; it cannot be shared"
            del self._idle[page]
        self._num_refs[page] += 1

    def _take_run(self, start: int, limit: int, pages: list[int]) -> None:
        """Append free pages start, start + 1, … to `pages`, at most `limit`, evicting old ones."""
        refs = self._num_refs
        while limit:
            end = self._end_of.pop(start, 0)
            if not end:
                if not self._is_old(start):
                    return
                self._evict(start)
                continue
            stop = min(end, start + limit)
            if stop < end:
                self._end_of[stop] = end
                self._start_of[end] = stop
            else:
                del self._start_of[end]
            for page in range(start, stop):
                refs[page] = 1
            pages.extend(range(start, stop))
            self._num_free -= stop - start
            limit -= stop - start
            start = stop

    def _is_old(self, page: int) -> bool:
        """Idle for longer than half of the pool's idle history: as good as the oldest to evict."""
        if page not in self._idle:
            return False
        oldest = self._idle_since[next(iter(self._idle))]
        return 2 * self._idle_since[page] <= oldest + self._clock

    def _open_run(self, count: int) -> int:
        """A free page to start at, with room to grow: the largest gap.

        Behind a used page the run starts in the middle, so that its owner can grow as well.
        """
        if not self._num_free:
            for _ in range(min(max(count, EVICTION_BATCH), len(self._idle))):
                self._evict(next(iter(self._idle)))
        start, end = self._largest_gap()
        size = end - start
        if start == 0 or self._num_refs[start - 1] == 0 or size < 2 * count:
            return start
        middle = start + size // 2
        self._end_of[start] = self._start_of[end] = middle
        self._end_of[middle] = end
        self._start_of[middle] = start
        heapq.heappush(self._by_size, (start - middle, middle))
        return middle

    def _largest_gap(self) -> tuple[int, int]:
        heap = self._by_size
        while True:
            size, end = heap[0]
            start = self._start_of.get(end)
            if start is None:
                heapq.heappop(heap)
            elif end - start != -size:  # it shrank, or grew and has another entry
                heapq.heapreplace(heap, (start - end, end))
            else:
                return start, end

    # ---- giving back

    def release(self, pages: Sequence[int]) -> None:
        """One owner less of each page. The last pages become evictable first: they depend on
        the ones before them."""
        refs = self._num_refs
        self.num_releases += 1
        for page in reversed(pages):
            assert refs[page] > 0, f"page {page} was released more often than it was taken"
            refs[page] -= 1
            if refs[page] == 0:
                if self._is_kept[page]:
                    self._clock += 1
                    self._idle_since[page] = self._clock
                    self._idle[page] = None
                else:
                    self._put_free(page)

    def keep(self, page: int) -> None:
        """The prefix cache knows this page's content: do not forget it with its last owner."""
        assert self._num_refs[page] > 0, f"page {page} has no owner; its content is unknown"
        self._is_kept[page] = 1

    def forget(self, page: int) -> None:
        """The prefix cache dropped the page."""
        self._is_kept[page] = 0
        if page in self._idle:
            del self._idle[page]
            self._put_free(page)

    def _evict(self, page: int) -> None:
        assert self._on_evict is not None
        self._on_evict(page)
        self.forget(page)

    def _put_free(self, page: int) -> None:
        start = self._start_of.pop(page, page)  # a gap that ends here
        end = self._end_of.pop(page + 1, page + 1)  # a gap that begins right after
        self._end_of[start] = end
        self._start_of[end] = start
        self._num_free += 1
        heapq.heappush(self._by_size, (start - end, end))
        if len(self._by_size) > 64 + 4 * len(self._end_of):
            self._by_size = [(s - e, e) for s, e in self._end_of.items()]
            heapq.heapify(self._by_size)

    # ---- for tests

    def check(self) -> None:
        """Every page is in exactly one of the three states, and the gaps are maximal."""
        free = {p for start, end in self._end_of.items() for p in range(start, end)}
        idle = set(self._idle)
        used = {p for p, refs in enumerate(self._num_refs) if refs}
        assert len(free) + len(idle) + len(used) == self.num_pages
        assert len(free | idle | used) == self.num_pages
        assert len(free) == self._num_free
        assert self._start_of == {end: start for start, end in self._end_of.items()}
        assert not set(self._end_of) & set(self._start_of), "two gaps touch"
        assert all(self._is_kept[p] for p in idle)
        assert not any(self._is_kept[p] for p in free)
