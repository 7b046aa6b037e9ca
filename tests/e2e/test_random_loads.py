"""Random requests under random options get the tokens that they get alone, without drafts."""

from __future__ import annotations

import random

import pytest

from paceline.runner.startup import build_runner
from tests.e2e.ladder import Workshop
from tests.e2e.loop import listened_to, tiny_engine_config
from tests.e2e.random_loads import alone, check, random_load, serve
from tests.parallel.factories import build_fixed
from tests.tiers import by_number

FAMILIES = ("llama", "qwen3", "mixtral", "mixtral-window", "deepseek-v3", "qwen3.5", "qwen3-next")


@pytest.mark.parametrize("seed", by_number(first=4, more=60, slow=600, known=[371, 467]))
def test_requests_get_the_tokens_that_they_get_alone(workshop: Workshop, seed: int) -> None:
    rng = random.Random(seed)
    load = random_load(workshop, rng, FAMILIES)
    config = tiny_engine_config(workshop, load.options.pop("speculative_config"), **load.options)
    # Every second load runs in the fixed shapes of CUDA.
    runner = (build_fixed if seed % 2 else build_runner)(config, lambda name, share: None)
    engine, published = listened_to(runner, config)
    aborted = serve(engine, load, list(range(len(load.requests))), rng)
    runner.close()
    check(load, alone(workshop, load), published, aborted)
