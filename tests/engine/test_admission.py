"""What cannot be served is refused with the field and the numbers; the rest is resolved once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.config import EngineConfig
from paceline.engine.admission import Admission
from paceline.engine.checks import RequestChecks
from paceline.engine.front import Front
from paceline.errors import InvalidRequest, PromptTooLong
from paceline.request import EngineRequest, SamplingParams
from paceline.step import RunnerInfo
from tests.engine.echo_client import EOS, byte_tokenizer

INFO = RunnerInfo(
    num_pages=100,
    page_size=16,
    num_slots=4,
    max_model_len=64,
    vocab_size=300,
    max_k=3,
    draft_lookahead=0,
)
TOKENIZER = byte_tokenizer()


def admission(info: RunnerInfo = INFO, *, with_text: bool = True, **options: Any) -> Admission:
    config = EngineConfig.from_keywords(**options)
    tokenizer = TOKENIZER if with_text else None
    return Admission(config, info, Front(tokenizer=tokenizer, eos_token_ids=(EOS,)))


def refusal(prompt: Any, params: SamplingParams | None = None, **options: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        admission(**options).check(prompt, params or SamplingParams())
    return caught.value


@pytest.mark.parametrize("prompt", [[], np.empty(0, np.int64)])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    error = refusal(prompt)
    assert error.param == "prompt"
    assert "empty" in str(error)


@pytest.mark.parametrize("prompt", [[1, 300], [-1, 2], [1 << 40]])
def test_a_token_id_out_of_range_is_refused_with_the_range(prompt: list[int]) -> None:
    error = refusal(prompt)
    assert error.param == "prompt"
    assert "299" in str(error)


@pytest.mark.parametrize("prompt", [[1.5], ["a"], [[1, 2]], [[1], [2, 3]], [None], [1 << 80]])
def test_a_prompt_that_is_no_list_of_integers_is_refused(prompt: Any) -> None:
    assert refusal(prompt).param == "prompt"


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers() -> None:
    error = refusal([1] * 64)
    assert isinstance(error, PromptTooLong)
    assert error.code == "context_length_exceeded"
    # litellm and others tell this error from others by how it begins.
    assert str(error).startswith("This model's maximum context length is 64 tokens")
    assert "63" in str(error)
    admission().check([1] * 63, SamplingParams())


def test_a_prompt_that_the_cache_cannot_hold_is_refused() -> None:
    small = RunnerInfo(2, 16, 4, 64, 300, 0, 0)
    with pytest.raises(PromptTooLong, match="room for 32") as caught:
        admission(small).check([1] * 40, SamplingParams())
    assert "--kv-cache-memory-bytes" in str(caught.value)
    assert str(caught.value).startswith("This model's maximum context length is 64 tokens")


def test_max_tokens_is_the_room_that_is_left() -> None:
    check = admission().check
    assert check([1] * 4, SamplingParams(max_tokens=None)).params.max_tokens == 60
    assert check([1] * 4, SamplingParams(max_tokens=100)).params.max_tokens == 60
    assert check([1] * 4, SamplingParams(max_tokens=7)).params.max_tokens == 7


def test_min_tokens_beyond_the_room_is_refused() -> None:
    error = refusal([1] * 60, SamplingParams(min_tokens=5, max_tokens=9))
    assert error.param == "min_tokens"
    assert "room for 4" in str(error)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_the_limit_are_refused(name: str) -> None:
    params = SamplingParams().replace(**{name: 6})
    error = refusal([1], params, max_logprobs=5)
    assert error.param == name
    assert "at most 5" in str(error)
    admission(max_logprobs=6).check([1], params)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [300]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"5": 1.0}),
        ("allowed_token_ids", [1, 2, 900]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_field(name: str, value: Any) -> None:
    assert refusal([1], SamplingParams(**{name: value})).param == name


def test_the_tables_of_a_request_are_looked_at_once_for_all_its_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand prompts with 40,000 allowed tokens held a server for 49 seconds."""
    looked: list[object] = []
    own, look = admission(), RequestChecks.check_params

    def counted(self: RequestChecks, request: EngineRequest) -> None:
        looked.append(request.params.allowed_token_ids)
        look(self, request)

    monkeypatch.setattr(RequestChecks, "check_params", counted)
    first, second = SamplingParams(allowed_token_ids=[5]), SamplingParams(allowed_token_ids=[6])
    checked = [own.check([i], params) for params in (first, second) for i in range(1, 4)]
    assert looked == [(5,), (6,)]
    assert [c.params.allowed_token_ids for c in checked] == [(5,)] * 3 + [(6,)] * 3
    assert [c.prompt_token_ids for c in checked] == [[1], [2], [3]] * 2


def test_more_allowed_tokens_than_there_are_is_refused() -> None:
    error = refusal([1], SamplingParams(allowed_token_ids=[5] * 301))
    assert error.param == "allowed_token_ids"
    assert "301 entries; the vocabulary has 300" in str(error)


def test_a_change_of_a_list_that_was_given_changes_no_parameters() -> None:
    ids, bias = [5], {5: 1.0}
    params = SamplingParams(allowed_token_ids=ids, logit_bias=bias)
    ids.append(999)
    bias[999] = 1.0
    assert params == SamplingParams(allowed_token_ids=[5], logit_bias={5: 1.0})


def test_more_drafts_than_the_engine_has_are_refused() -> None:
    error = refusal([1], SamplingParams(num_speculative_tokens=4))
    assert error.param == "num_speculative_tokens"
    assert "at most 3" in str(error)
    without = RunnerInfo(100, 16, 4, 64, 300, 0, 0)
    with pytest.raises(InvalidRequest, match="--speculative-config"):
        admission(without).check([1], SamplingParams(num_speculative_tokens=1))
    admission(without).check([1], SamplingParams(num_speculative_tokens=0))


@pytest.mark.parametrize(
    ("speculative", "more", "k"),
    [
        ({}, {}, None),
        ({"method": "ngram"}, {}, None),
        ({"method": "ngram_gpu", "num_speculative_tokens": 2}, {}, 2),
        ({"num_speculative_tokens": 0}, {}, 0),
        ({"method": "none"}, {}, 0),
        ({"method": "none", "num_speculative_tokens": 0}, {"num_speculative_tokens": 0}, 0),
        ({"num_speculative_tokens": 2}, {"num_speculative_tokens": 2}, 2),
    ],
)
def test_a_request_says_in_two_ways_how_many_drafts_it_wants(
    speculative: dict[str, Any], more: dict[str, Any], k: int | None
) -> None:
    params = SamplingParams(speculative=speculative, **more)
    assert params.num_speculative_tokens == k
    info = RunnerInfo(100, 16, 4, 64, 300, 3, 0, draft_methods=("ngram",))
    admission(info).check([1], params)
    assert params.replace(temperature=0.5).num_speculative_tokens == k


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"speculative": {"num_speculative_tokens": 1}, "num_speculative_tokens": 2},
            "asks for 1 drafts with method None, and num_speculative_tokens is 2; send one",
        ),
        ({"speculative": {"method": "none", "num_speculative_tokens": 1}}, "method 'none'"),
        ({"speculative": {"method": 5}}, "speculative.method must be a string, got 5"),
        ({"speculative": 3}, "speculative must be an object, got 3"),
        (
            {"speculative": {"synthetic_acceptance_rates": [0.5, 0.6]}},
            "synthetic_acceptance_rates must be a list of numbers .* none above the one before",
        ),
        (
            {"speculative": {"synthetic_acceptance_rates": "high"}},
            "synthetic_acceptance_rates must be a list of numbers",
        ),
        ({"speculative": {"k": 3}}, "Unknown field 'k' of speculative; it has method, num_spec"),
        ({"speculative": {"num_speculative_tokens": "2"}}, "num_speculative_tokens must be a num"),
    ],
)
def test_contradictions_about_drafts_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize("rejection", ["standard", "synthetic"])
def test_own_synthetic_rates_need_a_server_with_synthetic_acceptance(rejection: str) -> None:
    spec: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}
    if rejection == "synthetic":
        spec |= {"rejection_sample_method": rejection, "synthetic_acceptance_length": 2.0}
    info = RunnerInfo(100, 16, 4, 64, 300, 3, 0, draft_methods=("ngram",))
    check = admission(info, speculative_config=spec).check
    params = SamplingParams(speculative={"synthetic_acceptance_rates": [0.9, 0.5, 0.5]})
    if rejection == "synthetic":
        assert check([1], params).params.synthetic_acceptance_rates == [0.9, 0.5, 0.5]
        params = SamplingParams(speculative={"synthetic_acceptance_rates": [0.9, 0.5]})
    with pytest.raises(InvalidRequest, match=r"needs a server with .*synthetic.* its 3 drafts"):
        check([1], params)


def test_a_custom_processor_is_found_by_its_class_and_refused_when_unknown() -> None:
    loaded = ["my.rules:NoDigits", "my.rules:Upper", "other:Upper"]
    check = admission(logits_processors=loaded).check
    checked = check([1], SamplingParams(logits_processors=["NoDigits", "other:Upper"]))
    assert checked.params.logits_processors == ("my.rules:NoDigits", "other:Upper")
    with pytest.raises(InvalidRequest, match="ambiguous"):
        check([1], SamplingParams(logits_processors=["Upper"]))
    with pytest.raises(InvalidRequest, match=r"Did you mean 'my\.rules:NoDigits'"):
        check([1], SamplingParams(logits_processors=["my.rules:NoDigit"]))


def test_extra_args_that_cannot_cross_to_the_engine_are_refused() -> None:
    assert refusal([1], SamplingParams(extra_args={"a": object()})).param == "extra_args"


def test_end_of_sequence_ids_outside_the_vocabulary_are_left_out() -> None:
    """Such an id is never sampled; in the engine it made min_tokens fail."""
    front = Front(tokenizer=TOKENIZER, eos_token_ids=(300, EOS, -1))
    own = Admission(EngineConfig.from_keywords(), INFO, front)
    assert own.check([1], SamplingParams(min_tokens=1)).eos_token_ids == (EOS,)


def test_more_stop_ids_than_a_slot_keeps_are_refused_with_those_of_the_model() -> None:
    front = Front(tokenizer=TOKENIZER, eos_token_ids=tuple(range(20)))
    own = Admission(EngineConfig.from_keywords(), INFO, front)
    own.check([1], SamplingParams(stop_token_ids=range(20)))
    with pytest.raises(InvalidRequest, match="33 entries; at most 32") as caught:
        own.check([1], SamplingParams(stop_token_ids=range(21)))
    assert caught.value.param == "stop_token_ids"


def test_ignore_eos_takes_the_stop_ids_of_the_model_away() -> None:
    check = admission().check
    assert check([1], SamplingParams()).eos_token_ids == (EOS,)
    assert check([1], SamplingParams(ignore_eos=True)).eos_token_ids == ()


def test_more_stop_ids_than_a_slot_keeps_apart_go_to_the_others() -> None:
    eos = tuple(range(10, 20))
    config = EngineConfig.from_keywords()
    many = Admission(config, INFO, Front(tokenizer=None, eos_token_ids=eos))
    checked = many.check([1], SamplingParams(stop_token_ids=[5]))
    assert checked.eos_token_ids == eos[:8]
    assert checked.params.stop_token_ids == (5, 18, 19)


def test_bad_words_are_tokenised_with_and_without_a_leading_space() -> None:
    checked = admission().check([1], SamplingParams(bad_words=["cat", " dog"]))
    cat, dog = TOKENIZER.encode("cat"), TOKENIZER.encode("dog")
    # One token per byte here: the form with a space only puts a token before the other one.
    assert checked.bad_word_ids == (tuple(cat), tuple(dog))


def test_a_leading_space_that_changes_the_tokens_makes_a_second_form() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_tokens([" cat"])
    front = Front(tokenizer=tokenizer)
    own = Admission(EngineConfig.from_keywords(), INFO, front)
    checked = own.check([1], SamplingParams(bad_words=["cat"]))
    spaced = tokenizer.backend.token_to_id(" cat")
    assert checked.bad_word_ids == (tuple(TOKENIZER.encode("cat")), (spaced,))


def test_a_bad_word_of_spaces_is_taken_as_it_is() -> None:
    checked = admission().check([1], SamplingParams(bad_words=["  "]))
    assert checked.bad_word_ids == (tuple(TOKENIZER.encode("  ")),)


def test_bad_words_over_the_capacity_are_refused() -> None:
    assert "9 tokens" in str(refusal([1], SamplingParams(bad_words=["ninechars"])))
    with pytest.raises(InvalidRequest, match="65 entries; at most 64") as caught:
        SamplingParams(bad_words=[f"{n:03d}" for n in range(65)])
    assert caught.value.param == "bad_words"
    with pytest.raises(InvalidRequest, match=r"a word of 257 characters; .* at most 256"):
        SamplingParams(bad_words=["x" * 257])


def test_words_need_a_tokenizer() -> None:
    no_text = admission(with_text=False)
    with pytest.raises(InvalidRequest, match="skip_tokenizer_init"):
        no_text.check([1], SamplingParams(bad_words=["cat"]))
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        no_text.check([1], SamplingParams(stop=["cat"]))


def seeds(own: Admission, params: SamplingParams, first_uid: int) -> list[int | None]:
    checked = own.check([1], params)
    requests = own.split(checked, first_uid, priority=0, arrival_s=0.0)
    assert [r.uid for r in requests] == list(range(first_uid, first_uid + params.n))
    return [r.params.seed for r in requests]


def test_sequence_i_samples_with_seed_plus_i() -> None:
    assert seeds(admission(), SamplingParams(n=3, seed=40), 1) == [40, 41, 42]
    assert seeds(admission(), SamplingParams(n=2, seed=2**63 - 1), 1) == [2**63 - 1, -(2**63)]


def test_a_request_without_a_seed_gets_one_that_a_second_run_repeats() -> None:
    first = seeds(admission(), SamplingParams(n=2), 7)
    assert first == seeds(admission(), SamplingParams(n=2), 7)
    assert first[0] is not None
    assert first[1] is not None
    assert first[1] - first[0] == 1
    others = {seeds(admission(), SamplingParams(), uid)[0] for uid in range(100)}
    assert len(others) == 100
    assert first != seeds(admission(seed=1), SamplingParams(n=2), 7)


def test_only_one_of_n_sequences_computes_the_prompt_logprobs() -> None:
    own = admission()
    checked = own.check([1], SamplingParams(n=3, prompt_logprobs=2))
    requests = own.split(checked, 1, priority=5, arrival_s=1.5)
    assert [r.params.prompt_logprobs for r in requests] == [2, None, None]
    assert {(r.params.n, r.priority, r.arrival_s) for r in requests} == {(1, 5, 1.5)}
