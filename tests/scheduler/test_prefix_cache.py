"""The prefix cache: what is found, what is kept, and that only equal prefixes share."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.scheduler.prefix_cache import ROOT, PrefixCache
from paceline.step import Ints
from tests.scheduler.consistency import check_pool


def ids(*values: int) -> Ints:
    return np.array(values, np.int32)


def fill(cache: PrefixCache, tokens: Ints) -> list[int]:
    """A request computes `tokens` (whole pages); its pages stay in the cache."""
    count = len(tokens) // 2
    pages = cache.pool.allocate(count)
    assert pages is not None
    cache.register(ROOT, tokens, pages)
    return pages


def test_the_longest_known_beginning_is_found() -> None:
    cache = PrefixCache(8, page_size=2)
    pages = fill(cache, ids(1, 2, 3, 4))
    assert cache.find(ids(1, 2, 3, 4, 5), 2)[0] == pages
    assert cache.find(ids(1, 2, 9, 4, 5), 2)[0] == pages[:1]
    assert cache.find(ids(1, 9, 3, 4, 5), 2)[0] == []
    assert cache.find(ids(1, 2, 3, 4, 5), 1)[0] == pages[:1]


def test_equal_pages_after_different_beginnings_are_different() -> None:
    cache = PrefixCache(8, page_size=2)
    fill(cache, ids(1, 2, 7, 7))
    assert len(cache.find(ids(3, 4, 7, 7), 2)[0]) == 0
    fill(cache, ids(3, 4))
    assert len(cache.find(ids(3, 4, 7, 7), 2)[0]) == 1


def test_the_first_of_two_equal_pages_stays() -> None:
    cache = PrefixCache(8, page_size=2)
    first, second = fill(cache, ids(1, 2, 3, 4)), fill(cache, ids(1, 2, 5, 6))
    assert cache.find(ids(1, 2, 3, 4), 2)[0] == first
    assert cache.find(ids(1, 2, 5, 6), 2)[0] == [first[0], second[1]]
    assert len(cache) == 3


def test_pages_stay_reusable_after_their_owner_is_gone() -> None:
    cache = PrefixCache(8, page_size=2)
    pages = fill(cache, ids(1, 2, 3, 4))
    cache.pool.release(pages)
    assert cache.pool.num_available == 8
    found, _ = cache.find(ids(1, 2, 3, 4), 2)
    assert found == pages
    for page in found:
        cache.pool.share(page)
    assert cache.pool.num_available == 6


def test_an_evicted_page_is_not_found_and_what_followed_it_is_not_either() -> None:
    cache = PrefixCache(2, page_size=2)
    pages = fill(cache, ids(1, 2, 3, 4))
    cache.pool.release(pages)
    taken = cache.pool.allocate(1)
    assert taken == [pages[1]], "the tail of a prefix goes before its head"
    assert cache.find(ids(1, 2, 3, 4), 2)[0] == pages[:1]
    cache.pool.allocate(1)
    assert len(cache) == 0


def test_a_reset_forgets_all_and_leaves_pages_with_their_owners() -> None:
    cache = PrefixCache(4, page_size=2)
    held, left = fill(cache, ids(1, 2)), fill(cache, ids(3, 4))
    cache.pool.release(left)
    cache.reset()
    assert len(cache) == 0
    assert cache.find(ids(1, 2), 1)[0] == cache.find(ids(3, 4), 1)[0] == []
    assert cache.pool.num_available == 3
    check_pool(cache.pool)
    cache.pool.release(held)
    assert cache.pool.num_available == 4
    check_pool(cache.pool)


def test_after_a_reset_new_content_never_follows_an_old_chain() -> None:
    cache = PrefixCache(8, page_size=2)
    pages = fill(cache, ids(1, 2))
    _, chain = cache.find(ids(1, 2), 1)
    cache.reset()
    fill(cache, ids(1, 2))
    more = cache.pool.allocate(1)
    assert more is not None
    cache.register(chain, ids(3, 4), more)  # a request that began before the reset
    assert len(cache.find(ids(1, 2, 3, 4), 2)[0]) == 1
    assert pages != cache.find(ids(1, 2), 1)[0]


def test_a_page_with_another_successor_is_another_page() -> None:
    """For a drafter whose KV at the end of a page belongs to the token after it."""
    cache = PrefixCache(8, page_size=2, num_successors=1)
    first = fill(cache, ids(1, 2, 3, 4, 5))
    assert cache.find(ids(1, 2, 3, 4, 5), 2)[0] == first
    assert cache.find(ids(1, 2, 3, 4, 6), 2)[0] == first[:1]
    assert cache.find(ids(1, 2, 9, 4, 5), 2)[0] == []
    second = fill(cache, ids(1, 2, 9, 4, 5))
    assert cache.find(ids(1, 2, 9, 4, 5), 2)[0] == second
    assert cache.find(ids(1, 2, 3, 4, 5), 2)[0] == first


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=13), min_size=1, max_size=12),
    st.integers(0, 1),
)
def test_a_hit_always_holds_exactly_the_asked_prefix(
    sequences: list[list[int]], num_successors: int
) -> None:
    """Against a plain dictionary of what each page was given; the pool is small, so it evicts."""
    cache = PrefixCache(12, 2, num_successors)
    content: dict[int, tuple[int, ...]] = {}
    for sequence in sequences:
        num_pages = (len(sequence) - num_successors) // 2
        tokens = ids(*sequence[: 2 * num_pages + num_successors])
        hit, chain = cache.find(tokens, num_pages)
        for index, page in enumerate(hit):
            assert content[page] == tuple(tokens[: 2 * index + 2 + num_successors].tolist())
            cache.pool.share(page)
        fresh = cache.pool.allocate(num_pages - len(hit), hit[-1] if hit else -1)
        assert fresh is not None
        for index, page in enumerate(fresh, len(hit)):
            content[page] = tuple(tokens[: 2 * index + 2 + num_successors].tolist())
        cache.register(chain, tokens[2 * len(hit) :], fresh)
        cache.pool.release(hit + fresh)
        check_pool(cache.pool)
