"""Latent attention and sigmoid routers end to end: the ladder for DeepSeek-V3 and GLM-4.7-Flash.

Every rung runs in both layouts: the CPU's own, and the fixed shapes that CUDA captures.
"""

from __future__ import annotations

import pytest

from paceline.runner import startup
from tests.e2e.ladder import AXES, Rung, Workshop, each_drafter, each_value, pairwise
from tests.e2e.test_fixed_steps import padded_on_cpu
from tests.e2e.test_ladder import check
from tests.tiers import first_or_more
from tests.tiny import LATENT_FAMILIES

LATENT_AXES = {
    **AXES,
    "family": LATENT_FAMILIES,
    "drafter": ("none", "ngram", "draft_model", "mtp"),
    "run_ahead": (0, 2),
    "k": (2, 7),
    "chunk": (2048, 16),
}
RUNGS = pairwise(LATENT_AXES)
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
