"""Who waits for whom: replicas that share a collective step together, all others never do."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from paceline import SamplingParams
from paceline.config import EngineConfig
from paceline.engine.client import EngineClient
from tests.e2e.ladder import PROMPTS, Workshop
from tests.engine.echo_client import Stream, pump_until_finished
from tests.parallel.test_phases import options, run
from tests.tiny import greedy_reference


@pytest.mark.trap("C1")
def test_a_dense_target_with_a_moe_draft_steps_together_and_one_request_finishes(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Only the draft's passes hold collectives; a rank without requests takes part in them."""
    spec = {
        "method": "draft_model",
        "model": workshop.target_folder("mixtral"),
        "num_speculative_tokens": 2,
        "adaptive": False,
    }
    values = {**options(workshop, "none", "llama", 0), "speculative_config": spec}
    busy, idle = run(tmp_path, [[(PROMPTS[2], 20, None)], []], **values)
    expected = greedy_reference(workshop.target("llama"), PROMPTS[2], 20)
    assert busy["tokens"] == {1: expected}
    assert busy["steps"] == idle["steps"] >= 20 / 3
    assert busy["agreements"] == idle["agreements"]
    assert len(idle["agreements"]) >= idle["steps"]
    assert busy["records"] == idle["records"]
    phases = {line.split(": ")[0].partition(", ")[2] for line in idle["records"]}
    assert phases == {"draft 1", "draft 2"}


@pytest.mark.usefixtures("_forks")
def test_a_dense_replica_that_hangs_holds_up_no_other(workshop: Workshop) -> None:
    """Asking for expert parallelism makes no difference where no model has experts."""
    config = EngineConfig.from_keywords(
        model=workshop.target_folder("llama"),
        speculative_config={"method": "draft_model", "num_speculative_tokens": 2}
        | {"model": workshop.draft_folder("llama")},
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=4,
        cpu_threads=1,
        data_parallel_size=2,
        enable_expert_parallel=True,
        check_collectives=True,
    )
    client = EngineClient.start(config)
    try:
        stuck, free = client.engine_pids
        os.kill(stuck, signal.SIGSTOP)
        first, second, third = (submit(client, str(i)) for i in range(3))  # 0, 1 and 0 again
        pump_until_finished(client, second)
        give_up_s = time.monotonic() + 2.0  # much less than the timeout, or all would end
        while time.monotonic() < give_up_s:
            client.pump(0.1)
        assert not first.deltas
        assert not third.deltas
        fourth = submit(client, "more")
        pump_until_finished(client, fourth)
        os.kill(stuck, signal.SIGCONT)
        pump_until_finished(client, first, third)
        assert client.engine_pids == [stuck, free]
    finally:
        client.close()
    expected = greedy_reference(workshop.target("llama"), PROMPTS[2], 30)
    assert [s.token_ids() for s in (first, second, third, fourth)] == [expected] * 4


def submit(client: EngineClient, name: str) -> Stream:
    stream = Stream()
    params = SamplingParams(temperature=0, max_tokens=30, detokenize=False)
    stream.generation = client.submit(name, PROMPTS[2], params, on_deltas=stream)
    return stream
