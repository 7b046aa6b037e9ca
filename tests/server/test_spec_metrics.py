"""--per-request-spec-decode-metrics: how the drafts of one request did."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.fake_client import Asked, FakeClient, Steps, hello
from tests.server.serving import Served, serving

SUMMARY: dict[str, Any] = {
    "mean_acceptance_length": 2.0,
    "draft_acceptance_rate": 0.5,
    "acceptance_histogram": [1, 1, 1, 0],
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 6,
    "num_spec_tokens": 3,
}
DETAILS = {"per_step_accepted": [2, 0, 1], "per_step_drafted": [3, 2, 1]}


def drafted(asked: Asked) -> Steps:
    if asked.params.n == 1:
        asked.generation.metrics.spec_steps = [(3, 2), (2, 0), (1, 1)]
    return hello(asked)


def last_chunk(server: Served, path: str) -> Any:
    fields = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    name = "messages" if "chat" in path else "prompt"
    asked = {name: fields[name], "stream": True, "stream_options": {"include_usage": True}}
    lines = server.post(path, asked).body.decode().split("\n\n")
    return json.loads(lines[-3].removeprefix("data: "))


@pytest.mark.parametrize(
    ("level", "expected"), [("summary", SUMMARY), ("detailed", SUMMARY | DETAILS)]
)
def test_replies_and_last_chunks_show_them(level: str, expected: dict[str, Any]) -> None:
    with serving(FakeClient(drafted), per_request_spec_decode_metrics=level) as server:
        for reply in (
            server.chat().json(),
            server.complete().json(),
            last_chunk(server, "/v1/chat/completions"),
            last_chunk(server, "/v1/completions"),
        ):
            assert reply["metrics"] == {"speculative_decoding": expected}
        assert "metrics" not in server.chat(n=2).json()


def test_a_server_shows_none_unless_it_is_asked(server: Served) -> None:
    assert "metrics" not in server.chat().json()


def test_a_request_without_drafts_has_zeros() -> None:
    with serving(FakeClient(), per_request_spec_decode_metrics="summary") as server:
        shown = server.chat().json()["metrics"]["speculative_decoding"]
    assert (shown["num_spec_steps"], shown["draft_acceptance_rate"]) == (0, 0.0)
    assert shown["acceptance_histogram"] == [0, 0, 0, 0]
