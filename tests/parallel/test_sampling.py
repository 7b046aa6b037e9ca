"""Sampling on ranks that share a replica's layers: the tokens of one rank, with every feature.

Each rank samples for itself, with no token sent; every step's tokens are compared between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paceline import RequestOutput, SamplingParams
from tests.drafters.test_other_vocabulary import permuted_draft
from tests.drafters.test_other_vocabulary import spec_of as other_vocabulary
from tests.e2e.engines import NGRAM, draft_model, tiny_llm, tokens
from tests.e2e.ladder import PROMPTS, Workshop
from tests.parallel.layouts import open_ranks
from tests.tiers import first_or_more

pytestmark = pytest.mark.usefixtures("_forks")

FEATURES: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.0},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.3, "temperature": 0.0},
    {"logit_bias": {5: 3.0, 70: 2.0, 9: -100.0}},
    {"logprobs": 3, "temperature": 0.7},
    {"logprobs": 0, "prompt_logprobs": 2},
    {"n": 2, "top_k": 40},
    {"min_tokens": 6, "stop_token_ids": list(range(3, 60, 3))},
    {"allowed_token_ids": list(range(10, 90)), "logprobs": 2},
    {"temperature": 1.3},
]


@dataclass(frozen=True)
class Case:
    drafter: str
    draft_tp: int | None = None
    has_fixed_shapes: bool = False

    def __str__(self) -> str:
        whole = "-draft_tp1" if self.draft_tp == 1 else ""
        return f"{self.drafter}{whole}{'-fixed' if self.has_fixed_shapes else ''}"

    def spec(self, workshop: Workshop) -> dict[str, Any] | None:
        if self.drafter == "none":
            return None
        if self.drafter == "ngram":
            return NGRAM
        spec = draft_model(workshop, 3, draft_sample_method=self.drafter)
        return spec if self.draft_tp is None else spec | {"draft_tensor_parallel_size": 1}


CASES = [
    Case("none"),
    Case("ngram", has_fixed_shapes=True),
    Case("greedy"),
    Case("probabilistic", has_fixed_shapes=True),
    Case("probabilistic", 1),
    Case("coupled"),
]
EACH = first_or_more(CASES, lambda case: case.has_fixed_shapes)


def params() -> list[SamplingParams]:
    return [
        SamplingParams(**{"max_tokens": 24, "seed": 300 + i, "detokenize": False, **feature})
        for i, feature in enumerate(FEATURES)
    ]


# Room for all requests: no window is cut and none is preempted, so that sampled drafts repeat.
ROOMY: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 512}


def generate(llm: Any) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": p} for p in PROMPTS[: len(FEATURES)]]
    return llm.generate(prompts, params(), use_tqdm=False)  # type: ignore[no-any-return]


@cache
def on_one_rank(workshop: Workshop, case: Case) -> list[RequestOutput]:
    with tiny_llm(workshop, case.spec(workshop), **ROOMY) as llm:
        return generate(llm)


def assert_close(found: Sequence[Any] | None, expected: Sequence[Any] | None) -> None:
    """Tables of logprobs: the same tokens in them, and their values up to rounding."""
    assert (found is None) == (expected is None)
    for one, other in zip(found or (), expected or (), strict=True):
        assert (one is None) == (other is None)
        if one is None:
            continue
        assert next(iter(one)) == next(iter(other)), "the token itself comes first"
        for token in one.keys() & other.keys():
            assert one[token].logprob == pytest.approx(other[token].logprob, abs=2e-4)
        assert len(one.keys() ^ other.keys()) <= 2, "only ties at the end may differ"


@pytest.mark.parametrize("case", EACH, ids=str)
def test_two_ranks_sample_the_tokens_of_one(case: Case, workshop: Workshop) -> None:
    """One-hot drafts change no token, so all of them are compared with a run without drafts. With
    sampled drafts one rank has to draft alike: same seeds, same K, no preemption."""
    is_sampled = case.drafter == "probabilistic"
    alone = on_one_rank(workshop, Case("probabilistic") if is_sampled else Case("none"))
    spec = case.spec(workshop)
    values = {
        "model": workshop.target_folder("llama"),
        "speculative_config": spec,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 2,
        "cpu_threads": 1,
        **ROOMY,
    }
    with open_ranks(values, has_fixed_shapes=case.has_fixed_shapes) as llm:
        found = generate(llm)
    assert tokens(found) == tokens(alone)
    assert found[5].outputs[0].logprobs is not None
    assert found[6].prompt_logprobs is not None
    assert len(found[7].outputs) == 2
    assert found[8].outputs[0].finish_reason == "stop"
    for one, other in zip(found, alone, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert_close(a.logprobs, b.logprobs)
            assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        assert_close(one.prompt_logprobs, other.prompt_logprobs)
    if spec is not None:
        drafted = sum(o.metrics.num_draft_tokens for o in found)
        accepted = [sum(o.metrics.num_accepted_tokens for o in x) for x in (found, alone)]
        assert 0 < accepted[0] < drafted
        assert not is_sampled or accepted[0] == accepted[1]


def test_a_replica_that_scores_a_prompt_takes_the_others_along(workshop: Workshop) -> None:
    """Prompt scores read what the last layer makes of every token; else it computes few of them.
    Experts are spread, so all replicas have to hand out the same rows."""
    values = {
        "model": workshop.target_folder("mixtral"),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "cpu_threads": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
    }
    prompt = {"prompt_token_ids": PROMPTS[5] + PROMPTS[4]}
    assert len(prompt["prompt_token_ids"]) >= 64
    plain = SamplingParams(temperature=0, max_tokens=6, detokenize=False)
    scored = SamplingParams(temperature=0, max_tokens=6, detokenize=False, prompt_logprobs=1)
    with open_ranks(values, has_fixed_shapes=True) as llm:
        alone = llm.generate([prompt], plain, use_tqdm=False)
        found = llm.generate([prompt, prompt, prompt], [scored, plain, plain], use_tqdm=False)
    assert tokens(found) == [tokens(alone)[0]] * 3
    assert len(found[0].prompt_logprobs or ()) == len(prompt["prompt_token_ids"])


@pytest.mark.more
def test_a_draft_of_another_vocabulary_is_masked_on_every_rank(
    workshop: Workshop, tmp_path: Path
) -> None:
    target, draft = permuted_draft(workshop, tmp_path, missing=9)
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    values = {
        "model": target,
        "speculative_config": other_vocabulary(draft),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 2,
        "cpu_threads": 1,
        **ROOMY,
    }
    prompts = [{"prompt_token_ids": p} for p in PROMPTS[:4]]
    with tiny_llm(workshop, None, **ROOMY) as llm:
        alone = llm.generate(prompts, greedy, use_tqdm=False)
    with open_ranks(values) as llm:
        found = llm.generate(prompts, greedy, use_tqdm=False)
    assert tokens(found) == tokens(alone)
    assert sum(o.metrics.num_accepted_tokens for o in found) > 0
