"""Two dummy steps before the first request, so that lazy compilation happens before traffic.

They use slot 0 and the first pages, which admission overwrites.
"""

from __future__ import annotations

import numpy as np

from paceline.request import EngineRequest, SamplingParams
from paceline.step import Runner, SlotInit, StepPlan

_PROMPT = (0, 0)


def warm_up(runner: Runner, *, is_joint: bool = False) -> None:
    """A prompt, then a window of drafts. `is_joint`: all replicas do so at the same time."""
    info = runner.info
    longest = len(_PROMPT) + 2 * (info.max_k + 1) + info.draft_lookahead + 1
    num_pages = -(-longest // info.page_size)
    if longest > info.max_model_len or num_pages > info.num_pages:
        return
    params = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
    init = SlotInit(
        slot=0,
        request=EngineRequest(0, list(_PROMPT), params),
        tokens=np.array(_PROMPT, np.int32),
        prompt_len=len(_PROMPT),
        num_cached=0,
        max_len=longest,
        pages=np.arange(num_pages, dtype=np.int32),
    )
    window = info.max_k
    plans = [
        _plan(-2, window, [len(_PROMPT)], 0, longest),
        _plan(-1, window, [1 + window], window, longest),
        _plan(0, 0, [], 0, longest),  # when its result is there, the drafts of the others are
    ]
    plans[0].admissions = [init]
    for plan in plans:
        if is_joint:
            plan.agreed = runner.step_size(plan)
        runner.launch(plan).wait()


def _plan(step: int, k: int, num_tokens: list[int], drafts: int, bound: int) -> StepPlan:
    """Of one row, or of none."""
    rows = len(num_tokens)
    return StepPlan(
        step=step,
        k=k,
        uid_B=np.zeros(rows, np.int64),
        slot_B=np.zeros(rows, np.int32),
        query_len_B=np.array(num_tokens, np.int32),
        k_B=np.full(rows, drafts, np.int32),
        samples_B=np.ones(rows, np.bool_),
        length_bound_B=np.full(rows, bound, np.int32),
    )
