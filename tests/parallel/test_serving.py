"""The commands of the design as a user types them, on tiny models of those families.

A real server, ranks that share layers or experts, the official client.
"""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from paceline import LLM, SamplingParams
from tests.e2e.serving import ServerProcess, save_served, started
from tests.eagle import random_head, save_head, train
from tests.mtp import random_mtp, save_mtp
from tests.patience import PATIENCE_S

NUM_TOKENS = 64
NUM_TRAINED = 40  # steps of a head: some of its drafts are right
PROMPTS = [f"{word} and then" for word in ("the fox", "we", "12345", "Größe", "hello")]
PROMPTS += ["def main():", "a", "The quick brown fox jumps over the lazy dog. " * 4]
LONE_PROMPT = "One alone: "
Answer = tuple[str, list[int]]


def plain_answers(folder: Path) -> list[Answer]:
    """Of one rank without a drafter: the eight, and the one that comes alone."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "engine_in_process": True}
    with LLM(str(folder), **options) as llm:
        outputs = llm.generate([*PROMPTS, LONE_PROMPT], params, use_tqdm=False)
    return [(o.outputs[0].text, list(o.outputs[0].token_ids)) for o in outputs]


def ask(client: openai.OpenAI, model: Path, prompt: str) -> Answer:
    reply = client.completions.create(
        model=str(model),
        prompt=prompt,
        temperature=0,
        max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    (choice,) = reply.choices
    assert choice.finish_reason == "length"
    return choice.text, choice.model_dump()["token_ids"]


def check(
    process: ServerProcess, model: Path, expected: list[Answer], *, num_ranks: int = 2
) -> None:
    """Eight at once, one alone while other replicas have nothing, and an end without an error."""
    assert len(process.pids) == 1 + num_ranks, "a front and its ranks"
    url = f"http://127.0.0.1:{process.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        with ThreadPoolExecutor(8) as workers:
            found = list(workers.map(lambda p: ask(client, model, p), PROMPTS))
        assert found == expected[:-1]
        process.await_idle()
        assert ask(client, model, LONE_PROMPT) == expected[-1]
    drafted = process.gauge("spec_decode_num_draft_tokens_total")
    assert 0 < process.gauge("spec_decode_num_accepted_tokens_total") < drafted
    process.send_signal(signal.SIGTERM)
    assert process.await_exit() == 0
    assert "Traceback" not in process.said()


@pytest.mark.trap("C1")
def test_mixtral_with_an_eagle_head_serves_as_the_design_says(tmp_path: Path) -> None:
    folder, head = tmp_path / "mixtral", tmp_path / "head"
    target = save_served(folder, "mixtral", num_local_experts=8)
    answers = plain_answers(folder)
    known = [tokens for _, tokens in answers]
    save_head(head, train(random_head(target), target, known, num_steps=NUM_TRAINED))
    spec = {"method": "eagle", "model": str(head), "num_speculative_tokens": 2}
    ranks = "--tensor-parallel-size=1 --data-parallel-size=2 --enable-expert-parallel"
    arguments = ["serve", str(folder), *ranks.split(), "--speculative-config", json.dumps(spec)]
    with started([*arguments, "--port", "0"], tmp_path / "log") as process:
        process.await_ready()
        check(process, folder, answers)


def serve_with_mtp(
    tmp_path: Path, family: str, ranks: str, *, num_ranks: int = 2, **spec: Any
) -> None:
    plain, folder = tmp_path / "plain", tmp_path / "model"
    target = save_served(plain, family)
    answers = plain_answers(plain)
    known = [tokens for _, tokens in answers]
    save_mtp(folder, plain, train(random_mtp(target), target, known, num_steps=NUM_TRAINED))
    spec = {"method": "mtp", "num_speculative_tokens": 2, **spec}
    arguments = ["serve", str(folder), *ranks.split(), "--speculative-config", json.dumps(spec)]
    with started([*arguments, "--port", "0"], tmp_path / "log") as process:
        process.await_ready()
        check(process, folder, answers, num_ranks=num_ranks)


@pytest.mark.trap("C1")
@pytest.mark.more
def test_glm_flash_with_its_mtp_layer_serves_as_the_design_says(tmp_path: Path) -> None:
    ranks = "--data-parallel-size 2 --enable-expert-parallel --check-collectives"
    serve_with_mtp(tmp_path, "glm4-moe-lite", ranks)


TP2, DP2_EP = "--tensor-parallel-size 2", "--data-parallel-size 2 --enable-expert-parallel"


@pytest.mark.trap("C8")
@pytest.mark.parametrize(
    ("family", "ranks", "num_ranks", "draft_tp"),
    [
        ("qwen3.5-moe", DP2_EP, 2, None),
        pytest.param("qwen3.5", TP2, 2, None, marks=pytest.mark.more),
        pytest.param("qwen3.5", TP2, 2, 1, marks=pytest.mark.more),
        pytest.param("qwen3.5", TP2, 2, 2, marks=pytest.mark.more),
        pytest.param("qwen3.5-moe", f"{TP2} {DP2_EP}", 4, 1, marks=pytest.mark.more),
        pytest.param("qwen3.5-moe", f"{TP2} {DP2_EP}", 4, 2, marks=pytest.mark.more),
    ],
)
def test_qwen35_with_its_mtp_head_serves_as_the_design_says(
    tmp_path: Path, family: str, ranks: str, num_ranks: int, draft_tp: int | None
) -> None:
    spec = {} if draft_tp is None else {"draft_tensor_parallel_size": draft_tp}
    serve_with_mtp(tmp_path, family, ranks, num_ranks=num_ranks, **spec)
