"""Recurrent layers end to end: the ladder for Qwen3.5, dense and with experts, and Qwen3-Next.

Every rung runs in both layouts: the CPU's own, and the fixed shapes that CUDA captures.
"""

from __future__ import annotations

import pytest

from paceline import LLM
from paceline.errors import CheckpointError
from paceline.runner import startup
from tests.e2e.ladder import AXES, Rung, Workshop, each_drafter, each_value, pairwise
from tests.e2e.test_fixed_steps import padded_on_cpu
from tests.e2e.test_ladder import check
from tests.tiers import first_or_more
from tests.tiny import HYBRID_FAMILIES

HYBRID_AXES = {
    **AXES,
    "family": HYBRID_FAMILIES,
    "drafter": ("none", "ngram", "eagle", "eagle3", "mtp"),
}
RUNGS = pairwise(HYBRID_AXES)
FIRST, FIRST_FIXED = each_value(RUNGS), each_drafter(RUNGS)


@pytest.mark.parametrize("rung", first_or_more(RUNGS, FIRST.__contains__), ids=str)
def test_greedy_tokens_equal_the_reference(rung: Rung, workshop: Workshop) -> None:
    check(rung, workshop)


@pytest.mark.parametrize("rung", first_or_more(RUNGS, FIRST_FIXED.__contains__), ids=str)
def test_greedy_tokens_equal_the_reference_with_fixed_shapes(
    rung: Rung, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "CpuPlatform", padded_on_cpu)
    check(rung, workshop)


@pytest.mark.parametrize("target", ["qwen3.5", "llama"])
def test_a_draft_model_with_recurrent_layers_is_refused_by_name(
    target: str, workshop: Workshop
) -> None:
    draft = workshop.target_folder("qwen3.5")
    with pytest.raises(CheckpointError, match=r"\(qwen3_5\) has recurrent layers"):
        LLM(
            model=workshop.target_folder(target),
            skip_tokenizer_init=True,
            speculative_config={
                "method": "draft_model",
                "model": draft,
                "num_speculative_tokens": 2,
            },
        )
