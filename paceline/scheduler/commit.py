"""Selects what of a result is published: rows of live requests, new prompt log probabilities.

Never changes slots or pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from paceline.scheduler.events import Emitted
from paceline.scheduler.inflight import NO_REQUEST
from paceline.scheduler.live_request import LiveRequest
from paceline.step import Bools, StepPlan, StepResult, TokenLogprobs


def without_rows(emitted: Emitted, wasted: list[int]) -> Emitted:
    """The result without the rows of `wasted`, whose requests have ended."""
    if not wasted:
        return emitted
    if not any(emitted.count_B[row] or emitted.num_drafts_B[row] for row in wasted):
        # The rows hold no output, so clearing their uids is enough.
        emitted.uid_B = emitted.uid_B.copy()
        emitted.uid_B[wasted] = NO_REQUEST
        return emitted
    keep_B = np.ones(len(emitted.uid_B), np.bool_)
    keep_B[wasted] = False
    return Emitted(
        emitted.step,
        emitted.uid_B[keep_B],
        emitted.count_B[keep_B],
        emitted.token_BW[keep_B],
        emitted.done_B[keep_B],
        emitted.num_drafts_B[keep_B],
        emitted.num_accepted_B[keep_B],
        _renumber(emitted.logprobs, keep_B),
        _renumber(emitted.prompt_logprobs, keep_B),
    )


def _renumber(entries: Sequence[TokenLogprobs], keep_B: Bools) -> Sequence[TokenLogprobs]:
    if not entries:
        return ()
    new_row_B = np.cumsum(keep_B) - 1
    return [replace(e, row=int(new_row_B[e.row])) for e in entries if keep_B[e.row]]


def trim_prompt_logprobs(
    plan: StepPlan, result: StepResult, requests: Mapping[int, LiveRequest]
) -> list[TokenLogprobs]:
    """Drop prompt positions that were delivered before: a preempted prompt is computed again.

    Entry j of a chunk that starts at position s is about prompt token s + 1 + j.
    """
    entries = []
    for entry in result.prompt_logprobs:
        live = requests.get(int(plan.uid_B[entry.row]))
        if live is None:
            continue
        start = live.chunk_starts.pop(plan.step)
        known = min(max(live.num_prompt_logprobs - start, 0), len(entry.rank))
        live.num_prompt_logprobs = max(live.num_prompt_logprobs, start + len(entry.rank))
        if known:
            entry = replace(
                entry,
                ids=entry.ids[known:],
                values=entry.values[known:],
                rank=entry.rank[known:],
            )
        if len(entry.rank):
            entries.append(entry)
    return entries
