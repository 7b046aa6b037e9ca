"""When a client that was refused may try again."""

from __future__ import annotations

import pytest

from paceline.server.retry_after import MOST_RETRY_S, RetryEstimate


def test_it_is_the_time_that_the_open_sequences_take() -> None:
    pace = RetryEstimate()
    pace.restart(100.0)
    for i in range(1, 11):
        pace.end(2, 100.0 + i)  # two a second
    assert pace.retry_after_s(50, 110.0) == 25
    assert pace.retry_after_s(51, 110.0) == 26
    # ten seconds without an end
    assert pace.retry_after_s(50, 120.0) == 50


def test_before_the_first_end_it_is_the_time_so_far() -> None:
    pace = RetryEstimate()
    assert pace.retry_after_s(50, 100.0) == 1
    pace.restart(100.0)
    assert pace.retry_after_s(50, 130.0) == 30


@pytest.mark.parametrize(("num_open", "seconds"), [(1, 1), (10**6, MOST_RETRY_S)])
def test_it_has_bounds(num_open: int, seconds: int) -> None:
    pace = RetryEstimate()
    pace.restart(0.0)
    pace.end(100, 10.0)
    assert pace.retry_after_s(num_open, 10.0) == seconds


def test_only_the_newest_ends_count() -> None:
    pace = RetryEstimate()
    pace.restart(0.0)
    for i in range(1000):
        pace.end(1, 1000.0 + 0.5 * i)  # the first came late, the others come fast
    assert pace.retry_after_s(20, 1499.5) == 10


def test_requests_that_ended_while_none_waited_do_not_count() -> None:
    pace = RetryEstimate()
    pace.restart(0.0)
    pace.end(1, 3600.0)
    pace.restart(3600.0)
    pace.end(100, 3610.0)
    assert pace.retry_after_s(100, 3610.0) == 10
