"""A request's sampling parameters as values of its slot's row. Host side; moves no tensor.

Over capacity or out of range is an InvalidRequest that says the limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from paceline.errors import InvalidRequest
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
    PENALTIES,
)
from paceline.step import Ints

# Below this a temperature only scales logits beyond float32's reach of one another.
GREEDY_BELOW = 1e-5
_LEAST_TOP_P = float(np.finfo(np.float32).tiny)  # less would be 0 in a slot, and keep no token


def features_of(request: EngineRequest) -> int:
    """The bits of features_S that a request needs."""
    params = request.params
    penalised = (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    )
    wanted = {
        PENALTIES: penalised,
        BIAS: bool(params.logit_bias),
        BAD_WORDS: bool(request.bad_word_ids),
        ALLOWED: params.allowed_token_ids is not None,
        LOGPROBS: params.logprobs is not None,
        CUSTOM: bool(params.logits_processors),
        MIN_TOKENS: params.min_tokens > 0,
    }
    return sum(bit for bit, is_wanted in wanted.items() if is_wanted)


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

    Tables of a feature that the request does not use are left out: nobody reads them.
    """
    params = request.params
    features = features_of(request)
    seed = params.seed or 0
    greedy = is_greedy(params)
    rows: dict[str, Any] = {
        "prompt_len_S": prompt_len,
        "max_len_S": max_len,
        "min_len_S": min(prompt_len + params.min_tokens, 2**31 - 1),
        "eos_ids_SE": _padded("eos_token_ids", request.eos_token_ids, NUM_EOS_IDS),
        "stop_ids_SE": _padded("stop_token_ids", params.stop_token_ids or (), MAX_STOP_TOKEN_IDS),
        "temperature_S": 0.0 if greedy else params.temperature,
        "top_k_S": 0 if greedy else params.top_k,
        "top_p_S": 1.0 if greedy else max(params.top_p, _LEAST_TOP_P),
        "min_p_S": 0.0 if greedy else params.min_p,
        "seed_S2": np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32).view(np.int32),
        "features_S": features,
        "num_logprobs_S": -1 if params.logprobs is None else params.logprobs,
    }
    if features & PENALTIES:
        rows["presence_S"] = params.presence_penalty
        rows["frequency_S"] = params.frequency_penalty
        rows["repetition_S"] = params.repetition_penalty
    if features & MIN_TOKENS:
        _check_ids("eos_token_ids", request.eos_token_ids, vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
    if features & BIAS:
        bias = params.logit_bias or {}
        _check_ids("logit_bias", bias, vocab_size)
        rows["bias_ids_SE"] = _padded("logit_bias", bias, MAX_LOGIT_BIAS)
        values = np.zeros(MAX_LOGIT_BIAS, np.float32)
        values[: len(bias)] = list(bias.values())
        rows["bias_values_SE"] = values
    if features & BAD_WORDS:
        rows["bad_words_SEE"] = _bad_words(request.bad_word_ids, vocab_size)
    if features & ALLOWED:
        allowed = params.allowed_token_ids or ()
        _check_ids("allowed_token_ids", allowed, vocab_size)
        rows["allowed_bits_SV"] = pack_bits(allowed, vocab_size)
    return rows


def pack_bits(token_ids: Iterable[int], vocab_size: int) -> Ints:
    """int32 words with bit v % 32 of word v // 32 set for each id v."""
    flags = np.zeros((vocab_size + 31) // 32 * 32, np.bool_)
    flags[np.fromiter(token_ids, np.int64)] = True
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)


def _bad_words(words: tuple[tuple[int, ...], ...], vocab_size: int) -> Ints:
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words become {len(words)} token sequences; at most {MAX_BAD_WORDS} are kept.",
            param="bad_words",
        )
    table = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
    for row, word in zip(table, words, strict=False):
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"a bad word has {len(word)} tokens; 1 to {MAX_BAD_WORD_TOKENS} are supported.",
                param="bad_words",
            )
        _check_ids("bad_words", word, vocab_size)
        row[-len(word) :] = word
    return table


def _padded(name: str, ids: Iterable[int], width: int) -> Ints:
    values = list(ids)
    if len(values) > width:
        raise InvalidRequest(
            f"{name} has {len(values)} entries; at most {width} are kept.", param=name
        )
    row = np.full(width, -1, np.int32)
    row[: len(values)] = values
    return row


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise InvalidRequest(
            f"{name} holds token id {outside[0]}; this model's ids are 0 to {vocab_size - 1}.",
            param=name,
        )
