"""The page pool: states, reference counts, order of eviction, and runs of consecutive pages."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.scheduler.page_pool import PagePool
from tests.scheduler.consistency import check_pool


def pool_of(num_pages: int) -> tuple[PagePool, list[int]]:
    evicted: list[int] = []
    return PagePool(num_pages, evicted.extend), evicted


def take(pool: PagePool, count: int, after: int = -1) -> list[int]:
    pages = pool.allocate(count, after)
    assert pages is not None
    return pages


def keep(pool: PagePool, pages: list[int]) -> None:
    for page in pages:
        pool.is_kept[page] = 1


def test_pages_come_in_a_run_and_grow_behind_the_last_one() -> None:
    pool, _ = pool_of(32)
    first = take(pool, 3)
    assert first == [0, 1, 2]
    assert take(pool, 2, after=first[-1]) == [3, 4]


def test_a_second_request_starts_where_the_first_can_still_grow() -> None:
    pool, _ = pool_of(32)
    first, second = take(pool, 2), take(pool, 2)
    for _ in range(10):
        first += take(pool, 1, after=first[-1])
        second += take(pool, 1, after=second[-1])
    assert first == list(range(12))
    assert second == list(range(second[0], second[0] + 12))


def test_nothing_is_taken_when_there_is_not_enough() -> None:
    pool, _ = pool_of(4)
    take(pool, 3)
    assert pool.allocate(2) is None
    assert pool.num_available == 1
    check_pool(pool)


def test_a_page_is_free_again_after_its_last_owner_left() -> None:
    pool, _ = pool_of(4)
    (page,) = take(pool, 1)
    pool.share(page)
    pool.release([page])
    assert pool.num_available == 3
    pool.release([page])
    assert pool.num_available == 4
    check_pool(pool)


def test_releasing_a_page_twice_is_an_error() -> None:
    pool, _ = pool_of(4)
    pages = take(pool, 2)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pages)


def test_a_free_page_cannot_be_shared() -> None:
    pool, _ = pool_of(4)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(2)


def test_kept_pages_are_evicted_oldest_first_and_the_tail_of_a_request_before_its_head() -> None:
    pool, evicted = pool_of(8)
    old, new = take(pool, 4), take(pool, 4)
    keep(pool, old + new)
    pool.release(old)
    pool.release(new)
    assert pool.num_available == 8
    take(pool, 2)
    assert sorted(evicted) == old[2:]
    check_pool(pool)


def test_a_kept_page_that_is_shared_again_is_not_evicted() -> None:
    pool, evicted = pool_of(4)
    pages = take(pool, 4)
    keep(pool, pages)
    pool.release(pages)
    pool.share(pages[3])
    assert pool.num_available == 3
    take(pool, 3)
    assert pages[3] not in evicted
    check_pool(pool)


def test_growth_goes_over_old_kept_pages_rather_than_elsewhere() -> None:
    pool, evicted = pool_of(64)
    left, right = take(pool, 32), take(pool, 32)
    keep(pool, right)
    pool.release(right)
    for _ in range(4):  # time passes: what went idle first is old
        pool.release(take(pool, 0))
    assert take(pool, 2, after=left[-1]) == right[:2]
    assert evicted == right[:2]


def test_growth_goes_elsewhere_rather_than_over_a_page_that_was_kept_just_now() -> None:
    pool, evicted = pool_of(64)
    everything = take(pool, 64)
    old, mine, new = everything[:16], everything[16:32], everything[32:]
    keep(pool, old + new)
    pool.release(old)
    for _ in range(4):
        pool.release([])
    pool.release(new)
    grown = take(pool, 1, after=mine[-1])
    assert grown[0] in old
    assert set(evicted) <= set(old)


def test_pages_in_advance_follow_each_other_or_are_not_taken() -> None:
    pool, _ = pool_of(16)
    first = pool.allocate(2, ahead=3)
    assert first == [0, 1, 2, 3, 4]
    blocker = take(pool, 1, after=first[-1])
    assert blocker == [5]
    more = pool.allocate(1, after=first[-1], ahead=4)
    assert more is not None
    assert 1 <= len(more) <= 5
    assert more == list(range(more[0], more[0] + len(more)))
    assert pool.allocate(0, after=first[-1], ahead=4) == []


def test_pages_in_advance_cost_no_content_that_was_used_lately() -> None:
    pool, evicted = pool_of(16)
    pages = take(pool, 16)
    keep(pool, pages)
    pool.release(pages[:4])
    pool.release([])
    pool.release(pages[4:])
    got = pool.allocate(1, ahead=15)
    assert got is not None
    assert set(got) <= set(pages[:4])
    assert set(evicted) <= set(pages[:4])


@pytest.mark.parametrize(("num_requests", "whole"), [(4, 0.9), (8, 0.75)])
def test_most_requests_stay_in_one_piece_in_a_pool_full_of_kept_pages(
    num_requests: int, whole: float
) -> None:
    """The policy's point, measured as the scheduler uses it: requests of 40 to 100 pages, the
    pool two thirds used at most and the rest kept for reuse."""
    rng = random.Random(0)
    pool, _ = pool_of(1456)
    requests: list[list[int]] = [[] for _ in range(num_requests)]
    lengths = [0] * num_requests
    finished: list[bool] = []
    for _ in range(8000):
        index = rng.randrange(num_requests)
        pages = requests[index]
        ahead = min(64, pool.num_available // (2 * num_requests + 2))
        if lengths[index] > rng.randint(40, 100):
            used, spare = pages[: lengths[index]], pages[lengths[index] :]
            finished.append(used == list(range(used[0], used[0] + len(used))))
            keep(pool, used)
            pool.release(used + spare)
            requests[index], lengths[index] = [], 0
        elif not pages:
            lengths[index] = rng.randint(4, 20)
            pages += pool.allocate(lengths[index], ahead=ahead) or []
        else:
            lengths[index] += 1
            if lengths[index] > len(pages):
                pages += pool.allocate(1, after=pages[-1], ahead=ahead) or []
    check_pool(pool)
    tail = finished[len(finished) // 2 :]
    assert sum(tail) / len(tail) > whole


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_every_page_is_used_idle_or_free_whatever_happens(
    num_pages: int, rng: random.Random
) -> None:
    pool, _ = pool_of(num_pages)
    owners: list[list[int]] = []
    for _ in range(60):
        action = rng.random()
        if action < 0.45:
            after = rng.choice(owners)[-1] if owners and rng.random() < 0.5 else -1
            count = rng.randint(1, 5)
            available = pool.num_available
            pages = pool.allocate(count, after)
            assert (pages is None) == (count > available)
            if pages is not None:
                assert len(set(pages)) == count
                assert not any(page in owner for owner in owners for page in pages)
                owners.append(pages)
        elif action < 0.7 and owners:
            pages = owners.pop(rng.randrange(len(owners)))
            if rng.random() < 0.6:
                keep(pool, pages)
            pool.release(pages)
        elif action < 0.85 and owners:
            page = rng.choice(rng.choice(owners))
            pool.share(page)
            owners.append([page])
        else:
            page = rng.randrange(num_pages)
            if pool.is_kept[page]:
                pool.forget(page)
        check_pool(pool)
        for page in range(num_pages):
            assert pool.num_refs(page) == sum(page in owner for owner in owners)


def test_the_idle_queue_stays_small_when_one_page_goes_idle_for_ever() -> None:
    pool, _ = pool_of(4)
    (page,) = take(pool, 1)
    keep(pool, [page])
    for _ in range(10_000):
        pool.release([page])
        pool.share(page)
    pool.release([page])
    assert sum(len(group) for _, group in pool._idle_queue) < 100
    check_pool(pool)
