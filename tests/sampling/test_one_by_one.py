"""A window that emits several tokens behaves as if they came one by one, whatever is asked for."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request import EngineRequest, SamplingParams
from tests.sampling.simulation import Drafter, NoiseModel, Output, Simulation, one_by_one

VOCAB = 19
EOS = 3
TOKEN = st.integers(0, VOCAB - 1)


def request(
    prompt: list[int], *, bad_words: tuple[tuple[int, ...], ...] = (), **params: Any
) -> EngineRequest:
    params = {"seed": 1, "max_tokens": 14, **params}
    return EngineRequest(
        uid=1,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        eos_token_ids=(EOS,),
        bad_word_ids=bad_words,
    )


@st.composite
def requests(draw: st.DrawFn) -> EngineRequest:
    def maybe(strategy: st.SearchStrategy[Any], default: Any) -> Any:
        return draw(st.one_of(st.just(default), strategy))

    params = {
        "temperature": draw(st.sampled_from([0.0, 1e-6, 0.4, 1.0, 1.7])),
        "top_k": maybe(st.integers(1, VOCAB + 2), 0),
        "top_p": maybe(st.sampled_from([0.1, 0.6, 0.95]), 1.0),
        "min_p": maybe(st.sampled_from([0.01, 0.2]), 0.0),
        "presence_penalty": maybe(st.sampled_from([-1.5, 0.7, 2.0]), 0.0),
        "frequency_penalty": maybe(st.sampled_from([-0.8, 0.3, 1.1]), 0.0),
        "repetition_penalty": maybe(st.sampled_from([0.6, 1.3, 3.0]), 1.0),
        "logit_bias": maybe(st.dictionaries(TOKEN, st.sampled_from([-100.0, -2.5, 3.5])), None),
        "allowed_token_ids": maybe(st.lists(TOKEN, min_size=8, unique=True), None),
        "min_tokens": maybe(st.integers(1, 6), 0),
        "stop_token_ids": maybe(st.lists(TOKEN, max_size=2, unique=True), None),
        "seed": draw(st.integers(-(2**63), 2**63 - 1)),
        "logprobs": maybe(st.integers(0, VOCAB), None),
        "max_tokens": draw(st.integers(6, 16)),
    }
    word = st.lists(TOKEN, min_size=1, max_size=3).map(tuple)
    words = maybe(st.lists(word, max_size=3, unique_by=lambda w: w[-1]).map(tuple), ())
    return request(draw(st.lists(TOKEN, min_size=1, max_size=5)), bad_words=words, **params)


def oracle(outputs: list[Output], prompts: list[int], seed: int) -> Drafter:
    """Mostly right drafts: what the request will say, with mistakes and gaps at random."""
    generator = np.random.default_rng(seed)

    def drafts(i: int, history: list[int], k: int) -> list[int]:
        ahead = outputs[i].tokens[len(history) - prompts[i] :][:k]
        ahead += generator.integers(0, VOCAB, k - len(ahead)).tolist()
        chance = generator.random(k)
        wrong = generator.integers(0, VOCAB, k)
        drawn = [int(w) if c < 0.15 else a for a, w, c in zip(ahead, wrong, chance, strict=True)]
        cut = int(generator.integers(0, k + 1)) if generator.random() < 0.3 else k
        return drawn[:cut]

    return drafts


def assert_same(one: Output, other: Output) -> None:
    assert (one.tokens, one.done) == (other.tokens, other.done)
    assert len(one.chosen) == len(other.chosen)
    assert np.allclose(one.chosen, other.chosen, atol=1e-4)
    for mine, theirs in zip(one.top, other.top, strict=True):
        assert list(mine) == list(theirs)
        assert np.allclose(list(mine.values()), list(theirs.values()), atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=4), st.integers(0, 2**31))
def test_sampling_equals_the_definition(batch: list[EngineRequest], seed: int) -> None:
    model = NoiseModel(VOCAB, seed)
    for mine, wanted in zip(
        Simulation(batch, model).run(), [one_by_one(r, model) for r in batch], strict=True
    ):
        assert_same(mine, wanted)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(requests(), min_size=1, max_size=4),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_windows_of_any_width_emit_the_same_tokens(
    batch: list[EngineRequest], k: int, padded: bool, seed: int
) -> None:
    model = NoiseModel(VOCAB, seed)
    wanted = [one_by_one(r, model) for r in batch]
    drafter = oracle(wanted, [len(r.prompt_token_ids) for r in batch], seed)
    for mine, one in zip(
        Simulation(batch, model).run(k, drafter, padded=padded), wanted, strict=True
    ):
        assert_same(mine, one)


def test_right_drafts_are_accepted_and_save_steps() -> None:
    model = NoiseModel(VOCAB, 5)
    batch = [request([1, 2], temperature=t, max_tokens=12, logit_bias={EOS: -100}) for t in (0, 1)]
    wanted = [one_by_one(r, model) for r in batch]

    def right(i: int, history: list[int], k: int) -> list[int]:
        return wanted[i].tokens[len(history) - 2 :][:k]

    for out in Simulation(batch, model).run(3, right):
        assert out.num_steps == 3
        assert out.num_accepted == 9
        assert out.num_drafts == 9


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "filters": {"top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.4},
    "bias": {"logit_bias": {4: 5.0, 7: -100.0}},
    "bad words": {"bad_words": ((5,), (2, 6), (4, 4, 8))},
    "allowed": {"allowed_token_ids": [3, 4, 5, 6, 8, 9, 10, 11, 12]},
    "min tokens": {"min_tokens": 5, "stop_token_ids": [9, 10, 11]},
    "logprobs": {"logprobs": 4},
    "custom": {"logits_processors": ["tests.sampling.processors:BanLastToken"]},
}


@pytest.mark.trap("E12")
@pytest.mark.parametrize("k", [0, 3])
def test_every_pair_of_features_in_one_batch_equals_each_request_alone(k: int) -> None:
    pairs = [*combinations(FEATURES, 2), *((name, name) for name in FEATURES), ()]
    batch = []
    for i, names in enumerate(pairs):
        params: dict[str, Any] = {"seed": i}
        for name in names:
            params.update(FEATURES[name])
        batch.append(request([1 + i % 7, 2], **params))
    model = NoiseModel(VOCAB, 11)
    loaded = ["tests.sampling.processors:BanLastToken"]
    alone = [Simulation([r], model, processors=loaded).run()[0] for r in batch]
    drafter = oracle(alone, [2] * len(batch), seed=k)
    for mine, one in zip(
        Simulation(batch, model, processors=loaded).run(k, drafter), alone, strict=True
    ):
        assert_same(mine, one)


@pytest.mark.trap("E11")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("min_tokens", [1, 3, 5])
def test_no_stop_token_comes_before_min_tokens(temperature: float, k: int, min_tokens: int) -> None:
    # EOS and a stop token are almost certain everywhere, and every draft proposes one of them.
    params: dict[str, Any] = {
        "logit_bias": {EOS: 60.0, 7: 60.0},
        "stop_token_ids": [7],
        "max_tokens": 12,
    }
    batch = [
        request([5], temperature=temperature, min_tokens=min_tokens, seed=i, **params)
        for i in range(6)
    ]
    model = NoiseModel(VOCAB, 2)
    wanted = [one_by_one(r, model) for r in batch]

    def stops(i: int, history: list[int], k: int) -> list[int]:
        ahead = wanted[i].tokens[len(history) - 1 :][:k]
        return (ahead + [EOS, 7] * k)[:k] if i % 2 else [EOS, 7, EOS, 7][:k]

    for out, one in zip(Simulation(batch, model).run(k, stops), wanted, strict=True):
        assert_same(out, one)
        assert len(out.tokens) == min_tokens + 1
        assert not {EOS, 7} & set(out.tokens[:-1])
        assert out.tokens[-1] in (EOS, 7)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_bad_words_hold_when_they_begin_in_the_drafts(temperature: float, k: int) -> None:
    words = ((4, 5), (5, 6), (6, 6, 4), (5, 4, 4, 6))
    params: dict[str, Any] = {"allowed_token_ids": [4, 5, 6], "temperature": temperature}
    batch = [request([1 + i, 4], bad_words=words, seed=i, **params) for i in range(8)]
    model = NoiseModel(VOCAB, 3)
    wanted = [one_by_one(r, model) for r in batch]
    drafter = oracle(wanted, [2] * len(batch), seed=k)

    def within(i: int, history: list[int], k: int) -> list[int]:
        return [draft if draft in (4, 5, 6) else 5 for draft in drafter(i, history, k)]

    for out, one in zip(Simulation(batch, model).run(k, within), wanted, strict=True):
        assert_same(out, one)
        said = [4, *out.tokens]
        for word in words:
            pieces = [tuple(said[i : i + len(word)]) for i in range(len(said))]
            assert word not in pieces
