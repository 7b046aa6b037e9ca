"""Ranks on GPUs: several that share one, one that talks to itself in its graphs, one GPU for each.

The last kind needs as many GPUs as ranks and is skipped where there are fewer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from tests.e2e.engines import tokens
from tests.e2e.ladder import PROMPTS, Workshop
from tests.e2e.loop import add_all, finish, request
from tests.gpu.engines import (
    DEVICE,
    IS_REHEARSAL,
    GpuEngine,
    gpu_engine,
    knows_family,
    open_llm,
    open_ranks,
)
from tests.parallel.layouts import LAYOUTS

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=40, detokenize=False)
EXCHANGES = ("allgather_reducescatter", "alltoall")


def options_of(workshop: Workshop, family: str, drafter: str, k: int = 3) -> dict[str, Any]:
    """A family and a drafter for it; its own MTP layer where that is to draft."""
    is_known = {"deepseek-v3": "deepseek_v3", "glm4-moe-lite": "glm4_moe_lite"}
    if not knows_family(is_known.get(family, family)):
        pytest.skip(f"this version of transformers does not know {family}")
    spec: dict[str, Any] | None = None
    model = workshop.target_folder(family)
    if drafter != "none":
        spec = {"method": drafter, "num_speculative_tokens": k, "adaptive": False}
    if drafter == "mtp":
        model = workshop.head_folder(family, "mtp")
    elif spec is not None:
        is_model = drafter == "draft_model"
        draft = workshop.draft_folder(family) if is_model else workshop.head_folder(family, drafter)
        spec["model"] = draft
    return {
        "model": model,
        "speculative_config": spec,
        "dtype": "float32",
        "device": DEVICE,
        "skip_tokenizer_init": True,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
    }


def generate(llm: LLM) -> tuple[list[list[int]], int]:
    """All prompts at once, then one alone, which must have the same tokens; accepted drafts."""
    prompts = [{"prompt_token_ids": list(p)} for p in PROMPTS]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    accepted = sum(o.metrics.num_accepted_tokens for o in outputs)
    found = [x[0] for x in tokens(outputs)]
    (alone,) = tokens(llm.generate(prompts[4:5], GREEDY, use_tqdm=False))
    assert alone[0] == found[4]
    return found, accepted


# ---- several ranks on one GPU


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe-lite"])
def test_two_replicas_that_share_a_gpu_and_their_experts_give_the_tokens_of_one_rank(
    workshop: Workshop, family: str, exchange: str
) -> None:
    options = options_of(workshop, family, "mtp") | {"all2all_backend": exchange}
    with open_ranks(**options, **LAYOUTS["dp2-ep"], share_gpu=True) as llm:
        found, accepted = generate(llm)
    with open_llm(**options) as llm:
        expected, alone = generate(llm)
    assert found == expected == workshop.expected(family)
    assert accepted == alone > 0


@pytest.mark.parametrize(
    ("layout", "family", "drafter"),
    [
        ("tp2", "llama", "eagle"),
        ("tp2", "mixtral", "draft_model"),
        ("tp2-dp2-ep", "deepseek-v3", "mtp"),
    ],
)
def test_layouts_on_one_gpu_give_the_tokens_of_one_rank(
    workshop: Workshop, layout: str, family: str, drafter: str
) -> None:
    options = options_of(workshop, family, drafter)
    with open_ranks(**options, **LAYOUTS[layout], share_gpu=True) as llm:
        found, accepted = generate(llm)
    assert found == workshop.expected(family)
    assert accepted > 0


# ---- collectives inside captured steps


@pytest.mark.parametrize(
    ("family", "drafter"), [("mixtral", "eagle"), ("deepseek-v3", "mtp"), ("llama", "draft_model")]
)
def test_a_rank_that_talks_to_itself_replays_its_collectives(
    workshop: Workshop, family: str, drafter: str
) -> None:
    """NCCL groups of one in every layer, captured with the step that holds them."""
    options = options_of(workshop, family, drafter) | {"force_collectives": True}
    options["enable_expert_parallel"] = True  # and no comparing, for which the host must be asked
    options["enable_prefix_caching"] = False  # the second round has the steps of the first
    model, spec = options.pop("model"), options.pop("speculative_config")
    outputs = [output[:20] for output in workshop.expected(family)]
    with gpu_engine(model, spec, **options) as gpu:
        groups = gpu.runner._device.groups
        assert groups.tp.is_active
        assert groups.dp.is_active
        assert groups.exchange.is_capturable
        serve_all(gpu, first_uid=0)
        before = dict(groups.contract._numbers)  # collectives announced so far, by group
        with gpu.only_replays(20):
            serve_all(gpu, first_uid=len(PROMPTS))
        assert gpu.published == dict(enumerate([*outputs, *outputs]))
        assert before.keys() == ({"tp"} if family == "llama" else {"tp", "dp"})
        if not IS_REHEARSAL:
            # What was captured runs without the host, so nothing new is announced.
            assert groups.contract._numbers == before


def serve_all(gpu: GpuEngine, first_uid: int) -> None:
    add_all(gpu.engine, [request(i, p) for i, p in enumerate(PROMPTS, first_uid)])
    finish(gpu.engine)


def test_a_rank_that_talks_to_itself_uses_no_graph_where_counts_are_read(
    workshop: Workshop,
) -> None:
    options = options_of(workshop, "mixtral", "none") | {"all2all_backend": "alltoall"}
    options |= {"force_collectives": True, "enable_expert_parallel": True}
    with gpu_engine(options.pop("model"), options.pop("speculative_config"), **options) as gpu:
        add_all(gpu.engine, [request(i, p) for i, p in enumerate(PROMPTS[:4])])
        finish(gpu.engine)
        assert gpu.runner.stats["num_replays"] == 0
        expected = workshop.expected("mixtral")[:4]
        assert gpu.published == {i: output[:20] for i, output in enumerate(expected)}


# ---- a GPU for each rank


CASES = [
    ("tp2", "llama", "draft_model"),
    ("tp2", "llama", "eagle3"),
    ("tp2", "mixtral", "none"),
    ("dp2", "llama", "eagle"),
    ("tp2-ep", "mixtral", "eagle"),
    ("dp2-ep", "mixtral", "eagle"),
    ("dp2-ep", "deepseek-v3", "mtp"),
    ("dp2-ep", "glm4-moe-lite", "mtp"),
    ("tp2-dp2-ep", "deepseek-v3", "mtp"),
]
# An exchange that reads counts is never captured.
HOWS = [(*case, how) for case in CASES for how in ("graphs", "eager")]
HOWS += [(*case, "alltoall") for case in CASES if case[0].endswith("ep")]


@pytest.mark.multi_gpu
@pytest.mark.parametrize(("layout", "family", "drafter", "how"), HOWS)
def test_ranks_with_a_gpu_each_give_the_tokens_of_one(
    workshop: Workshop, layout: str, family: str, drafter: str, how: str
) -> None:
    values = LAYOUTS[layout]
    needs_gpus(values.get("tensor_parallel_size", 1) * values.get("data_parallel_size", 1))
    options = options_of(workshop, family, drafter)
    options["all2all_backend"] = EXCHANGES[how == "alltoall"]
    # Comparing every collective needs the host, which captured ones do not ask.
    options |= {"enforce_eager": how != "graphs", "check_collectives": how != "graphs"}
    with open_ranks(**options, **values) as llm:
        found, accepted = generate(llm)
    assert found == workshop.expected(family)
    assert accepted > 0 or drafter == "none"


def needs_gpus(count: int) -> None:
    here = torch.cuda.device_count()
    if here < count and not IS_REHEARSAL:
        pytest.skip(f"needs {count} GPUs, {here} are here")
