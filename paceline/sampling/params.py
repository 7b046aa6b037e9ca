"""A request's sampling parameters as values of its slot's row. Host side; moves no tensor.

Checks nothing: `engine/checks.py` has checked that ids are in range and that tables fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.request import MAX_STOP_TOKEN_IDS, EngineRequest, SamplingParams
from paceline.sampling.processors import PROCESSORS, features_of, padded
from paceline.sampling.verify import SamplingMode
from paceline.state.slots import NUM_EOS_IDS, PROCESSOR_NUMBERS

# Below this temperature the quotients of two different logits lie beyond float32's range.
GREEDY_BELOW = 1e-5
_LEAST_TOP_P = float(np.finfo(np.float32).tiny)  # a smaller one would be 0 and keep no token


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW


def mode_of(request: EngineRequest, *, sampled_drafts: bool = False) -> SamplingMode:
    """The mode a request needs; `sampled_drafts` when the drafter is probabilistic."""
    if features_of(request):
        return SamplingMode.FULL
    if is_greedy(request.params):
        return SamplingMode.GREEDY
    return SamplingMode.FULL if sampled_drafts else SamplingMode.SAMPLE


def slot_rows(
    request: EngineRequest, max_len: int, prompt_len: int, *, vocab_size: int
) -> dict[str, Any]:
    """Tensor name of `Slots` -> the value of the request's row.

    Tables of features that the request does not use are left out: no kernel reads them.
    """
    params = request.params
    features = features_of(request)
    seed = params.seed or 0
    greedy = is_greedy(params)
    rows: dict[str, Any] = {
        "prompt_len_S": prompt_len,
        "max_len_S": max_len,
        "min_len_S": min(prompt_len + params.min_tokens, 2**31 - 1),
        "eos_ids_SE": padded(request.eos_token_ids, NUM_EOS_IDS),
        "stop_ids_SE": padded(params.stop_token_ids or (), MAX_STOP_TOKEN_IDS),
        "temperature_S": 0.0 if greedy else params.temperature,
        "top_k_S": 0 if greedy else params.top_k,
        "top_p_S": 1.0 if greedy else max(params.top_p, _LEAST_TOP_P),
        "min_p_S": 0.0 if greedy else params.min_p,
        "seed_S2": np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32).view(np.int32),
        "features_S": features,
        "num_logprobs_S": -1 if params.logprobs is None else params.logprobs,
    }
    numbers = PROCESSOR_NUMBERS.items()
    rows |= {name: getattr(params, x.param) for name, x in numbers if features & x.bit}
    for processor in PROCESSORS:
        if features & processor.bit:
            rows |= processor.rows(request, vocab_size)
    return rows
