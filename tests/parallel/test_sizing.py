"""How many pages ranks have: bytes of both models as they are cut, the least that any rank has.

And what is refused at start, by every rank alike, with the numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM
from paceline.errors import ConfigError
from paceline.step import RunnerInfo
from tests.eagle import random_head, save_head
from tests.mtp import random_mtp, save_mtp
from tests.parallel.ranks import run_ranks
from tests.tiny import save_tiny

BUDGET = 1 << 18
PAGE = 16
# Bytes of one token in fp32. llama: 2 layers, 2 KV heads of 8; its EAGLE head: 1 layer, 1 KV head,
# which ranks have to share; deepseek-v3: 3 layers of a latent of 16 + 8, whole on every rank.
LLAMA = 2 * 2 * 2 * 8 * 4
EAGLE = 2 * 1 * 8 * 4
LATENT = 3 * (16 + 8) * 4
LATENT_MTP = (16 + 8) * 4
BYTES_PER_TOKEN = {
    "target": LLAMA // 2,
    "draft in parts": LLAMA // 2 + LLAMA // 2,
    "whole draft": LLAMA // 2 + LLAMA,
    "head in parts": LLAMA // 2 + EAGLE,
    "whole head": LLAMA // 2 + EAGLE,
    "latents": LATENT + LATENT_MTP,
    "replicas": LLAMA,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that are started and never asked: their heads need not be any good."""
    path = tmp_path_factory.mktemp("sizes")
    save_head(path / "head", random_head(save_tiny(path / "llama", "llama")))
    latent = save_tiny(path / "plain", "deepseek-v3")
    save_mtp(path / "latent", path / "plain", random_mtp(latent))
    return path


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    llama = str(folder / "llama")
    draft = {"method": "draft_model", "model": llama}
    head = {"method": "eagle", "model": str(folder / "head")}
    mtp = {"model": str(folder / "latent")}
    made: dict[str, dict[str, Any]] = {
        "target": {},
        "draft in parts": {"speculative_config": draft},
        "whole draft": {"speculative_config": draft | {"draft_tensor_parallel_size": 1}},
        "head in parts": {"speculative_config": head},
        "whole head": {"speculative_config": head | {"draft_tensor_parallel_size": 1}},
        "latents": mtp | {"speculative_config": {"method": "mtp"}},
        "replicas": {"tensor_parallel_size": 1, "data_parallel_size": 2},
        "unequal": {"kv_cache_memory_bytes": [BUDGET, BUDGET // 2]},
        "unequal replicas": {
            "kv_cache_memory_bytes": [BUDGET, BUDGET // 2],
            "tensor_parallel_size": 1,
            "data_parallel_size": 2,
        },
    }
    defaults = {
        "model": llama,
        "dtype": "float32",
        "max_num_seqs": 64,
        "tensor_parallel_size": 2,
        "block_size": PAGE,
        "cpu_threads": 1,
        "kv_cache_memory_bytes": [BUDGET, BUDGET],
        "max_model_len": 128,
    }
    for options in made.values():
        if "speculative_config" in options:
            options["speculative_config"]["num_speculative_tokens"] = 2
    return {name: defaults | options for name, options in made.items()}


@pytest.fixture(scope="module")
def started(folder: Path) -> list[dict[str, RunnerInfo]]:
    (folder / "plan.json").write_text(json.dumps(cases(folder)))
    found: list[dict[str, RunnerInfo]] = run_ranks("tests.parallel.sizing_jobs:start", 2, folder)
    return found


@pytest.mark.trap("I23")
@pytest.mark.parametrize("case", BYTES_PER_TOKEN)
def test_a_page_has_the_bytes_of_both_models_as_each_is_cut(
    case: str, started: list[dict[str, RunnerInfo]]
) -> None:
    per_page = PAGE * BYTES_PER_TOKEN[case]
    for infos in started:
        info = infos[case]
        assert info.num_pages == BUDGET // per_page - 1  # one is the padding page
        assert info.kv_cache_bytes == info.num_pages * per_page


@pytest.mark.parametrize(
    ("case", "same"), [("unequal", "target"), ("unequal replicas", "replicas")]
)
def test_all_ranks_have_as_many_pages_as_the_smallest(
    case: str, same: str, started: list[dict[str, RunnerInfo]]
) -> None:
    least = BUDGET // 2 // (PAGE * BYTES_PER_TOKEN[same]) - 1
    assert [infos[case].num_pages for infos in started] == [least, least]


# ---- refusals, as a user meets them


@pytest.mark.usefixtures("_forks")
def test_heads_that_do_not_divide_are_refused_with_both_numbers(folder: Path) -> None:
    message = (
        r"rank \d \(replica 0\): .*4 attention heads do not divide over tensor_parallel_size 3"
    )
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder / "llama"), skip_tokenizer_init=True, tensor_parallel_size=3)


@pytest.mark.usefixtures("_forks")
def test_fewer_experts_than_ranks_are_refused_with_both_numbers(tmp_path: Path) -> None:
    save_tiny(tmp_path, "mixtral", num_local_experts=2)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "enable_expert_parallel": True}
    message = r"2 experts cannot be spread over 3 ranks \(.* 1 x data_parallel_size 3\)"
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), **options, data_parallel_size=3)


@pytest.mark.trap("L-12")
@pytest.mark.usefixtures("_forks")
def test_a_step_too_small_for_every_window_is_refused_with_the_numbers(folder: Path) -> None:
    """Whether the number of requests was given or is the default: what a rank brings to an
    exchange is at most a step, and all windows fit into one."""
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    options: dict[str, Any] = {
        "model": str(folder / "latent"),
        "speculative_config": spec,
        "skip_tokenizer_init": True,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "cpu_threads": 1,
    }
    with pytest.raises(ConfigError, match=r"39 cannot hold max_num_seqs 10 rows of 4 .* least 40"):
        LLM(**options, max_num_seqs=10, max_num_batched_tokens=39)
    with pytest.raises(ConfigError, match=r"255 cannot hold 64 rows of 4"):
        LLM(**options, max_num_batched_tokens=255)
