"""Metrics with a label `rank`: totals of each data-parallel rank, and why it was restarted."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paceline.engine.stats import EngineStats
from paceline.server.failures import short_reason

# Name, attribute of RankStats, help.
_COUNTERS = (
    ("paceline:rank_restarts_total", "num_restarts", "Restarts of a rank."),
    ("paceline:rank_num_preemptions_total", "num_preemptions", "Preemptions of a rank."),
    ("paceline:rank_prompt_tokens_total", "num_prompt_tokens", "Prompt tokens of a rank."),
    (
        "paceline:rank_prefix_cache_hits_total",
        "num_cached_tokens",
        "Prompt tokens found in the prefix cache of a rank.",
    ),
    (
        "paceline:rank_generation_tokens_total",
        "num_generated_tokens",
        "Tokens of a rank that were generated and delivered.",
    ),
    (
        "paceline:rank_spec_decode_num_draft_tokens_total",
        "num_draft_tokens",
        "Draft tokens that a rank verified.",
    ),
    (
        "paceline:rank_spec_decode_num_accepted_tokens_total",
        "num_accepted_tokens",
        "Draft tokens that a rank accepted.",
    ),
)


def rank_families(stats: EngineStats, model_name: str) -> Iterator[Metric]:
    ranks = [(str(number), stats.ranks[number]) for number in range(stats.num_replicas)]
    for name, attribute, text in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=["model_name", "rank"])
        for number, rank in ranks:
            counter.add_metric([model_name, number], getattr(rank, attribute))
        yield counter
    gauge = GaugeMetricFamily(
        "paceline:rank_last_restart_timestamp_seconds",
        "When the newest restart of a rank began, in Unix time, and why.",
        labels=["model_name", "rank", "cause", "reason"],
    )
    for number, rank in ranks:
        if rank.num_restarts:
            labels = [model_name, number, rank.cause, short_reason(rank.reason)]
            gauge.add_metric(labels, rank.restarted_at_s)
    yield gauge
