"""Parameters that contradict each other: a 400 that says which, never a 500."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.serving import VOCAB, ServerProcess, save_served, served
from tests.patience import wait_for
from tests.server.serving import Reply

TEXT = "/v1/completions"
EOS = 2


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """`paceline serve` with a small random model."""
    folder = tmp_path_factory.mktemp("attacked")
    save_served(folder)
    with served(folder, tmp_path_factory.mktemp("log") / "server.txt") as running:
        yield running


def _complete(process: ServerProcess, **fields: Any) -> Reply:
    return process.post(TEXT, {"prompt": [5], "max_tokens": 4, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [0], "max_tokens": 1, "allowed_token_ids": [EOS], "min_tokens": 1},
        {"allowed_token_ids": [70, 71, EOS], "stop_token_ids": [70, 71], "min_tokens": 2},
        {"allowed_token_ids": [EOS], "bad_words": ["<|im_end|>"]},
        {"allowed_token_ids": [67, EOS], "bad_words": ["a"], "min_tokens": 1},
    ],
)
def test_parameters_that_leave_no_token_are_a_400_that_says_which(
    process: ServerProcess, fields: dict[str, Any]
) -> None:
    reply = _complete(process, **fields)
    assert reply.status == 400
    assert reply.error["param"] == "allowed_token_ids"
    for name in {"bad_words", "min_tokens"} & set(fields):
        assert name in reply.error["message"]


def test_what_leaves_one_token_is_answered(process: ServerProcess) -> None:
    assert _complete(process, allowed_token_ids=[EOS]).status == 200
    assert _complete(process, allowed_token_ids=[EOS], min_tokens=1, ignore_eos=True).status == 200
    reply = _complete(process, allowed_token_ids=[EOS, 67], min_tokens=2, temperature=0)
    assert reply.json()["choices"][0]["text"].startswith("aa")


def test_bad_words_that_leave_no_token_on_the_way_are_a_400(process: ServerProcess) -> None:
    """After one `a` no other may come, and nothing else is allowed."""
    reply = _complete(process, allowed_token_ids=[67], bad_words=["aa"])
    assert reply.status == 400
    assert "allowed_token_ids, bad_words together leave no token" in reply.error["message"]
    streamed = process.post(
        TEXT, {"prompt": [5], "allowed_token_ids": [67], "bad_words": ["aa"], "stream": True}
    )
    assert b"leave no token to sample here" in streamed.body
    # The first `a` and the error may reach the front together: then there is no stream to end.
    if streamed.status == 200:
        assert streamed.body.endswith(b"data: [DONE]\n\n")
    else:
        assert streamed.status == 400
        assert streamed.error["param"] == "allowed_token_ids"


def _drawn(rng: random.Random) -> dict[str, Any]:
    """Any few parameters, each near an edge of what it may be."""
    few = rng.choice([[EOS], [67], [EOS, 67], [0, 1, 2], [5, 67, 68, 69], list(range(VOCAB))])
    choices: dict[str, list[Any]] = {
        "temperature": [0, 1e-30, 0.7, 100],
        "top_p": [1e-30, 0.5, 1],
        "top_k": [-1, 1, 2, 10**6],
        "min_p": [0, 0.5, 1],
        "presence_penalty": [-2, 2],
        "frequency_penalty": [-2, 2],
        "repetition_penalty": [1e-30, 0.5, 100],
        "logit_bias": [{"2": -100}, {"2": 100, "67": -100}, {str(i): -100 for i in range(VOCAB)}],
        "bad_words": [["a"], ["aa", " a"], ["<|im_end|>"], ["a", "b", "<|im_end|>"]],
        "allowed_token_ids": [few],
        "stop_token_ids": [[EOS], [67], [67, 68, 69], list(range(24))],
        "stop": ["a", ["a", "b"]],
        "min_tokens": [1, 2, 4],
        "ignore_eos": [True],
        "logprobs": [0, 5],
        "prompt_logprobs": [0, 5],
        "echo": [True],
        "n": [2, 5],
        "seed": [0, -1, 2**63 - 1],
        "num_speculative_tokens": [0, 3],
        "add_special_tokens": [False],
        "skip_special_tokens": [False],
    }
    names = rng.sample(sorted(choices), rng.randint(1, 6))
    return {name: rng.choice(choices[name]) for name in names}


def test_no_set_of_parameters_is_a_500(process: ServerProcess) -> None:
    rng = random.Random(14)
    statuses = set()
    for _ in range(400):
        fields = _drawn(rng)
        reply = _complete(process, **fields)
        assert reply.status in (200, 400), (fields, reply.body)
        statuses.add(reply.status)
    assert statuses == {200, 400}
    process.await_idle()
    assert "Traceback" not in process.said()


def test_memory_comes_back_after_large_bodies(process: ServerProcess) -> None:
    text = json.dumps({"prompt": "Zq x9 " * 170_000, "return_token_strs": True})
    headers = {"Content-Type": "application/json"}
    first = process.resident_bytes()
    for _ in range(4):
        assert process.request("POST", "/tokenize", text, headers).status == 200
    wait_for(lambda: process.resident_bytes() < first + (64 << 20), 60.0)
