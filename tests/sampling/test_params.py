"""A request's parameters become the values of its slot, or an error that names the limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.kernels.sampling.reference import Knobs, distributions, thresholds
from paceline.request import MAX_BAD_WORD_TOKENS, EngineRequest, SamplingParams
from paceline.sampling.params import mode_of, slot_rows
from paceline.sampling.processors import pack_bits
from paceline.sampling.verify import SamplingMode
from paceline.state.slots import BAD_WORDS, LOGPROBS, PENALTIES, Slots

VOCAB = 70


def engine_request(
    *, eos: tuple[int, ...] = (2,), bad_words: tuple[tuple[int, ...], ...] = (), **params: Any
) -> EngineRequest:
    return EngineRequest(
        uid=1,
        prompt_token_ids=[1, 2],
        params=SamplingParams(**{"seed": 1, **params}),
        eos_token_ids=eos,
        bad_word_ids=bad_words,
    )


def rows_of(request: EngineRequest) -> dict[str, Any]:
    return slot_rows(request, 50, 2, vocab_size=VOCAB)


def test_every_value_fits_its_tensor() -> None:
    slots = Slots(1, 64, 2, VOCAB, torch.device("cpu"))
    request = engine_request(
        bad_words=((1, 2), (3,)),
        logit_bias={5: 1.5},
        allowed_token_ids=[0, 69],
        min_tokens=3,
        repetition_penalty=1.2,
        logprobs=2,
        prompt_logprobs=1,
        stop_token_ids=[7],
        logits_processors=["a:B"],
    )
    for name, value in rows_of(request).items():
        tensor = getattr(slots, name)
        tensor[0] = torch.as_tensor(value)
        assert np.shape(value) == tuple(tensor.shape[1:]), name
    assert slots.min_len_S[0] == 5
    assert slots.max_len_S[0] == 50
    assert slots.bad_words_SEE[0, 0].tolist() == [-1] * (MAX_BAD_WORD_TOKENS - 2) + [1, 2]
    assert slots.bias_ids_SE[0, :2].tolist() == [5, -1]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32 + 5, -(2**63), 2**63 - 1])
def test_seed_is_split_into_halves_without_loss(seed: int) -> None:
    low, high = rows_of(engine_request(seed=seed))["seed_S2"].tolist()
    assert (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32 == seed & 0xFFFFFFFFFFFFFFFF


@pytest.mark.parametrize("top_p", [1e-300, 1e-50, 1e-38, 0.5])
def test_a_top_p_of_next_to_nothing_keeps_the_best_token(top_p: float) -> None:
    kept = torch.tensor(rows_of(engine_request(top_p=top_p))["top_p_S"], dtype=torch.float32)
    knobs = Knobs(*(torch.tensor([x]) for x in (1.0, 0, float(kept), 0.0)))
    prob_NV = distributions(torch.tensor([[0.0, 3.0, 1.0]]), knobs)
    assert prob_NV[0, 1] == 1
    assert thresholds(torch.tensor([[0.0, 3.0, 1.0]]), knobs) == 3.0


def test_allowed_bits_are_the_asked_ids() -> None:
    words = pack_bits([0, 31, 32, 69], VOCAB)
    assert words.dtype == np.int32
    assert len(words) == 3
    found = [v for v in range(VOCAB) if int(words[v // 32]) >> (v % 32) & 1]
    assert found == [0, 31, 32, 69]


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    request = engine_request(temperature=temperature, top_k=5, top_p=0.5, min_p=0.1)
    rows = rows_of(request)
    assert (rows["temperature_S"], rows["top_k_S"], rows["top_p_S"], rows["min_p_S"]) == (
        0,
        0,
        1,
        0,
    )
    assert mode_of(request) is SamplingMode.GREEDY


@pytest.mark.parametrize(
    ("params", "mode"),
    [
        ({"temperature": 0}, SamplingMode.GREEDY),
        ({"temperature": 0.5, "top_k": 3}, SamplingMode.SAMPLE),
        ({"temperature": 0, "presence_penalty": 0.1}, SamplingMode.FULL),
        ({"temperature": 0, "logprobs": 0}, SamplingMode.FULL),
        ({"temperature": 0, "min_tokens": 1}, SamplingMode.FULL),
        ({"temperature": 0, "logit_bias": {1: 1.0}}, SamplingMode.FULL),
        ({"temperature": 0, "allowed_token_ids": [1]}, SamplingMode.FULL),
        ({"temperature": 0, "logits_processors": ["a:B"]}, SamplingMode.FULL),
        ({"temperature": 0, "bad_words": ((1,),)}, SamplingMode.FULL),
    ],
)
def test_mode_is_the_least_that_serves_the_request(
    params: dict[str, Any], mode: SamplingMode
) -> None:
    assert mode_of(engine_request(**params)) is mode


def test_sampled_drafts_need_the_full_tail_unless_the_request_is_greedy() -> None:
    assert mode_of(engine_request(temperature=1.0), sampled_drafts=True) is SamplingMode.FULL
    assert mode_of(engine_request(temperature=0.0), sampled_drafts=True) is SamplingMode.GREEDY


def test_tables_of_unused_features_are_left_out() -> None:
    rows = rows_of(engine_request())
    assert rows["features_S"] == 0
    assert not {"bias_ids_SE", "bad_words_SEE", "allowed_bits_SV", "repetition_S"} & set(rows)
    penalised = rows_of(engine_request(presence_penalty=1.0, logprobs=3, bad_words=((1,),)))
    assert penalised["features_S"] == PENALTIES | LOGPROBS | BAD_WORDS
    assert penalised["repetition_S"] == 1.0
