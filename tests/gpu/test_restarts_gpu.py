"""A killed engine costs no token on a GPU either: requests go on where they were."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from paceline import LLM, SamplingParams
from tests.e2e.engines import tokens
from tests.e2e.ladder import PROMPTS, Workshop
from tests.gpu.engines import open_ranks
from tests.gpu.test_ranks_gpu import options_of

pytestmark = pytest.mark.gpu

NUM_TOKENS = 60


def generate(llm: LLM, params: list[SamplingParams]) -> list[list[list[int]]]:
    prompts = [{"prompt_token_ids": list(p)} for p in PROMPTS]
    return tokens(llm.generate(prompts, params, use_tqdm=False))


def kill_in_the_middle(llm: LLM) -> None:
    """SIGKILL for the engine when it has made a third of all tokens."""
    stats = llm._client.stats
    while stats.num_generated_tokens < len(PROMPTS) * NUM_TOKENS // 3:
        time.sleep(0.001)
    os.kill(llm._client.engine_pids[0], signal.SIGKILL)


def test_requests_have_the_tokens_of_an_undisturbed_run(workshop: Workshop) -> None:
    """In fp32, where near ties of these models are no ties; greedy and seeded requests."""
    options = options_of(workshop, "llama", "eagle") | {"max_restarts": 2}
    params = [
        SamplingParams(
            temperature=(0.0, 0.8)[i % 2],
            seed=i,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            detokenize=False,
            presence_penalty=(0.0, 0.5)[i % 3 == 0],
        )
        for i in range(len(PROMPTS))
    ]
    with open_ranks(**options) as llm:
        expected = generate(llm, params)
    with open_ranks(**options) as llm:
        killer = threading.Thread(target=kill_in_the_middle, args=(llm,))
        killer.start()
        found = generate(llm, params)
        killer.join()
        assert sum(llm._client.stats.restarts.values()) == 1
    assert found == expected
