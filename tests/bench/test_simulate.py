"""The simulator of routing rules: what it reads, what it counts, and what its records show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.simulate import BLOCK, RULES, Arrival, StepTimes, read_trace, scaled, simulate
from tests.architecture.source_tree import ROOT

RECORDS = ROOT / "bench" / "results" / "simulated"


def test_both_traces_are_read_in_order_of_time(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:50.5000000,374,44\n2023-11-16 18:15:46.5000000,10,0\n"
    )
    assert read_trace(azure, 9) == [Arrival(0.0, 10, 1, ()), Arrival(4.0, 374, 44, ())]
    mooncake = tmp_path / "mooncake.jsonl"
    row = {"timestamp": 500, "input_length": 2 * BLOCK + 3, "output_length": 7}
    mooncake.write_text(json.dumps({**row, "hash_ids": [1, 2, 3]}))
    # The third block is not whole, so that another prompt with this id may differ in it.
    assert read_trace(mooncake, 9) == [Arrival(0.0, 2 * BLOCK + 3, 7, (1, 2))]


@pytest.mark.parametrize("rule", RULES)
def test_a_lone_request_takes_its_own_steps_under_every_rule(rule: str) -> None:
    arrivals = [Arrival(float(100 * i), 1000, 11, ()) for i in range(3)]
    times = StepTimes.measured()
    result = simulate(arrivals, 2, rule)
    assert result["ttft_ms"]["p50"] == pytest.approx(1000 * times.step_s(0, 1000, 0), rel=0.01)
    assert result["tpot_ms"]["p50"] == pytest.approx(1000 * times.step_s(1, 0, 1001), rel=0.05)
    assert result["hit_rate"] == 0


def conversations(num: int, num_turns: int) -> list[Arrival]:
    """Each turn begins with all blocks of the turn before. An odd number of them, so that turns do
    not meet their replica by chance."""
    found: list[Arrival] = []
    for turn in range(num_turns):
        for talk in range(num):
            blocks = tuple(1000 * talk + i for i in range(8 * (turn + 1)))
            found.append(Arrival(0.3 * len(found), BLOCK * len(blocks), 50, blocks))
    return found


def test_affinity_finds_the_replica_that_knows_a_conversation() -> None:
    results = {rule: simulate(conversations(5, 4), 4, rule) for rule in RULES}
    hits = {rule: result["hit_rate"] for rule, result in results.items()}
    assert hits["affinity"] == pytest.approx((8 + 16 + 24) / (8 + 16 + 24 + 32), abs=1e-4)
    assert hits["affinity"] > 2 * max(hits["least-load"], hits["round-robin"])
    first = {rule: result["ttft_ms"]["p50"] for rule, result in results.items()}
    assert first["affinity"] < min(first["least-load"], first["round-robin"])


def test_a_higher_load_waits_longer() -> None:
    arrivals = [Arrival(0.2 * i, 2000, 50, ()) for i in range(100)]
    low, high = (simulate(scaled(arrivals, load), 2, "least-load") for load in (1, 20))
    assert high["ttft_ms"]["p99"] > 3 * low["ttft_ms"]["p99"]
    assert high["seconds"] < low["seconds"]


@pytest.mark.parametrize(("name", "num_requests"), [("azure_conv", 19_366), ("mooncake", 12_031)])
def test_the_records_hold_the_whole_traces_and_the_page_shows_their_plots(
    name: str, num_requests: int
) -> None:
    record = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    assert record["requests"] == num_requests
    assert set(record["results"]) == set(RULES)
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    image = f"images/routing_{name.partition('_')[0]}.svg"
    assert f"]({image})" in page
    plot = (ROOT / "docs" / image).read_text(encoding="utf-8")
    titles = {f"{what} {percentile}" for what in ("TTFT", "TPOT") for percentile in ("p50", "p99")}
    assert titles <= set(re.findall(r">([A-Z]{4} p\d\d)<", plot))
    assert all(rule in plot for rule in RULES)
