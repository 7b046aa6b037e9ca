"""--kv-cache-dtype fp8: tokens are those of a model whose keys and values are rounded, whatever the
drafter, the chunks, the prefix cache and the pool; and the cache holds more of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import LLM
from paceline.errors import ConfigError
from paceline.kernels.table import has_numba
from paceline.runner import startup
from tests.e2e.fp8_reference import MOST_OTHERS, num_others
from tests.e2e.fp8_workshop import IS_BITWISE, Fp8Workshop, plain_rung
from tests.e2e.ladder import (
    AXES,
    BLOCKS,
    PROMPTS,
    Rung,
    Workshop,
    options_of,
    pairwise,
    run_prompts,
    run_rung,
)
from tests.e2e.test_fixed_steps import padded_on_cpu
from tests.e2e.test_ladder import check
from tests.parallel.forks import forked_ranks
from tests.parallel.layouts import open_ranks
from tests.tiers import first_or_more

FAMILIES = ("llama", "deepseek-v3", "qwen3.5")
FIRST = [
    Rung("llama", 1, "draft_model", 3, "mixed", 37, True, "roomy", 4),
    Rung("llama", 2, "ngram", 4, "all", 16, False, "tight", 16),
    Rung("deepseek-v3", 1, "ngram", 3, "all", 16, True, "roomy", 4),
    Rung("qwen3.5", 1, "none", 1, "all", 37, True, "roomy", 16),
]
HEADS: dict[str, tuple[Any, ...]] = {
    **AXES,
    "family": ("llama", "qwen3"),
    "drafter": ("none", "draft_model", "eagle", "eagle3", "mtp"),
    "run_ahead": (0, 2),
    "k": (2, 7),
    "chunk": (2048, 16),
}
ONE_PASS = [
    Rung("llama", i % 3, kind, 4, "all" if i % 2 else "mixed", 37, i % 3 > 0, "roomy", 16)
    for i, kind in enumerate(BLOCKS)
]
OTHERS = {**HEADS, "family": FAMILIES[1:], "drafter": ("none", "ngram", "mtp")}
MORE = [*pairwise(HEADS), *ONE_PASS, *pairwise(OTHERS)]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Fp8Workshop:
    return Fp8Workshop(tmp_path_factory.mktemp("fp8"))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_rounded_keys_and_values(family: str, fp8: Fp8Workshop) -> None:
    fp8.check_tokens(family, fp8.expected(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_without_rounding_tokens_are_others(family: str, fp8: Fp8Workshop) -> None:
    """The reference sees the difference."""
    found = num_others(fp8.target(family), PROMPTS, fp8.expected(family))
    assert found > 2 * MOST_OTHERS


@pytest.mark.parametrize("rung", first_or_more([*FIRST, *MORE], FIRST.__contains__), ids=str)
def test_tokens_do_not_depend_on_drafts_chunks_or_the_pool(rung: Rung, fp8: Fp8Workshop) -> None:
    if rung.family in IS_BITWISE and has_numba(torch.device("cpu")):
        check(rung, fp8)
    else:
        fp8.check_tokens(rung.family, run_rung(rung, fp8)[0])


@pytest.mark.parametrize("rung", first_or_more([FIRST[0], *FIRST[2:]], FIRST[:1].__contains__))
def test_fixed_shapes_emit_the_same(
    rung: Rung, fp8: Fp8Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "CpuPlatform", padded_on_cpu)
    fp8.check_tokens(rung.family, run_rung(rung, fp8)[0])


@pytest.mark.more
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_share_the_scales_of_their_heads(family: str, fp8: Fp8Workshop) -> None:
    rung = Rung(family, 1, "ngram", 3, "all", 37, True, "roomy", 16)
    options = options_of(rung, fp8) | {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"}
    del options["engine_in_process"]
    with forked_ranks(), open_ranks(options) as llm:
        fp8.check_tokens(family, run_prompts(rung, llm, fp8.max_tokens)[0])


@pytest.mark.parametrize(
    ("is_padded", "dtype", "factor"), [(False, "auto", 4), (True, "bfloat16", 2)]
)
def test_the_cache_holds_more_tokens(
    is_padded: bool,
    dtype: str,
    factor: int,
    workshop: Workshop,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_padded:
        monkeypatch.setattr(startup, "CpuPlatform", padded_on_cpu)
    options = options_of(plain_rung("llama"), workshop) | {"dtype": dtype, "max_num_seqs": 128}
    # 256 pages of 16 tokens in the wide type, and one for padding.
    wide = 2 * 2 * 2 * 8 * {"auto": 4, "bfloat16": 2}[dtype]
    options |= {"kv_cache_memory_bytes": 257 * 16 * wide, "max_model_len": 256}
    found = {}
    for kind in ("auto", "fp8_e4m3"):
        with LLM(**options, kv_cache_dtype=kind) as llm:
            found[kind] = llm._client.info
    assert found["auto"].num_pages == 256
    assert found["fp8_e4m3"].num_pages == factor * 257 - 1
    assert found["fp8_e4m3"].kv_cache_dtype == "fp8_e4m3"
    one_page = found["fp8_e4m3"].kv_cache_bytes / found["fp8_e4m3"].num_pages
    assert one_page * factor == found["auto"].kv_cache_bytes / found["auto"].num_pages


@pytest.mark.parametrize("name", ["fp8_e5m2", "fp8_inc", "int8", "nvfp4", "bfloat16"])
def test_other_types_are_refused_by_name(name: str, workshop: Workshop) -> None:
    options = options_of(plain_rung("llama"), workshop)
    with pytest.raises(ConfigError, match=f"'{name}' is not supported; use fp8 .* or auto"):
        LLM(**options, kv_cache_dtype=name)
