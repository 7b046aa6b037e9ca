"""The default model as a newcomer meets it: `paceline serve` with no MODEL, asked by `openai`."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from paceline.checkpoint.default_model import NAME, fetch_default_model
from paceline.errors import CheckpointError
from tests.e2e.serving import ServerProcess, Streamed, started

FLAGS = ["--cpu-threads", "1", "--port", "0", "--kv-cache-memory-bytes", "256M"]
QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]
NUM_TOKENS = 40
SENTENCE = "The old lighthouse keeper counted seven ships before the fog rolled in at noon."
# One that goes on repeating itself (drafts are accepted), one to talk about, one to count on.
PROMPTS = [
    f"{SENTENCE} " * 3,
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 3, 4, 5, 6, 7, 8,",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The command of the README, with its default drafter (n-gram, K = 5)."""
    try:
        fetch_default_model()
    except CheckpointError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
    with started(["serve", *FLAGS], tmp_path_factory.mktemp("smollm2") / "log") as process:
        process.await_ready()
        yield process
        assert "Traceback" not in process.said()


@pytest.fixture(scope="module")
def without_drafts(
    server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """The same model without a drafter."""
    log = tmp_path_factory.mktemp("without") / "log"
    with started(["serve", *FLAGS, "--speculative-config", "none"], log) as process:
        process.await_ready()
        yield process


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=120
    )


def test_the_capital_of_france_is_paris(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == [NAME]
    reply = api.chat.completions.create(model=NAME, messages=QUESTION, temperature=0)
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens < 64


def test_the_capital_of_france_streams_and_is_still_paris(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(model=NAME, messages=QUESTION, temperature=0)
    stream = api.chat.completions.create(model=NAME, messages=QUESTION, temperature=0, stream=True)
    chunks = list(stream)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "Paris" in said
    assert said == whole.choices[0].message.content
    assert len(chunks) > 3  # it came in pieces
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_command_that_serve_prints_gets_paris(api: openai.OpenAI) -> None:
    """It sends messages and nothing else, so the model's own defaults must be good enough."""
    reply = api.chat.completions.create(model=NAME, messages=QUESTION)
    assert "Paris" in (reply.choices[0].message.content or "")


def test_a_sampled_answer_repeats_for_its_seed_and_differs_for_another(api: openai.OpenAI) -> None:
    said = [
        api.chat.completions.create(
            model=NAME, messages=QUESTION, temperature=1, seed=seed, max_tokens=16
        )
        .choices[0]
        .message.content
        for seed in (1, 2, 1, 2)
    ]
    assert said[:2] == said[2:]
    assert said[0] != said[1]


def test_greedy_tokens_with_the_default_drafter_equal_those_without(
    server: ServerProcess, without_drafts: ServerProcess
) -> None:
    """In the default format, which keeps the checkpoint's 4-bit weights.

    Equality to the last token may be expected because every product gives a row the same bits
    whatever rows it is computed with: a token that is verified among drafts gets the logits that
    it gets alone.
    """
    accepted = 0
    for prompt in PROMPTS:
        drafted, used = generate(server, prompt)
        alone, _ = generate(without_drafts, prompt)
        assert drafted == alone, prompt
        assert len(drafted.token_ids) == NUM_TOKENS
        accepted += used
    assert accepted > 0, "no draft was accepted, so this test has shown nothing"


def generate(server: ServerProcess, prompt: str) -> tuple[Streamed, int]:
    """(greedy tokens, how many of them were accepted drafts)"""
    fields = {"prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    options = {"include_usage": True}
    said, accepted = Streamed(), 0
    asked = {**fields, "return_token_ids": True, "stream_options": options}
    for event in server.stream("/v1/completions", asked):
        said.take(event)
        if event.get("usage"):
            details = event["usage"]["completion_tokens_details"]
            accepted = details["accepted_prediction_tokens"]
    return said, accepted
