"""More than anybody should ask for at once: all are answered, and the next one is served."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from tests.e2e.serving import served
from tests.server.flood import flood


@pytest.mark.parametrize(
    "count", [1500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(400)])]
)
def test_a_flood_of_requests_under_1024_files_is_answered_to_the_last(
    count: int, served_model: Path, tmp_path: Path
) -> None:
    with served(served_model, tmp_path / "log", limit="-n 1024") as process:
        results = flood(process.port, count, max_tokens=2, within_s=120.0)
        assert results.total() == count
        assert set(results) <= {"200", "429", "refused"}
        assert results["200"] >= 64  # those that ran at the same time, at the very least
        process.await_idle()
        reply = process.post("/v1/completions", {"prompt": "abc", "max_tokens": 2})
        assert reply.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.await_exit() == 0
        assert "Traceback" not in process.said()


@pytest.mark.parametrize(
    "count", [1000, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(400)])]
)
def test_thousands_of_prompts_all_finish(count: int, served_model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompts = [f"prompt {i}" for i in range(count)]
    with LLM(str(served_model), dtype="float32", cpu_threads=1) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts[:3], params, use_tqdm=False)
    assert [o.prompt for o in outputs] == prompts
    assert all(o.finished and len(o.outputs[0].token_ids) == 2 for o in outputs)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs[:3]]
