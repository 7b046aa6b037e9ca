"""Checks that the scheduler's tables agree with each other. Looks into private fields."""

from __future__ import annotations

from collections import Counter

from paceline.scheduler.marks import Marks
from paceline.scheduler.page_pool import PagePool
from paceline.scheduler.request_table import RequestTable
from paceline.scheduler.scheduler import Scheduler


def pages_of(scheduler: Scheduler, uid: int) -> list[int]:
    """The pages that a request holds, in order."""
    return list(scheduler._requests.by_uid[uid].pages)


def check_scheduler(scheduler: Scheduler) -> None:
    """Requests, slots and the reference counts of pages agree."""
    requests, pool = scheduler._requests, scheduler._pages.pool
    check_requests(requests)
    running = requests.running()
    assert all(scheduler.table.uid_S[live.slot] == live.uid for live in running)
    owners = Counter(page for live in running for page in live.pages[live.num_freed :])
    assert all(pool.num_refs(page) == owners[page] for page in range(pool.num_pages))
    check_pool(pool)
    if scheduler._marks is not None:
        check_snapshots(scheduler._marks, {live.slot for live in running})


def check_snapshots(marks: Marks, slots: set[int]) -> None:
    """Between plans every entry is free, held by a mark of a running request, or known."""
    pool = marks.pool
    held = [entry for group in marks._held.values() for _, entry in group]
    entries = pool._free + held + list(pool._entry_of.values())
    assert sorted(entries) == list(range(pool.num_entries))
    assert not pool._fresh
    assert not pool._lost
    assert set(marks._held) <= slots
    assert all(marks._held.values())
    pages = marks._cache
    chains = {pages._chain_of[page] for page in pages._page_of.values()}
    assert chains.issuperset(pool._entry_of), "a snapshot outlived its page"


def check_requests(requests: RequestTable) -> None:
    """Slots, counts and the queue agree."""
    running, by_slot = requests.running(), requests._by_slot
    taken = [live.slot for live in running]
    assert sorted(requests._free_slots + taken) == list(range(len(by_slot)))
    for live in running:
        assert by_slot[live.slot] is live
        assert requests.by_uid[live.uid] is live
    assert requests.waiting.count == sum(live.slot < 0 for live in requests.by_uid.values())
    assert requests.num_constrained == sum(live.constraint is not None for live in running)


def check_pool(pool: PagePool) -> None:
    """Every page is in exactly one of the three states, and the gaps are maximal."""
    free = {p for start, end in pool._end_of.items() for p in range(start, end)}
    idle = {p for p, since in enumerate(pool._idle_since) if since}
    used = {p for p, refs in enumerate(pool._num_refs) if refs}
    assert len(free) + len(idle) + len(used) == pool.num_pages
    assert len(free | idle | used) == pool.num_pages
    assert len(free) == pool._num_free
    assert len(idle) == pool._num_idle
    assert pool._num_queued == sum(len(group) for _, group in pool._idle_queue)
    queued = {(at, page) for at, group in pool._idle_queue for page in group}
    assert all((pool._idle_since[p], p) in queued for p in idle)
    assert pool._start_of == {end: start for start, end in pool._end_of.items()}
    assert not set(pool._end_of) & set(pool._start_of), "two gaps touch"
    assert all(pool.is_kept[p] for p in idle)
    assert not any(pool.is_kept[p] for p in free)
