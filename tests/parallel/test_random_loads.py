"""The random loads of tests/e2e on ranks: each request gets the tokens that it gets alone."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.e2e.ladder import Workshop
from tests.e2e.random_loads import alone, check, random_load
from tests.parallel.layouts import LAYOUTS
from tests.parallel.ranks import run_ranks
from tests.tiers import by_number

pytestmark = pytest.mark.usefixtures("_forks")
FAMILIES = ("mixtral", "mixtral", "deepseek-v3", "glm4-moe-lite", "qwen3.5-moe", "llama", "qwen3.5")


@pytest.mark.parametrize("seed", by_number(first=0, more=20, slow=300))
def test_requests_on_ranks_get_the_tokens_that_they_get_alone(
    workshop: Workshop, tmp_path: Path, seed: int
) -> None:
    """Replicas in lock step have different requests, and sometimes none at all."""
    rng = random.Random(seed)
    load = random_load(workshop, rng, FAMILIES)
    layout = rng.choice(["tp2", "dp2", "dp2-ep", "dp2-ep", "tp2-ep"])
    options = {"dtype": "float32", "skip_tokenizer_init": True, "cpu_threads": 1}
    load.options.update(options, check_collectives=True, **LAYOUTS[layout])
    uids = list(range(len(load.requests)))
    share = [uids, []] if rng.random() < 0.3 else [uids[::2], uids[1::2]]
    plan = {
        "load": asdict(load),
        "is_fixed": rng.random() < 0.4,
        "uids": share if "data_parallel_size" in LAYOUTS[layout] else [uids, uids],
        "seed": seed,
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    found = run_ranks("tests.parallel.load_jobs:answer", 2, tmp_path)
    tokens = {uid: tokens for one in found for uid, tokens in one["tokens"].items()}
    aborted = {uid for one in found for uid in one["aborted"]}
    check(load, alone(workshop, load), tokens, aborted)
