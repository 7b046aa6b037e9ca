"""What /metrics shows: Prometheus families under vLLM's stems. Owns names, buckets and labels.

Counts are read from the engine's totals when somebody asks; only latencies are noted as they
happen. Knows no HTTP and no engine, just the shape of the totals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from paceline.observe.histogram import BUBBLE_BOUNDS_S, Histogram
from paceline.observe.stream import num_dropped_lines

FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
END_TO_END_BOUNDS_S = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# Shown from the start, so that a rate() over them never begins with a gap.
FINISH_REASONS = ("stop", "length", "abort", "error")


class EngineTotals(Protocol):
    """What the engine's client counts (engine.stats.EngineStats)."""

    num_running: int
    kv_usage: float
    num_wasted_rows: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def num_waiting(self) -> int: ...
    @property
    def accepted_per_position(self) -> Sequence[int]: ...
    @property
    def finished(self) -> Mapping[str, int]: ...
    @property
    def bubble(self) -> Histogram: ...


class Latencies:
    """What the front measures itself, per sequence."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.inter_token_latency = Histogram(INTER_TOKEN_BOUNDS_S)
        self.e2e_request_latency = Histogram(END_TO_END_BOUNDS_S)
        # A token's worth of waiting; tokens that came together share their step's time.
        self.inter_token = self.inter_token_latency.observe
        self.first_token = self.time_to_first_token.observe
        self.end_to_end = self.e2e_request_latency.observe


class _Nothing:
    """The totals of an engine that is still loading."""

    num_running = num_waiting = num_wasted_rows = num_preemptions = 0
    num_prompt_tokens = num_cached_tokens = num_generated_tokens = 0
    num_drafts = num_draft_tokens = num_accepted_tokens = 0
    kv_usage = 0.0
    bubble = Histogram(BUBBLE_BOUNDS_S)

    @property
    def accepted_per_position(self) -> Sequence[int]:
        return ()

    @property
    def finished(self) -> Mapping[str, int]:
        return {}


class Metrics:
    """The registry behind /metrics."""

    def __init__(self, model_name: str = "") -> None:
        self.model_name = model_name
        self.latencies = Latencies()
        self._totals: EngineTotals = _Nothing()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def attach(self, totals: EngineTotals, model_name: str) -> None:
        self._totals = totals
        self.model_name = model_name

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        totals, model = self._totals, self.model_name
        for name, text, value in _gauges(totals):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([model], value)
            yield gauge
        for name, text, value in _counters(totals):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([model], value)
            yield counter
        yield _labelled(
            "paceline:request_success_total",
            "Sequences that ended, by finish reason.",
            "finished_reason",
            {reason: totals.finished.get(reason, 0) for reason in FINISH_REASONS},
            model,
        )
        yield _labelled(
            "paceline:spec_decode_num_accepted_tokens_per_pos_total",
            "Accepted draft tokens by position in the draft.",
            "position",
            {str(i): count for i, count in enumerate(totals.accepted_per_position)},
            model,
        )
        yield from self._histograms()

    def _histograms(self) -> Iterator[HistogramMetricFamily]:
        model, latencies = self.model_name, self.latencies
        yield _histogram(
            "paceline:time_to_first_token_seconds",
            "From the request to its first token.",
            latencies.time_to_first_token,
            model,
        )
        yield _histogram(
            "paceline:inter_token_latency_seconds",
            "Time per token after the first.",
            latencies.inter_token_latency,
            model,
        )
        yield _histogram(
            "paceline:e2e_request_latency_seconds",
            "From the request to its last token.",
            latencies.e2e_request_latency,
            model,
        )
        yield _histogram(
            "paceline:step_bubble_seconds",
            "Device idle time before each step that had work waiting.",
            self._totals.bubble,
            model,
        )


def _gauges(totals: EngineTotals) -> Iterator[tuple[str, str, float]]:
    yield "paceline:num_requests_running", "Sequences in the running batch.", totals.num_running
    yield (
        "paceline:num_requests_waiting",
        "Sequences that were submitted and do not run.",
        totals.num_waiting,
    )
    yield "paceline:kv_cache_usage_perc", "KV pages in use; 1 is all of them.", totals.kv_usage


def _counters(totals: EngineTotals) -> Iterator[tuple[str, str, float]]:
    yield "paceline:num_preemptions_total", "Preemptions.", totals.num_preemptions
    yield "paceline:prompt_tokens_total", "Prompt tokens admitted.", totals.num_prompt_tokens
    yield (
        "paceline:generation_tokens_total",
        "Tokens generated and delivered.",
        totals.num_generated_tokens,
    )
    yield (
        "paceline:prefix_cache_queries_total",
        "Prompt tokens looked up in the prefix cache.",
        totals.num_prompt_tokens,
    )
    yield (
        "paceline:prefix_cache_hits_total",
        "Prompt tokens found in the prefix cache.",
        totals.num_cached_tokens,
    )
    yield (
        "paceline:spec_decode_num_drafts_total",
        "Rows that verified at least one draft token.",
        totals.num_drafts,
    )
    yield (
        "paceline:spec_decode_num_draft_tokens_total",
        "Draft tokens verified.",
        totals.num_draft_tokens,
    )
    yield (
        "paceline:spec_decode_num_accepted_tokens_total",
        "Draft tokens accepted; the bonus token is not one.",
        totals.num_accepted_tokens,
    )
    yield (
        "paceline:wasted_rows_total",
        "Rows computed for sequences that had ended.",
        totals.num_wasted_rows,
    )
    yield (
        "paceline:log_lines_dropped_total",
        "Log lines of the server process that could not be written.",
        num_dropped_lines(),
    )


def _labelled(
    name: str, text: str, label: str, values: Mapping[str, float], model: str
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=["model_name", label])
    for key, value in values.items():
        family.add_metric([model, key], value)
    return family


def _histogram(name: str, text: str, values: Histogram, model: str) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=["model_name"])
    family.add_metric([model], list(values.buckets()), values.sum)
    return family
