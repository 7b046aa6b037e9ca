"""The arithmetic of the CPU benchmark: medians, ratios, verdicts and what a rate is."""

from __future__ import annotations

import pytest

from bench.peers.job import Timing, decode_rate, first_token_ms, throughput
from bench.peers.verdict import Bar, Spread, judge, same_answers, table


def row_of(bar: Bar, ours: float, theirs: float) -> str:
    row = judge(bar, {"a": [ours], "b": [theirs]})
    assert row is not None
    return row.verdict


def test_spread_is_the_median_and_both_ends() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 4.0]) == Spread(3.5, 1.0, 5.0)


def test_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    # The machine slowed down tenfold in round two, for both: no round says other than 2.
    row = judge(Bar("a", ("b",)), {"a": [20.0, 2.0, 24.0], "b": [10.0, 1.0, 8.0]})
    assert row is not None
    assert row.ratio == Spread(2.0, 2.0, 3.0)
    assert (row.ours_median, row.theirs_median) == (20.0, 8.0)


def test_the_faster_variant_of_a_peer_stands() -> None:
    values = {"a": [30.0, 30.0], "flash": [10.0, 12.0], "plain": [15.0, 20.0]}
    row = judge(Bar("a", ("flash", "plain")), values)
    assert row is not None
    assert row.theirs == "plain"
    assert row.ratio == Spread(1.75, 1.5, 2.0)


def test_the_variant_with_the_shorter_time_stands_where_less_is_better() -> None:
    values = {"a": [30.0], "flash": [10.0], "plain": [15.0]}
    row = judge(Bar("a", ("flash", "plain"), must=1.0, lower_is_better=True), values)
    assert row is not None
    assert (row.theirs, row.verdict) == ("flash", "miss")


def test_a_peer_that_took_no_part_gives_no_row() -> None:
    assert judge(Bar("a", ("b", "c"), must=1.0), {"a": [1.0]}) is None
    assert judge(Bar("a", ("b",), must=1.0), {"b": [1.0]}) is None


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [(19.9, "miss"), (20.0, "PASS"), (29.9, "PASS"), (30.0, "PASS, reached")],
)
def test_verdict_of_a_rate_that_must_be_high(ours: float, verdict: str) -> None:
    assert row_of(Bar("a", ("b",), must=2.0, reach=3.0), ours, 10.0) == verdict


@pytest.mark.parametrize(
    ("ours", "verdict"), [(6.1, "miss"), (6.0, "PASS"), (4.1, "PASS"), (4.0, "PASS, reached")]
)
def test_verdict_of_a_time_that_must_be_low(ours: float, verdict: str) -> None:
    bar = Bar("a", ("b",), must=0.6, reach=0.4, lower_is_better=True)
    assert row_of(bar, ours, 10.0) == verdict


def test_a_ratio_without_a_must_is_only_said() -> None:
    assert row_of(Bar("a", ("b",)), 0.1, 10.0) == "said"


def test_decode_rate_leaves_out_the_first_token_and_its_time() -> None:
    timings = [
        Timing(first_token_s=[9.0], last_token_s=[10.0], token_ids=[[7] * 11]),
        Timing(first_token_s=[1.0], last_token_s=[4.0], token_ids=[[7] * 31]),
    ]
    assert decode_rate(timings) == pytest.approx((10 + 30) / (1.0 + 3.0))


def test_throughput_counts_all_tokens_until_the_last_answer() -> None:
    timing = Timing(first_token_s=[1.0, 1.5], last_token_s=[2.0, 5.0], token_ids=[[7] * 4] * 2)
    assert throughput([timing]) == pytest.approx(8 / 5.0)


def test_time_to_first_token_is_in_milliseconds() -> None:
    timings = [Timing([0.25], [0.25], [[7]]), Timing([0.75], [0.75], [[7]])]
    assert first_token_ms(timings) == pytest.approx(500.0)


def test_answers_are_the_same_token_by_token() -> None:
    assert same_answers([[1, 2], [3, 4], [5]], [[1, 2], [3, 9], [5, 6]]) == "1/3"


def test_table_columns_line_up() -> None:
    lines = table([["case", "x"], ["long name", "1"]]).splitlines()
    assert lines[0].index("x") == lines[2].index("1")
