"""Fixed-shape steps (what CUDA captures) on CPU tensors: the same tokens, feature by feature.

The kernels' torch references stand in for the GPU's; layouts, packets, the ring and the drafters'
passes are the ones that a GPU runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import SamplingParams
from paceline.config import EngineConfig
from paceline.parallel.placement import ONLY_RANK, RankPlace
from paceline.runner import startup
from paceline.runner.finding import Progress
from paceline.runner.startup_cuda import build_fixed_runner
from paceline.step import Runner
from tests.e2e.engines import NGRAM, draft_model, eagle3, run, tokens
from tests.e2e.ladder import AXES, PROMPTS, Rung, Workshop, pairwise
from tests.e2e.test_ladder import check


def build_on_cpu(config: EngineConfig, progress: Progress, place: RankPlace = ONLY_RANK) -> Runner:
    return build_fixed_runner(config, progress, place, torch.device("cpu"))


@pytest.fixture
def _fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every engine of this process runs fixed-shape steps."""
    monkeypatch.setattr(startup, "_build_cpu_runner", build_on_cpu)


FIXED_AXES = {**AXES, "family": ("llama", "qwen2", "qwen3"), "k": (1, 3, 7)}


@pytest.mark.usefixtures("_fixed")
@pytest.mark.parametrize("rung", pairwise(FIXED_AXES), ids=str)
def test_greedy_tokens_equal_the_reference_with_fixed_shapes(
    rung: Rung, workshop: Workshop
) -> None:
    check(rung, workshop)


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.1, "top_p": 0.8, "top_k": 20, "seed": 4},
    {"temperature": 0.7, "min_p": 0.1, "seed": 5, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0.8, "seed": 6, "logit_bias": {5: 3.0, 9: -2.0}, "min_tokens": 12},
    {"temperature": 0.0, "logprobs": 4, "prompt_logprobs": 2},
    {"temperature": 0.6, "seed": 7, "allowed_token_ids": list(range(3, 60)), "logprobs": 1},
    {"temperature": 1.0, "seed": 8, "stop_token_ids": [11, 12, 13]},
]


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model", "sampled drafts", "reduced"])
def test_every_sampling_feature_gives_the_tokens_of_the_cpu_path(
    drafter: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: dict[str, dict[str, Any] | None] = {
        "none": None,
        "ngram": NGRAM,
        "draft_model": draft_model(workshop, 3),
        "sampled drafts": draft_model(workshop, 3, draft_sample_method="probabilistic"),
        "reduced": eagle3(workshop, 3, draft_sample_method="probabilistic"),
    }
    spec = specs[drafter]
    params = [SamplingParams(max_tokens=24, detokenize=False, **p) for p in PARAMS]
    prompts = PROMPTS[2 : 2 + len(params)]
    wanted = run(workshop, prompts, params, spec)
    monkeypatch.setattr(startup, "_build_cpu_runner", build_on_cpu)
    found = run(workshop, prompts, params, spec)
    assert tokens(found) == tokens(wanted)
    for got, want in zip(found, wanted, strict=True):
        assert got.outputs[0].finish_reason == want.outputs[0].finish_reason
        assert_same_logprobs(got.outputs[0].logprobs, want.outputs[0].logprobs)
        assert_same_logprobs(got.prompt_logprobs, want.prompt_logprobs)


def test_a_step_may_open_several_pages_of_every_row(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of one token: a window of eight opens eight, in forty rows at once."""
    spec = {**NGRAM, "num_speculative_tokens": 7}
    options = {"block_size": 1, "max_num_seqs": 40, "max_num_batched_tokens": 400}
    prompts = [[*PROMPTS[11], 3 + i] for i in range(40)]
    params = SamplingParams(temperature=0, max_tokens=24, detokenize=False)
    wanted = run(workshop, prompts, params, spec, **options)
    monkeypatch.setattr(startup, "_build_cpu_runner", build_on_cpu)
    assert tokens(run(workshop, prompts, params, spec, **options)) == tokens(wanted)


@pytest.mark.usefixtures("_fixed")
def test_a_long_answer_in_a_roomy_pool_asks_for_no_more_pages_than_a_step_can_bring(
    workshop: Workshop,
) -> None:
    """Pages are taken in advance where there are plenty; a packet has room for some."""
    params = SamplingParams(temperature=0, max_tokens=230, ignore_eos=True, detokenize=False)
    options = {"block_size": 1, "max_num_seqs": 2, "num_gpu_blocks_override": 2048}
    outputs = run(workshop, PROMPTS[:2], params, NGRAM, **options)
    assert [len(x[0]) for x in tokens(outputs)] == [230, 230]


def assert_same_logprobs(got: Any, want: Any) -> None:
    assert (got is None) == (want is None)
    for one, other in zip(got or (), want or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert {k: v.rank for k, v in one.items()} == {k: v.rank for k, v in other.items()}
            values = [v.logprob for v in one.values()], [v.logprob for v in other.values()]
            assert values[0] == pytest.approx(values[1], abs=1e-4)
