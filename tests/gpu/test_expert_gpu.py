"""Mixtral, with and without a window, and Qwen3-MoE on a GPU: the ladder, graphs and none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.ladder import Rung, Workshop, pairwise
from tests.e2e.test_expert_families import MOE_AXES
from tests.e2e.test_ladder import check
from tests.gpu.engines import DEVICE, knows_family

pytestmark = pytest.mark.gpu

# What tokens are compared with may be a version of transformers that does not know them all.
KNOWN = {"mixtral": "mixtral", "mixtral-window": "mixtral", "qwen3-moe": "qwen3_moe"}
GPU_AXES: dict[str, tuple[Any, ...]] = {
    **MOE_AXES,
    "family": tuple(f for f, name in KNOWN.items() if knows_family(name)),
    "k": (1, 4),
    "device": (DEVICE,),
    "eager": (False, True),
}


@pytest.mark.parametrize("rung", pairwise(GPU_AXES), ids=str)
def test_greedy_tokens_on_the_gpu_equal_the_reference(rung: Rung, workshop: Workshop) -> None:
    check(rung, workshop)
