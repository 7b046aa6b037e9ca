"""The page pool: reference counts of KV pages, and the choice of the next page to hand out.

Knows nothing of page contents. It tells the prefix cache when it evicts one of its pages.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence


class PagePool:
    """Reference-counted pages 0 … num_pages - 1.

    A page is *used* (referenced), *idle* (unreferenced, but its content is in the prefix cache)
    or *free*. Free pages form gaps: maximal runs, indexed by start and end. A request
    grows into the page right after its last one if it can, because attention on the CPU reads
    consecutive pages without a gather copy. Idle pages are evicted oldest first.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[range], None] | None = None) -> None:
        assert num_pages > 0, f"a pool of {num_pages} pages"
        self.num_pages = num_pages
        self.num_releases = 0  # counts release() calls; also the clock of idle pages
        self.is_kept = bytearray(num_pages)  # set by the prefix cache: it knows the page's content
        self._on_evict = on_evict
        self._num_refs = [0] * num_pages
        self._num_free = num_pages
        self._end_of = {0: num_pages}  # gap start -> end
        self._start_of = {num_pages: 0}  # gap end -> start
        # A heap of (-size, end) of every gap, with sizes as they were when pushed.
        self._by_size = [(-num_pages, num_pages)]
        # By page: the number of the release that made it idle, else 0. Pages released together are
        # one entry of the queue. Entries of pages that were taken since are skipped.
        self._idle_since = [0] * num_pages
        self._idle_queue: deque[tuple[int, list[int]]] = deque()
        self._num_queued = 0
        self._num_idle = 0

    @property
    def num_available(self) -> int:
        """Pages that allocate() can hand out: free and idle ones."""
        return self._num_free + self._num_idle

    @property
    def usage(self) -> float:
        return 1.0 - self.num_available / self.num_pages

    def num_refs(self, page: int) -> int:
        return self._num_refs[page]

    # ---- taking

    def allocate(self, count: int, after: int = -1, ahead: int = 0) -> list[int] | None:
        """`count` pages, consecutive and right behind `after` as far as possible.

        Then up to `ahead` more, while they are consecutive and no recently used content must be
        evicted for them. None, and nothing is taken, if fewer than `count` are available.
        """
        if count > self._num_free + self._num_idle:
            return None
        start = after + 1 if after >= 0 else -1
        old = self._old_limit()
        pages: list[int] = []
        while len(pages) < count + ahead:
            missing = count - len(pages)
            end = self._end_of.get(start)
            if end is None:
                if not self._evict_old(start, missing + ahead, old):
                    if missing <= 0:
                        break
                    start = self._open_run(missing, ahead, old)
                end = self._end_of[start]
            stop = min(end, start + missing + ahead)
            self._take(start, stop, end)
            pages += range(start, stop)
            start = stop
        return pages

    def share(self, page: int) -> None:
        """Add a reference to a used or idle page."""
        if self._num_refs[page] == 0:
            assert self._idle_since[page], f"page {page} is free; it cannot be shared"
            self._idle_since[page] = 0
            self._num_idle -= 1
        self._num_refs[page] += 1

    def _take(self, start: int, stop: int, end: int) -> None:
        """Take pages start … stop - 1 from the front of the gap that ends at `end`."""
        del self._end_of[start]
        if stop < end:
            self._end_of[stop] = end
            self._start_of[end] = stop
        else:
            del self._start_of[end]
        self._num_refs[start:stop] = [1] * (stop - start)
        self._num_free -= stop - start

    def _open_run(self, count: int, ahead: int, old: int) -> int:
        """The first page of a new run, in the largest gap.

        If a used page lies right before the gap, the run starts in the middle of it, so that the
        owner of that page can grow too.
        """
        wanted = count + ahead
        start, end = self._largest_gap()
        if end - start < wanted and self._num_idle:
            self._evict_oldest(wanted, old)
            if not self._num_free:
                self._evict_oldest(count, self.num_releases)
            start, end = self._largest_gap()
        size = end - start
        if start == 0 or self._num_refs[start - 1] == 0 or size < 2 * wanted:
            return start
        middle = start + size // 2
        self._end_of[start] = self._start_of[end] = middle
        self._end_of[middle] = end
        self._start_of[middle] = start
        heapq.heappush(self._by_size, (start - middle, middle))
        return middle

    def _largest_gap(self) -> tuple[int, int]:
        """(start, end), or (0, 0) if no page is free."""
        heap = self._by_size
        while heap:
            size, end = heap[0]
            start = self._start_of.get(end)
            if start is None:
                heapq.heappop(heap)
            elif end - start != -size:  # it shrank, or it grew and another entry says so
                heapq.heapreplace(heap, (start - end, end))
            else:
                return start, end
        return 0, 0

    # ---- giving back

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page."""
        refs, is_kept = self._num_refs, self.is_kept
        self.num_releases += 1
        idle: list[int] = []
        start = end = 0  # a run of pages that became free
        for page in pages:
            left = refs[page] - 1
            assert left >= 0, f"page {page} was released more often than it was taken"
            refs[page] = left
            if left:
                continue
            if is_kept[page]:
                idle.append(page)
            elif page == end:
                end += 1
            else:
                self._put_free(start, end)
                start, end = page, page + 1
        self._put_free(start, end)
        if idle:
            self._put_idle(idle)

    def forget(self, page: int) -> None:
        """The prefix cache does not keep the page any more."""
        self.is_kept[page] = 0
        if self._idle_since[page]:
            self._idle_since[page] = 0
            self._num_idle -= 1
            self._put_free(page, page + 1)

    def _put_idle(self, pages: list[int]) -> None:
        now = self.num_releases
        for page in pages:
            self._idle_since[page] = now
        self._idle_queue.append((now, pages))
        self._num_idle += len(pages)
        self._num_queued += len(pages)
        if self._num_queued > 64 + 2 * self.num_pages:
            since = self._idle_since
            queue = ((at, [p for p in group if since[p] == at]) for at, group in self._idle_queue)
            self._idle_queue = deque((at, group) for at, group in queue if group)
            self._num_queued = self._num_idle

    def _old_limit(self) -> int:
        """Pages that went idle in the first half of the idle history count as old. Among old
        pages the eviction order does not matter."""
        return (self._idle_queue[0][0] + self.num_releases) // 2 if self._idle_queue else 0

    def _evict_old(self, start: int, count: int, old: int) -> bool:
        """Evict old idle pages start, start + 1, …, so that a run can continue there."""
        if start < 0 or start == self.num_pages or not self._idle_since[start]:
            return False
        most = min(start + count, self.num_pages)
        end = start
        while end < most and 0 < self._idle_since[end] <= old:
            end += 1
        if end > start:
            self._evict(start, end)
        return end > start

    def _evict_oldest(self, gap: int, limit: int) -> None:
        """Evict the oldest idle pages until there is a gap of `gap` pages, 2 * `gap` pages were
        evicted, or the next went idle after `limit`. Of pages released together the last goes
        first: a prefix hit needs all pages before it. Neighbours are evicted as one gap."""
        since = self._idle_since
        left = 2 * gap
        while left > 0 and self._num_idle:
            at, group = self._idle_queue[0]
            if at > limit:
                return
            if not group:
                self._idle_queue.popleft()
                continue
            start = group.pop()
            num_popped, end = 1, start + 1
            if since[start] == at:
                while end - start < gap and group and group[-1] == start - 1:
                    if since[start - 1] != at:
                        break
                    start = group.pop()
                    num_popped += 1
                self._evict(start, end)
                left -= end - start
            self._num_queued -= num_popped
            if self._largest_size() >= gap:
                return

    def _largest_size(self) -> int:
        start, end = self._largest_gap()
        return end - start

    def _evict(self, start: int, end: int) -> None:
        assert self._on_evict is not None
        count = end - start
        self._on_evict(range(start, end))
        self.is_kept[start:end] = bytes(count)
        self._idle_since[start:end] = [0] * count
        self._num_idle -= count
        self._put_free(start, end)

    def _put_free(self, start: int, end: int) -> None:
        """Pages start … end - 1 become free and join the gaps on both sides."""
        if start == end:
            return
        self._num_free += end - start
        start = self._start_of.pop(start, start)
        end = self._end_of.pop(end, end)
        self._end_of[start] = end
        self._start_of[end] = start
        heapq.heappush(self._by_size, (start - end, end))
        if len(self._by_size) > 64 + 4 * len(self._end_of):
            self._by_size = [(s - e, e) for s, e in self._end_of.items()]
            heapq.heapify(self._by_size)
