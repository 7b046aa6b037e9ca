"""How the drafts of one request did, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.server.replies import SpecDecodeMetrics


def spec_decode_metrics(
    steps: Sequence[tuple[int, int]], max_k: int, *, detailed: bool
) -> SpecDecodeMetrics:
    """`steps`: drafts verified and accepted by each step that had some."""
    # Forced tokens of a grammar are drafts too, and may be more.
    histogram = [0] * (max([max_k, *(accepted for _, accepted in steps)]) + 1)
    for _, accepted in steps:
        histogram[accepted] += 1
    num_drafted = sum(drafted for drafted, _ in steps)
    num_accepted = sum(accepted for _, accepted in steps)
    metrics = SpecDecodeMetrics(
        mean_acceptance_length=1 + num_accepted / max(1, len(steps)),
        draft_acceptance_rate=num_accepted / max(1, num_drafted),
        acceptance_histogram=histogram,
        num_spec_steps=len(steps),
        num_accepted_draft_tokens=num_accepted,
        num_draft_tokens=num_drafted,
        num_spec_tokens=max_k,
    )
    if detailed:
        metrics.per_step_accepted = [accepted for _, accepted in steps]
        metrics.per_step_drafted = [drafted for drafted, _ in steps]
    return metrics
