"""DeepSeek-V3 and GLM-4.7-Flash on a GPU: the ladder, with graphs and without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.ladder import Rung, Workshop, pairwise
from tests.e2e.test_ladder import check
from tests.e2e.test_latent_families import LATENT_AXES
from tests.gpu.engines import DEVICE, knows_family

pytestmark = pytest.mark.gpu

# Older versions of transformers, what tokens are compared with, know only the first.
KNOWN = {"deepseek-v3": "deepseek_v3", "glm4-moe-lite": "glm4_moe_lite"}
GPU_AXES: dict[str, tuple[Any, ...]] = {
    **LATENT_AXES,
    "family": tuple(f for f, name in KNOWN.items() if knows_family(name)),
    "k": (1, 4),
    "device": (DEVICE,),
    "eager": (False, True),
}


@pytest.mark.parametrize("rung", pairwise(GPU_AXES), ids=str)
def test_greedy_tokens_on_the_gpu_equal_the_reference(rung: Rung, workshop: Workshop) -> None:
    check(rung, workshop)
