"""What /metrics shows: Prometheus families under vLLM's stems.

Counts are read from EngineStats when /metrics is requested. Latencies are recorded as they happen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from paceline.engine.stats import DIED, DRAINED, EngineStats
from paceline.observe.histogram import Histogram
from paceline.observe.stream import num_dropped_lines
from paceline.server.rank_metrics import rank_families
from paceline.step import RunnerInfo

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
# Shown from the start, so that a rate() over them has no gap at its beginning.
FINISH_REASONS = ("stop", "length", "abort", "error")
RESTART_CAUSES = (DIED, DRAINED)
# Name, attribute of EngineStats, help.
_GAUGES = (
    ("paceline:num_requests_running", "num_running", "Sequences in the running batch."),
    (
        "paceline:num_requests_waiting",
        "num_waiting",
        "Sequences that were submitted and do not run.",
    ),
    ("paceline:kv_cache_usage_perc", "kv_usage", "KV pages in use; 1 is all of them."),
    (
        "paceline:state_snapshot_usage_perc",
        "snapshot_usage",
        "Snapshots of recurrent state in use; 1 is all of them.",
    ),
    (
        "paceline:replicas_restarting",
        "num_restarting",
        "Replicas whose ranks restart now.",
    ),
)
# The same of each data-parallel rank: name, attribute of Gauges, help.
_RANK_GAUGES = (
    ("paceline:rank_num_requests_running", "num_running", "Sequences in a rank's running batch."),
    ("paceline:rank_kv_cache_usage_perc", "kv_usage", "KV pages of a rank in use; 1 is all."),
)
_COUNTERS = (
    (
        "paceline:requests_resumed_total",
        "num_resumed",
        "Sequences that went on elsewhere or after a restart when their engine had ended.",
    ),
    ("paceline:num_preemptions_total", "num_preemptions", "Preemptions."),
    ("paceline:prompt_tokens_total", "num_prompt_tokens", "Prompt tokens admitted."),
    (
        "paceline:generation_tokens_total",
        "num_generated_tokens",
        "Tokens generated and delivered.",
    ),
    (
        "paceline:prefix_cache_queries_total",
        "num_prompt_tokens",
        "Prompt tokens looked up in the prefix cache.",
    ),
    (
        "paceline:prefix_cache_hits_total",
        "num_cached_tokens",
        "Prompt tokens found in the prefix cache.",
    ),
    (
        "paceline:state_snapshot_hits_total",
        "num_snapshot_hits",
        "Admitted sequences that continued from a snapshot of recurrent state.",
    ),
    (
        "paceline:state_snapshot_misses_total",
        "num_snapshot_misses",
        "Admitted sequences whose known pages reached further than any snapshot.",
    ),
    (
        "paceline:state_snapshot_evictions_total",
        "num_snapshot_evictions",
        "Snapshots of recurrent state that were dropped for others or with their pages.",
    ),
    (
        "paceline:spec_decode_num_drafts_total",
        "num_drafts",
        "Rows that verified at least one draft token.",
    ),
    (
        "paceline:spec_decode_num_draft_tokens_total",
        "num_draft_tokens",
        "Draft tokens verified.",
    ),
    (
        "paceline:spec_decode_num_accepted_tokens_total",
        "num_accepted_tokens",
        "Draft tokens accepted, without bonus tokens.",
    ),
    (
        "paceline:forced_tokens_total",
        "num_forced_tokens",
        "Accepted draft tokens for which a grammar left no other choice.",
    ),
    (
        "paceline:wasted_rows_total",
        "num_wasted_rows",
        "Rows computed for sequences that had ended.",
    ),
)


class Latencies:
    """Latencies that the front measures, per sequence."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(FIRST_TOKEN_BOUNDS_S)
        # Time per token: tokens of one step share its time.
        self.inter_token_latency = Histogram(INTER_TOKEN_BOUNDS_S)
        self.e2e_request_latency = Histogram(END_TO_END_BOUNDS_S)


class Metrics:
    """The registry behind /metrics. Before `attach` all counts are 0."""

    def __init__(self, *, also_as_vllm: bool = False) -> None:
        self._model_name = ""
        self.stats = EngineStats()
        self._info = RunnerInfo(0, 0, 0, 0, 0, 0, 0)
        self._also_as_vllm = also_as_vllm
        self.latencies = Latencies()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def attach(self, stats: EngineStats, info: RunnerInfo, model_name: str) -> None:
        self.stats = stats
        self._info = info
        self._model_name = model_name

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        for family in (*self._families(), *rank_families(self.stats, self._model_name)):
            yield family
            if self._also_as_vllm:
                yield _as_vllm(family)
        if self._also_as_vllm:
            info = self._info
            sizes = {"block_size": str(info.page_size), "num_gpu_blocks": str(info.num_pages)}
            sizes["cache_dtype"] = info.kv_cache_dtype
            text = "Sizes and type of the KV cache, as labels."
            yield self._labels("vllm:cache_config_info", text, sizes)

    def _labels(self, name: str, text: str, values: Mapping[str, str]) -> Metric:
        """A gauge that is always 1: its labels are the message."""
        labels = {"model_name": self._model_name, **values}
        gauge = GaugeMetricFamily(name, text, labels=list(labels))
        gauge.add_metric(list(labels.values()), 1)
        return gauge

    def _families(self) -> Iterator[Metric]:
        stats, model, info = self.stats, [self._model_name], self._info
        yield self._labels(
            "paceline:engine_info",
            "Device, precision and drafter, as labels.",
            {"device": info.device, "dtype": info.dtype, "drafter": info.drafter},
        )
        for name, attribute, text in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(model, getattr(stats, attribute))
            yield gauge
        yield from self._by_rank()
        for name, attribute, text in _COUNTERS:
            yield self._counter(name, text, getattr(stats, attribute))
        yield self._counter(
            "paceline:log_lines_dropped_total",
            "Log lines of the server process that could not be written.",
            num_dropped_lines(),
        )
        yield self._counter_by(
            "paceline:request_success_total",
            "Sequences that ended, by finish reason.",
            "finished_reason",
            {reason: stats.finished.get(reason, 0) for reason in FINISH_REASONS},
        )
        yield self._counter_by(
            "paceline:engine_restarts_total",
            "Restarts of ranks, by cause: they died or hung, or a drain was asked for.",
            "cause",
            {cause: stats.restarts.get(cause, 0) for cause in RESTART_CAUSES},
        )
        yield self._counter_by(
            "paceline:spec_decode_num_accepted_tokens_per_pos_total",
            "Accepted draft tokens by position in the draft.",
            "position",
            {str(i): count for i, count in enumerate(stats.accepted_per_position)},
        )
        yield from self._histograms()

    def _by_rank(self) -> Iterator[GaugeMetricFamily]:
        for name, attribute, text in _RANK_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model_name", "rank"])
            for rank, newest in sorted(self.stats.newest.items()):
                gauge.add_metric([self._model_name, str(rank)], getattr(newest, attribute))
            yield gauge

    def _histograms(self) -> Iterator[HistogramMetricFamily]:
        latencies = self.latencies
        for name, text, values in (
            (
                "paceline:time_to_first_token_seconds",
                "From the request to its first token.",
                latencies.time_to_first_token,
            ),
            (
                "paceline:inter_token_latency_seconds",
                "Time per token after the first.",
                latencies.inter_token_latency,
            ),
            (
                "paceline:e2e_request_latency_seconds",
                "From the request to its last token.",
                latencies.e2e_request_latency,
            ),
            (
                "paceline:step_bubble_seconds",
                "Device idle time before each step that had work waiting.",
                self.stats.bubble,
            ),
            (
                "paceline:late_mask_wait_seconds",
                "Device time that a step waited for the masks of constrained requests.",
                self.stats.mask_wait,
            ),
        ):
            family = HistogramMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model_name], list(values.buckets()), values.sum)
            yield family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter_by(
        self, name: str, text: str, label: str, values: Mapping[str, float]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model_name, key], value)
        return family


def _as_vllm(family: Metric) -> Metric:
    """The same under vLLM's prefix, for gateways that read its names."""
    renamed = copy(family)
    renamed.name = family.name.replace("paceline:", "vllm:")
    renamed.samples = [
        sample._replace(name=sample.name.replace("paceline:", "vllm:")) for sample in family.samples
    ]
    return renamed
