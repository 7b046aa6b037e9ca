"""Row surgery on results: which rows of a step are published, and the masks of late rows.

Never changes slots or pages; it only selects and builds arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from paceline.scheduler.events import Emitted
from paceline.scheduler.inflight import NOBODY
from paceline.scheduler.live import LiveRequest
from paceline.step import Bools, Ints, LateMasks, StepPlan, StepResult, TokenLogprobs


def without_rows(emitted: Emitted, wasted: list[int]) -> Emitted:
    """What is left when nobody waits for the rows of `wasted`."""
    if not wasted:
        return emitted
    if not any(emitted.count_B[row] or emitted.num_drafts_B[row] for row in wasted):
        # The device had ended them before: nothing in these rows but a name to take off.
        emitted.uid_B = emitted.uid_B.copy()
        emitted.uid_B[wasted] = NOBODY
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
    """Each prompt position once: a preempted prompt is computed again, from its beginning.

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


def late_masks(
    plan: StepPlan, requests: Mapping[int, LiveRequest], vocab_size: int
) -> tuple[LateMasks, list[tuple[LiveRequest, Exception]]]:
    """Allowed tokens of the late rows, from what their requests have accepted so far, and the
    requests whose constraints could not say."""
    assert plan.late_B is not None
    row_R: Ints = np.flatnonzero(plan.late_B).astype(np.int32)
    mask_RWV = np.full((len(row_R), plan.k + 1, (vocab_size + 31) // 32), -1, np.int32)
    failed = []
    for index, row in enumerate(row_R.tolist()):
        live = requests.get(int(plan.uid_B[row]))
        if live is None or live.constraint is None:
            continue  # it ended in the step before: the device emits nothing for it
        drafts = live.drafts[: int(plan.k_B[row])]
        try:
            mask_RWV[index, : 1 + len(drafts)] = live.constraint.masks(drafts)
        except Exception as error:
            failed.append((live, error))
    return LateMasks(row_R, mask_RWV), failed
