"""/metrics: the names that dashboards depend on, and that the numbers are the engine's."""

from __future__ import annotations

import os

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.engine.messages import RESTED, Events, Gauges, StepTimes, without_rows
from paceline.engine.stats import EngineStats
from paceline.observe.histogram import Histogram
from paceline.observe.metrics import Metrics
from paceline.observe.stream import LossyStream
from tests.server.fake_client import FakeClient
from tests.server.serving import Served, serving

NAMES = {
    "paceline:e2e_request_latency_seconds",
    "paceline:generation_tokens_total",
    "paceline:inter_token_latency_seconds",
    "paceline:kv_cache_usage_perc",
    "paceline:log_lines_dropped_total",
    "paceline:num_preemptions_total",
    "paceline:num_requests_running",
    "paceline:num_requests_waiting",
    "paceline:prefix_cache_hits_total",
    "paceline:prefix_cache_queries_total",
    "paceline:prompt_tokens_total",
    "paceline:request_success_total",
    "paceline:spec_decode_num_accepted_tokens_per_pos_total",
    "paceline:spec_decode_num_accepted_tokens_total",
    "paceline:spec_decode_num_draft_tokens_total",
    "paceline:spec_decode_num_drafts_total",
    "paceline:step_bubble_seconds",
    "paceline:time_to_first_token_seconds",
    "paceline:wasted_rows_total",
}


def samples(text: str) -> dict[str, float]:
    """Sample name and labels, without model_name, to value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            if sample.name.startswith("paceline:"):
                assert sample.labels["model_name"] == "tiny"
            suffix = "".join(f"{{{k}={v}}}" for k, v in sorted(labels.items()))
            found[sample.name + suffix] = sample.value
    return found


def test_the_names_are_frozen() -> None:
    families = Metrics().collect()
    assert {f.name + ("_total" if f.type == "counter" else "") for f in families} == NAMES


def test_totals_are_the_engines() -> None:
    stats = EngineStats(
        num_held=5,
        num_running=3,
        kv_usage=0.25,
        num_preemptions=4,
        num_prompt_tokens=100,
        num_cached_tokens=60,
        num_generated_tokens=50,
        num_drafts=9,
        num_draft_tokens=20,
        num_accepted_tokens=12,
        accepted_per_position=[8, 4],
        num_wasted_rows=5,
    )
    stats.finished.update(stop=2, abort=1)
    metrics = Metrics()
    metrics.attach(stats, "tiny")
    found = samples(metrics.text().decode())
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.25,
        "num_preemptions_total": 4,
        "prompt_tokens_total": 100,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 60,
        "generation_tokens_total": 50,
        "spec_decode_num_drafts_total": 9,
        "spec_decode_num_draft_tokens_total": 20,
        "spec_decode_num_accepted_tokens_total": 12,
        "spec_decode_num_accepted_tokens_per_pos_total{position=0}": 8,
        "spec_decode_num_accepted_tokens_per_pos_total{position=1}": 4,
        "wasted_rows_total": 5,
        "request_success_total{finished_reason=stop}": 2,
        "request_success_total{finished_reason=length}": 0,
        "request_success_total{finished_reason=abort}": 1,
        "request_success_total{finished_reason=error}": 0,
    }
    assert {name: found[f"paceline:{name}"] for name in expected} == expected


def test_the_bubble_is_counted_step_by_step_and_not_where_the_device_was_free_to_rest() -> None:
    stats = EngineStats()
    metrics = Metrics()
    metrics.attach(stats, "tiny")
    for idle in ([RESTED, 0.0], [], [0.004], [0.000015, 0.000015]):
        times = [StepTimes(idle_s, 0.001, 0.0001) for idle_s in idle]
        stats.take(without_rows(Events(), Gauges(num_steps=len(times), times=times)))
    found = samples(metrics.text().decode())
    assert found["paceline:step_bubble_seconds_count"] == 4
    assert found["paceline:step_bubble_seconds_sum"] == pytest.approx(0.00403)
    assert found["paceline:step_bubble_seconds_bucket{le=0.0}"] == 1
    assert found["paceline:step_bubble_seconds_bucket{le=1e-05}"] == 1
    assert found["paceline:step_bubble_seconds_bucket{le=2e-05}"] == 3
    assert found["paceline:step_bubble_seconds_bucket{le=0.002}"] == 3
    assert found["paceline:step_bubble_seconds_bucket{le=0.005}"] == 4
    assert (stats.bubble_s, stats.busy_s) == pytest.approx((0.00403, 0.005))
    assert len(stats.recent) == 5


def test_a_value_on_a_bound_is_in_that_bucket() -> None:
    histogram = Histogram((0.1, 0.2))
    for value in (0.1, 0.15, 0.2, 5.0):
        histogram.observe(value)
    assert list(histogram.buckets()) == [("0.1", 1), ("0.2", 3), ("+Inf", 4)]
    assert histogram.count == 4


def test_latencies_count_tokens_and_sequences(client: FakeClient) -> None:
    with serving(client) as server:
        assert server.chat(n=2).status == 200
        found = samples(server.get("/metrics").body.decode())
    assert found["paceline:time_to_first_token_seconds_count"] == 2
    assert found["paceline:inter_token_latency_seconds_count"] == 2 * 2  # "lo", token by token
    assert found["paceline:e2e_request_latency_seconds_count"] == 2
    assert found["paceline:generation_tokens_total"] >= 10


def test_metrics_are_text_that_prometheus_reads(server: Served) -> None:
    reply = server.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    assert "process_resident_memory_bytes" in samples(reply.body.decode())


def test_log_lines_that_were_dropped_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "wb") as nowhere:
        stream = LossyStream(nowhere.fileno())
        stream.num_dropped = 3
        monkeypatch.setattr("sys.stderr", stream)
        text = Metrics("m").text().decode()
    assert 'paceline:log_lines_dropped_total{model_name="m"} 3.0' in text
