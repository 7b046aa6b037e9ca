"""/metrics: the names that dashboards depend on, and that the numbers are the engine's."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.engine.messages import RESTED, Gauges, StepMessage, StepTimes
from paceline.engine.stats import EngineStats
from paceline.observe.histogram import Histogram
from paceline.observe.stream import LossyStream
from paceline.scheduler.events import Events
from paceline.scheduler.snapshots import SnapshotStats
from paceline.server.metrics import Metrics
from paceline.step import RunnerInfo, StepResult
from tests.server.fake_client import FakeClient
from tests.server.serving import Served, serving

NAMES = {
    "paceline:e2e_request_latency_seconds",
    "paceline:engine_info",
    "paceline:engine_restarts_total",
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
    "paceline:rank_kv_cache_usage_perc",
    "paceline:rank_generation_tokens_total",
    "paceline:rank_last_restart_timestamp_seconds",
    "paceline:rank_num_preemptions_total",
    "paceline:rank_num_requests_running",
    "paceline:rank_prefix_cache_hits_total",
    "paceline:rank_prompt_tokens_total",
    "paceline:rank_restarts_total",
    "paceline:rank_spec_decode_num_accepted_tokens_total",
    "paceline:rank_spec_decode_num_draft_tokens_total",
    "paceline:replicas_restarting",
    "paceline:request_success_total",
    "paceline:requests_resumed_total",
    "paceline:spec_decode_num_accepted_tokens_per_pos_total",
    "paceline:spec_decode_num_accepted_tokens_total",
    "paceline:spec_decode_num_draft_tokens_total",
    "paceline:spec_decode_num_drafts_total",
    "paceline:state_snapshot_evictions_total",
    "paceline:state_snapshot_hits_total",
    "paceline:state_snapshot_misses_total",
    "paceline:state_snapshot_usage_perc",
    "paceline:forced_tokens_total",
    "paceline:late_mask_wait_seconds",
    "paceline:step_bubble_seconds",
    "paceline:time_to_first_token_seconds",
    "paceline:wasted_rows_total",
}


INFO = RunnerInfo(
    num_pages=512, page_size=16, num_slots=4, max_model_len=99, vocab_size=9, max_k=0,
    draft_lookahead=0,
)  # fmt: skip


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


@pytest.mark.parametrize(
    ("methods", "k", "named"),
    [
        ((), 0, "none"),
        (("ngram",), 5, "ngram, K = 5"),
        (("suffix", "mtp"), 1, "suffix + mtp, K = 1"),
        (("suffix",), 0, "suffix"),
    ],
)
def test_the_engine_is_told_by_labels(methods: tuple[str, ...], k: int, named: str) -> None:
    metrics = Metrics()
    info = replace(INFO, draft_methods=methods, max_k=k, dtype="bfloat16")
    metrics.attach(EngineStats(), info, "tiny")
    found = samples(metrics.text().decode())
    assert found[f"paceline:engine_info{{device=cpu}}{{drafter={named}}}{{dtype=bfloat16}}"] == 1


def test_the_names_are_frozen() -> None:
    families = Metrics().collect()
    assert {f.name + ("_total" if f.type == "counter" else "") for f in families} == NAMES


def test_gateways_that_read_vllms_names_find_them_on_request() -> None:
    metrics = Metrics(also_as_vllm=True)
    metrics.attach(EngineStats(num_held=5, num_running=3), INFO, "tiny")
    families = {f.name for f in metrics.collect()}
    ours = {name for name in families if name.startswith("paceline:")}
    assert families - ours == {n.replace("paceline:", "vllm:") for n in ours} | {
        "vllm:cache_config_info"
    }
    found = samples(metrics.text().decode())
    assert found["vllm:num_requests_waiting"] == 2
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:kv_cache_usage_perc"] == 0
    named = "{block_size=16}{cache_dtype=float32}{num_gpu_blocks=512}"
    assert found[f"vllm:cache_config_info{named}"] == 1
    assert not any(f.name.startswith("vllm:") for f in Metrics().collect())


def test_totals_are_the_engines() -> None:
    stats = EngineStats(
        num_held=5,
        num_running=3,
        num_replicas=2,
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
    stats.newest[0] = Gauges(1, 0.375, snapshots=SnapshotStats(0.75, 4, 4, 3))
    stats.newest[1] = Gauges(2, 0.125, snapshots=SnapshotStats(0.25, 2, 3, 5))
    stats.finished.update(stop=2, abort=1)
    metrics = Metrics()
    metrics.attach(stats, INFO, "tiny")
    found = samples(metrics.text().decode())
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.25,
        "rank_num_requests_running{rank=0}": 1,
        "rank_num_requests_running{rank=1}": 2,
        "rank_kv_cache_usage_perc{rank=0}": 0.375,
        "rank_kv_cache_usage_perc{rank=1}": 0.125,
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
        "state_snapshot_usage_perc": 0.5,
        "state_snapshot_hits_total": 6,
        "state_snapshot_misses_total": 7,
        "state_snapshot_evictions_total": 8,
        "request_success_total{finished_reason=stop}": 2,
        "request_success_total{finished_reason=length}": 0,
        "request_success_total{finished_reason=abort}": 1,
        "request_success_total{finished_reason=error}": 0,
    }
    assert {name: found[f"paceline:{name}"] for name in expected} == expected


def test_every_rank_has_its_totals_and_the_reason_of_its_newest_restart() -> None:
    stats, metrics = EngineStats(num_replicas=2), Metrics()
    metrics.attach(stats, INFO, "tiny")
    result = StepResult.without_rows(1)
    result.num_drafts_B, result.num_accepted_B = np.array([3, 2]), np.array([2, 0])
    stats.take(StepMessage(result, events=Events(preempted=[7])), replica=1)
    for reason in ("rank 1: an older one", "rank 1 (replica 1): /a/b.py failed\ntraceback"):
        stats.lose(1, "died", reason)
    found = samples(metrics.text().decode())
    for number, expected in ((0, (0, 0, 0, 0)), (1, (2, 1, 5, 2))):
        names = ("restarts", "num_preemptions", "spec_decode_num_draft_tokens",
                 "spec_decode_num_accepted_tokens")  # fmt: skip
        values = [found[f"paceline:rank_{name}_total{{rank={number}}}"] for name in names]
        assert tuple(values) == expected
    told = [name for name in found if name.startswith("paceline:rank_last_restart")]
    (name,) = told
    assert name.endswith("{cause=died}{rank=1}{reason=rank 1 (replica 1): b.py failed}")
    assert found[name] == pytest.approx(stats.ranks[1].restarted_at_s)


def test_the_bubble_is_counted_step_by_step_and_not_where_the_device_was_free_to_rest() -> None:
    stats = EngineStats()
    metrics = Metrics()
    metrics.attach(stats, INFO, "tiny")
    for idle in ([RESTED, 0.0], [], [0.004], [0.000015, 0.000015]):
        times = [StepTimes(idle_s, 0.001, 0.0001) for idle_s in idle]
        gauges = Gauges(num_steps=len(times), times=times)
        stats.take(StepMessage(StepResult.without_rows(1), gauges=gauges))
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


def test_waiting_for_masks_and_forced_tokens_are_counted_where_there_were_some() -> None:
    stats, metrics = EngineStats(), Metrics()
    metrics.attach(stats, INFO, "tiny")
    result = StepResult.without_rows(1)
    result.num_forced_B = np.array([0, 3, 2], np.int32)
    times = [StepTimes(0.0, 0.001, 0.0001), StepTimes(0.0, 0.001, 0.0001, 0.002)]
    stats.take(StepMessage(result, gauges=Gauges(num_steps=2, times=times)))
    found = samples(metrics.text().decode())
    assert found["paceline:late_mask_wait_seconds_count"] == 1
    assert found["paceline:late_mask_wait_seconds_sum"] == pytest.approx(0.002)
    assert found["paceline:forced_tokens_total"] == 5


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


@pytest.mark.parametrize("compat", ["none", "vllm"])
def test_the_flag_adds_the_names_that_gateways_read(compat: str) -> None:
    with serving(FakeClient(), metrics_compat=compat) as server:
        lines = server.get("/metrics").body.decode().splitlines()
    found = {re.split(r"[{ ]", line)[0] for line in lines if line.startswith("vllm:")}
    stems = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    wanted = {f"vllm:{stem}" for stem in (*stems, "cache_config_info")}
    assert found & wanted == (wanted if compat == "vllm" else set())
    assert compat == "vllm" or not found


def test_log_lines_that_were_dropped_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "wb") as nowhere:
        stream = LossyStream(nowhere.fileno())
        stream.num_dropped = 3
        monkeypatch.setattr("sys.stderr", stream)
        text = Metrics().text().decode()
    assert 'paceline:log_lines_dropped_total{model_name=""} 3.0' in text
