"""A request's sampling parameters as values of its slot's row. Host side; moves no tensor.

Checks nothing: `engine/checks.py` has checked that ids are in range and that tables fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from paceline.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    EngineRequest,
    SamplingParams,
)
from paceline.sampling.verify import SamplingMode
from paceline.state.slots import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    CUSTOM,
    LOGPROBS,
    MIN_TOKENS,
    NUM_EOS_IDS,
    PROCESSOR_NUMBERS,
)
from paceline.step import Ints

# Below this temperature the quotients of two different logits lie beyond float32's range.
GREEDY_BELOW = 1e-5
_LEAST_TOP_P = float(np.finfo(np.float32).tiny)  # a smaller one would be 0 and keep no token


def features_of(request: EngineRequest) -> int:
    """The bits of features_S that a request needs."""
    params = request.params
    features = 0
    for bit, param, neutral in PROCESSOR_NUMBERS.values():
        features |= bit if getattr(params, param) != neutral else 0
    wanted = {
        BIAS: bool(params.logit_bias),
        BAD_WORDS: bool(request.bad_word_ids),
        ALLOWED: params.allowed_token_ids is not None,
        LOGPROBS: params.logprobs is not None,
        CUSTOM: bool(params.logits_processors),
        MIN_TOKENS: params.min_tokens > 0,
    }
    return features | sum(bit for bit, is_wanted in wanted.items() if is_wanted)


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
        "eos_ids_SE": _padded(request.eos_token_ids, NUM_EOS_IDS),
        "stop_ids_SE": _padded(params.stop_token_ids or (), MAX_STOP_TOKEN_IDS),
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
    if features & BIAS:
        bias = params.logit_bias or {}
        rows["bias_ids_SE"] = _padded(bias, MAX_LOGIT_BIAS)
        values = np.zeros(MAX_LOGIT_BIAS, np.float32)
        values[: len(bias)] = list(bias.values())
        rows["bias_values_SE"] = values
    if features & BAD_WORDS:
        table = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
        for row, word in zip(table, request.bad_word_ids, strict=False):
            row[-len(word) :] = word
        rows["bad_words_SEE"] = table
    if features & ALLOWED:
        rows["allowed_bits_SV"] = pack_bits(params.allowed_token_ids or (), vocab_size)
    return rows


def pack_bits(token_ids: Iterable[int], vocab_size: int) -> Ints:
    """int32 words with bit v % 32 of word v // 32 set for each id v."""
    flags = np.zeros((vocab_size + 31) // 32 * 32, np.bool_)
    flags[np.fromiter(token_ids, np.int64)] = True
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)


def _padded(ids: Iterable[int], width: int) -> Ints:
    row = np.full(width, -1, np.int32)
    values = list(ids)
    row[: len(values)] = values
    return row
