"""What sampling parameters change in the logits: who asks for it, what the slot holds, the order.

A processor is a kernel of `kernels/processors`, which writes the logits of rows with its bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from paceline.kernels import table
from paceline.kernels.processors.reference import Penalties, Stops
from paceline.kernels.rows import FeatureMask, WindowRows
from paceline.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    EngineRequest,
)
from paceline.state.slots import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    CUSTOM,
    LOGPROBS,
    MIN_TOKENS,
    PENALTIES,
    PROCESSOR_NUMBERS,
    Slots,
)
from paceline.step import Ints

Where = tuple[Tensor, WindowRows, FeatureMask]


class Processor(NamedTuple):
    bit: int  # of features_S
    apply: Callable[[Where, Slots], None]
    # Whether a request asks for it. A processor of PROCESSOR_NUMBERS needs neither this nor `rows`.
    is_wanted: Callable[[EngineRequest], bool] = lambda request: False
    # Tensor name of `Slots` -> the value of the row, from a request and the vocabulary's size.
    rows: Callable[[EngineRequest, int], dict[str, Any]] = lambda request, vocab_size: {}


def features_of(request: EngineRequest) -> int:
    """The bits of features_S that a request needs."""
    params, features = request.params, 0
    for bit, param, neutral in PROCESSOR_NUMBERS.values():
        features |= bit if getattr(params, param) != neutral else 0
    for processor in PROCESSORS:
        features |= processor.bit if processor.is_wanted(request) else 0
    features |= LOGPROBS if params.logprobs is not None else 0
    return features | (CUSTOM if params.logits_processors else 0)


# ---- each in turn


def _keep_allowed(where: Where, slots: Slots) -> None:
    table.keep_allowed(*where, slots.allowed_bits_SV)


def _allowed_rows(request: EngineRequest, vocab_size: int) -> dict[str, Any]:
    return {"allowed_bits_SV": pack_bits(request.params.allowed_token_ids or (), vocab_size)}


def _ban_bad_words(where: Where, slots: Slots) -> None:
    table.ban_bad_words(*where, slots.tokens_SL, slots.bad_words_SEE)


def _bad_word_rows(request: EngineRequest, vocab_size: int) -> dict[str, Any]:
    words_EE = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
    for row, word in zip(words_EE, request.bad_word_ids, strict=False):
        row[-len(word) :] = word
    return {"bad_words_SEE": words_EE}


def _ban_early_stops(where: Where, slots: Slots) -> None:
    stops = Stops(slots.min_len_S, slots.eos_ids_SE, slots.stop_ids_SE)
    table.ban_early_stops(*where, stops)


def _add_bias(where: Where, slots: Slots) -> None:
    table.add_bias(*where, slots.bias_ids_SE, slots.bias_values_SE)


def _bias_rows(request: EngineRequest, vocab_size: int) -> dict[str, Any]:
    bias = request.params.logit_bias or {}
    values_E = np.zeros(MAX_LOGIT_BIAS, np.float32)
    values_E[: len(bias)] = list(bias.values())
    return {"bias_ids_SE": padded(bias, MAX_LOGIT_BIAS), "bias_values_SE": values_E}


def _apply_penalties(where: Where, slots: Slots) -> None:
    penalties = Penalties(slots.repetition_S, slots.presence_S, slots.frequency_S)
    table.apply_penalties(*where, slots.tokens_SL, slots.prompt_len_S, penalties)


PROCESSORS = (  # in the order in which they change the logits
    Processor(
        ALLOWED, _keep_allowed, lambda r: r.params.allowed_token_ids is not None, _allowed_rows
    ),
    Processor(BAD_WORDS, _ban_bad_words, lambda r: bool(r.bad_word_ids), _bad_word_rows),
    Processor(MIN_TOKENS, _ban_early_stops, lambda r: r.params.min_tokens > 0),
    Processor(BIAS, _add_bias, lambda r: bool(r.params.logit_bias), _bias_rows),
    Processor(PENALTIES, _apply_penalties),
)


def pack_bits(token_ids: Iterable[int], vocab_size: int) -> Ints:
    """int32 words with bit v % 32 of word v // 32 set for each id v."""
    flags = np.zeros((vocab_size + 31) // 32 * 32, np.bool_)
    flags[np.fromiter(token_ids, np.int64)] = True
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)


def padded(ids: Iterable[int], width: int) -> Ints:
    row = np.full(width, -1, np.int32)
    values = list(ids)
    row[: len(values)] = values
    return row
