"""Greedy tokens equal transformers' on every layout of ranks, with every drafter."""

from __future__ import annotations

import pytest

from paceline import LLM, SamplingParams
from tests.e2e.engines import tokens
from tests.e2e.ladder import PROMPTS, Workshop
from tests.parallel.layouts import (
    LayoutRung,
    all_rungs,
    block_rungs,
    few_rungs,
    hybrid_rungs,
    run_layout,
)
from tests.tiers import first_or_more

# One rung of each way to spread a model, and one of all ways together, on as few ranks as it takes.
FIRST = {
    ("tp2", "draft_model"),
    ("dp2", "none"),
    ("tp2-ep", "eagle3"),
    ("dp2-ep", "eagle"),
    ("tp2-dp2-ep", "ngram"),
}
FEW = first_or_more(few_rungs(), lambda what: (what.layout, what.rung.drafter) in FIRST)
BLOCKS = first_or_more(block_rungs(), lambda what: what == block_rungs()[0])

pytestmark = pytest.mark.usefixtures("_forks")


def check(what: LayoutRung, workshop: Workshop) -> None:
    tokens, seen = run_layout(what, workshop)
    assert tokens == workshop.expected(what.rung.family)
    if what.rung.drafter != "none" and what.rung.request_k == "all":
        assert 0 < seen["accepted"] < seen["drafted"], "nothing was proven"


@pytest.mark.trap("C1", "C15", "L-4", "L-7", "I2", "I3", "I5", "I7", "I8")
@pytest.mark.parametrize("what", FEW, ids=str)
def test_greedy_tokens_equal_the_reference(what: LayoutRung, workshop: Workshop) -> None:
    check(what, workshop)


@pytest.mark.parametrize("what", BLOCKS, ids=str)
def test_block_drafters_draft_on_every_layout(what: LayoutRung, workshop: Workshop) -> None:
    check(what, workshop)


def is_first_hybrid(what: LayoutRung) -> bool:
    return what.layout in ("tp2", "dp2-ep") and what.draft_tp is None


@pytest.mark.trap("C8")
@pytest.mark.parametrize("what", first_or_more(hybrid_rungs(), is_first_hybrid), ids=str)
def test_greedy_tokens_of_recurrent_models_equal_the_reference(
    what: LayoutRung, workshop: Workshop
) -> None:
    check(what, workshop)


@pytest.mark.slow
@pytest.mark.parametrize("what", all_rungs(), ids=str)
def test_greedy_tokens_equal_the_reference_everywhere(what: LayoutRung, workshop: Workshop) -> None:
    check(what, workshop)


def test_an_llm_starts_its_replicas_and_spreads_its_prompts(workshop: Workshop) -> None:
    """With nothing but the keyword. Dense replicas: one without requests would take no step."""
    with LLM(
        workshop.target_folder("llama"),
        data_parallel_size=2,
        dtype="float32",
        skip_tokenizer_init=True,
        cpu_threads=1,
    ) as llm:
        client = llm._client
        assert len(client.engine_pids) == 2
        client.start_trace()
        params = SamplingParams(temperature=0, max_tokens=workshop.max_tokens, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        spans = client.take_trace()
    assert [x[0] for x in tokens(outputs)] == workshop.expected("llama")
    assert {s.replica for s in spans if s.lane == "launch"} == {0, 1}
