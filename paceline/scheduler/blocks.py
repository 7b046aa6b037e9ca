"""The page pool: who holds which KV page, how often, and which free page comes next.

Never knows what a page holds; the prefix cache is told when a page it kept is taken away.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence


class PagePool:
    """Reference-counted pages 0 … num_pages - 1.

    A page is *used* (referenced), *idle* (unreferenced, but the prefix cache keeps its content)
    or *free*. Free pages live in gaps, maximal runs that are known by both ends, so that a
    request can grow into the page right after its last one: consecutive pages let attention on
    CPU read the KV without a gather copy. Idle pages are evicted oldest first.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[range], None] | None = None) -> None:
        assert num_pages > 0, f"a pool of {num_pages} pages"
        self.num_pages = num_pages
        self.num_releases = 0  # the pool's clock: pages may have become available
        self.is_kept = bytearray(num_pages)  # the prefix cache marks pages whose content it knows
        self._on_evict = on_evict
        self._num_refs = [0] * num_pages
        self._num_free = num_pages
        self._end_of = {0: num_pages}  # gap start -> end
        self._start_of = {num_pages: 0}  # gap end -> start
        # (-size, end) of every gap; sizes are those at the push and may have shrunk since.
        self._by_size = [(-num_pages, num_pages)]
        # By page: the release that made it idle, 0 otherwise. Pages released together are one
        # entry of the queue; those that are not idle any more (or idle anew) are skipped there.
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
        """`count` pages, each right after the one before where possible, the first after `after`.

        Then up to `ahead` more, as long as they follow each other and cost no content that was
        used lately. None when fewer than `count` are available; nothing is taken then.
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
        """One more owner of a used or idle page."""
        if self._num_refs[page] == 0:
            assert self._idle_since[page], f"page {page} is free; it cannot be shared"
            self._idle_since[page] = 0
            self._num_idle -= 1
        self._num_refs[page] += 1

    def _take(self, start: int, stop: int, end: int) -> None:
        """Pages start … stop - 1, the front of a gap."""
        del self._end_of[start]
        if stop < end:
            self._end_of[stop] = end
            self._start_of[end] = stop
        else:
            del self._start_of[end]
        self._num_refs[start:stop] = [1] * (stop - start)
        self._num_free -= stop - start

    def _open_run(self, count: int, ahead: int, old: int) -> int:
        """A free page to start at, with room to grow: in the largest gap.

        Behind a used page the run starts in the middle, so that its owner can grow as well.
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
        """One owner less of each page."""
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
        """The prefix cache dropped the page."""
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
        """Pages that went idle up to here, in the first half of the idle history, are old: any
        of them is as good to evict as the oldest."""
        return (self._idle_queue[0][0] + self.num_releases) // 2 if self._idle_queue else 0

    def _evict_old(self, start: int, count: int, old: int) -> bool:
        """Free old idle pages start, start + 1, …: they are in the right place."""
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
        """Evict from the old end of the queue, until there is a gap of `gap` pages, twice as many
        pages are gone or the next went idle after `limit`. Of pages released together the last
        goes first: it is of use only after those before it. Neighbours make one gap."""
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
        """Pages start … end - 1 become a gap, joined with its neighbours."""
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

    # ---- for tests

    def check(self) -> None:
        """Every page is in exactly one of the three states, and the gaps are maximal."""
        free = {p for start, end in self._end_of.items() for p in range(start, end)}
        idle = {p for p, since in enumerate(self._idle_since) if since}
        used = {p for p, refs in enumerate(self._num_refs) if refs}
        assert len(free) + len(idle) + len(used) == self.num_pages
        assert len(free | idle | used) == self.num_pages
        assert len(free) == self._num_free
        assert len(idle) == self._num_idle
        assert self._num_queued == sum(len(group) for _, group in self._idle_queue)
        queued = {(at, page) for at, group in self._idle_queue for page in group}
        assert all((self._idle_since[p], p) in queued for p in idle)
        assert self._start_of == {end: start for start, end in self._end_of.items()}
        assert not set(self._end_of) & set(self._start_of), "two gaps touch"
        assert all(self.is_kept[p] for p in idle)
        assert not any(self.is_kept[p] for p in free)
