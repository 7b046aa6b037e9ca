"""The page pool: who holds which KV page, how often, and which free page comes next.

Never knows what a page holds; the prefix cache is told when a page it kept is taken away.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence


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
        # Idle pages evicted at once: neighbours went idle together, so they make one gap.
        self._run_length = max(1, min(32, num_pages // 64))
        self._on_evict = on_evict
        self._num_free = num_pages
        self._num_refs = [0] * num_pages
        self._is_kept = bytearray(num_pages)
        self._idle: OrderedDict[int, int] = OrderedDict()  # page -> release, oldest first
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
        start = after + 1 if after >= 0 else -1
        while len(pages) < count:
            end = self._end_of.get(start)
            if end is None and self._evict_old(start, count - len(pages)):
                end = self._end_of[start]
            if end is None:
                start = self._open_run(count - len(pages))
                end = self._end_of[start]
            stop = min(end, start + count - len(pages))
            self._take(start, stop, end)
            pages.extend(range(start, stop))
            start = stop
        return pages

    def share(self, page: int) -> None:
        """One more owner of a used or idle page."""
        if self._num_refs[page] == 0:
            assert page in self._idle, f"page {page} is free; it cannot be shared"
            del self._idle[page]
        self._num_refs[page] += 1

    def _take(self, start: int, stop: int, end: int) -> None:
        """Pages start … stop - 1, the front of a gap."""
        del self._end_of[start]
        if stop < end:
            self._end_of[stop] = end
            self._start_of[end] = stop
        else:
            del self._start_of[end]
        for page in range(start, stop):
            self._num_refs[page] = 1
        self._num_free -= stop - start

    def _open_run(self, count: int) -> int:
        """A free page to start at, with room to grow: in the largest gap.

        Behind a used page the run starts in the middle, so that its owner can grow as well.
        """
        start, end = self._largest_gap()
        if end - start < count and self._idle:
            self._evict_oldest(max(count, self._run_length))
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
        """(start, end); (0, 0) when no page is free."""
        heap = self._by_size
        while heap:
            size, end = heap[0]
            start = self._start_of.get(end)
            if start is None:
                heapq.heappop(heap)
            elif end - start != -size:  # it shrank, or grew and has another entry
                heapq.heapreplace(heap, (start - end, end))
            else:
                return start, end
        return 0, 0

    # ---- giving back

    def release(self, pages: Sequence[int]) -> None:
        """One owner less of each page. Among those that go idle, the last is evicted first:
        its content is of use only together with the pages before it."""
        refs, is_kept, idle = self._num_refs, self._is_kept, self._idle
        self.num_releases += 1
        now = self.num_releases
        start = end = 0  # a run of free pages, found from its end
        for page in reversed(pages):
            left = refs[page] - 1
            assert left >= 0, f"page {page} was released more often than it was taken"
            refs[page] = left
            if left:
                continue
            if is_kept[page]:
                idle[page] = now
            elif page + 1 == start:
                start = page
            else:
                if end:
                    self._put_free(start, end)
                start, end = page, page + 1
        if end:
            self._put_free(start, end)

    def keep(self, page: int) -> None:
        """The prefix cache knows this page's content: do not forget it with its last owner."""
        assert self._num_refs[page] > 0, f"page {page} has no owner; its content is unknown"
        self._is_kept[page] = 1

    def forget(self, page: int) -> None:
        """The prefix cache dropped the page."""
        self._is_kept[page] = 0
        if self._idle.pop(page, None) is not None:
            self._put_free(page, page + 1)

    def _evict_old(self, start: int, count: int) -> bool:
        """Free idle pages start, start + 1, … that went idle in the first half of the idle
        history: as good to evict as the oldest, and in the right place."""
        idle = self._idle
        since = idle.get(start)
        if since is None:
            return False
        limit = (next(iter(idle.values())) + self.num_releases) // 2
        end = start
        while since is not None and since <= limit and end < start + count:
            self._drop_idle(end)
            end += 1
            since = idle.get(end)
        if end > start:
            self._put_free(start, end)
        return end > start

    def _drop_idle(self, page: int) -> None:
        assert self._on_evict is not None
        del self._idle[page]
        self._on_evict(page)
        self._is_kept[page] = 0

    def _evict_oldest(self, count: int) -> None:
        """At least one and about `count` pages from the old end; neighbours make one gap."""
        idle = self._idle
        while count > 0 and idle:
            page, since = next(iter(idle.items()))
            end = page + 1
            self._drop_idle(page)
            count -= 1
            while count > 0 and idle.get(page - 1) == since:
                page -= 1
                self._drop_idle(page)
                count -= 1
            self._put_free(page, end)

    def _put_free(self, start: int, end: int) -> None:
        """Pages start … end - 1 become a gap, joined with its neighbours."""
        self._num_free += end - start
        start = self._start_of.pop(start, start)
        end = self._end_of.pop(end, end)
        self._end_of[start] = end
        self._start_of[end] = start
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
