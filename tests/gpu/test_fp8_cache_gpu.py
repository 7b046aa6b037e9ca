"""fp8 pages on a GPU: tokens of a model with rounded keys and values, with graphs and without."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.e2e.fp8_workshop import Fp8Workshop
from tests.e2e.ladder import AXES, Rung, pairwise, run_rung
from tests.gpu.engines import DEVICE, knows_family, open_llm

pytestmark = pytest.mark.gpu

KNOWN = {"llama": "llama", "deepseek-v3": "deepseek_v3", "qwen3.5": "qwen3_5"}
GPU_AXES: dict[str, tuple[Any, ...]] = {
    **AXES,
    "family": tuple(f for f, name in KNOWN.items() if knows_family(name)),
    "drafter": ("none", "ngram", "mtp"),
    "run_ahead": (0, 2),
    "k": (1, 4),
    "chunk": (2048, 16),
    "device": (DEVICE,),
    "eager": (False, True),
}


class OnGpu(Fp8Workshop):
    open_llm = partial(open_llm, kv_cache_dtype="fp8")


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Fp8Workshop:
    return OnGpu(tmp_path_factory.mktemp("fp8"))


@pytest.mark.parametrize("rung", pairwise(GPU_AXES), ids=str)
def test_tokens_are_those_of_rounded_keys_and_values(rung: Rung, fp8: Fp8Workshop) -> None:
    fp8.check_tokens(rung.family, run_rung(rung, fp8)[0])
