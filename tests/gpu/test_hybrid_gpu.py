"""Models with recurrent layers on a GPU: greedy tokens equal transformers', graphs and eager."""

from __future__ import annotations

import pytest

from tests.e2e.ladder import AXES, Rung, Workshop, pairwise
from tests.e2e.test_ladder import check
from tests.gpu.engines import DEVICE
from tests.tiny import HYBRID_FAMILIES

pytestmark = pytest.mark.gpu

HYBRID_GPU_AXES = {
    **AXES,
    "family": HYBRID_FAMILIES,
    "drafter": ("none", "ngram", "mtp"),
    "k": (1, 3),
    "chunk": (2048, 16),
    "device": (DEVICE,),
    "eager": (False, True),
}


@pytest.mark.parametrize("rung", pairwise(HYBRID_GPU_AXES), ids=str)
def test_greedy_tokens_of_recurrent_models_equal_the_reference(
    rung: Rung, workshop: Workshop
) -> None:
    pytest.importorskip("transformers.models.qwen3_5", reason="this transformers is too old")
    check(rung, workshop)
