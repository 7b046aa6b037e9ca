"""Requests that cannot be served, sent to a real server while eight healthy streams run.

Each gets its clear answer, again and again, and no stream says anything else than without them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.e2e.disturbance import Disturbance
from tests.e2e.serving import MAX_MODEL_LEN, VOCAB, ServerProcess
from tests.server.serving import JSON

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Bad:
    """A request and the answer that it must get."""

    status: int
    says: str  # a regular expression
    param: str | None = None
    code: str | None = None
    body: bytes | None = None
    method: str = "POST"
    path: str = TEXT
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)

    def send(self, server: ServerProcess) -> None:
        reply = server.request(self.method, self.path, self.body, self.headers)
        assert reply.status == self.status, reply.body
        error = reply.error
        assert re.search(self.says, error["message"]), error
        assert (error["param"], error["code"]) == (self.param, self.code)
        assert error["type"] == "invalid_request_error"
        assert reply.headers["x-request-id"]


def text(says: str, param: str | None = None, **fields: Any) -> Bad:
    """A completion that is answered 400."""
    return Bad(400, says, param, body=json.dumps({"prompt": "a", **fields}).encode())


def chat(says: str, param: str, **fields: Any) -> Bad:
    message = {"role": "user", "content": "a"}
    body = json.dumps({"messages": [message], **fields}).encode()
    return Bad(400, says, param, body=body, path=CHAT)


def raw(says: str, body: bytes, param: str | None = None) -> Bad:
    return Bad(400, says, param, body=body)


def too_long(prompt: str | list[int], says: str) -> Bad:
    body = json.dumps({"prompt": prompt}).encode()
    return Bad(400, says, "prompt", "context_length_exceeded", body)


def _many_words(count: int) -> Bad:
    """A chat that is far too long, as people paste them."""
    message = {"role": "user", "content": "hello " * count}
    body = json.dumps({"messages": [message]}).encode()
    says = rf"^This model's maximum context length is {MAX_MODEL_LEN} tokens .* has \d+ characters"
    return Bad(400, says, "messages", "context_length_exceeded", body, path=CHAT)


RANGE = rf"out of range; the vocabulary has {VOCAB} tokens \(0 to {VOCAB - 1}\)"
BAD: dict[str, list[Bad]] = {
    "a prompt that is too long": [
        too_long("Zq" * 2000, rf"has 4000 tokens.*may have {MAX_MODEL_LEN - 1}"),
        too_long([5] * MAX_MODEL_LEN, rf"has {MAX_MODEL_LEN} tokens"),
        too_long([5] * 200_000, "has 200000 tokens"),
        too_long("a" * 1_000_000, "has 1000000 characters"),
        _many_words(100_000),
    ],
    "an empty prompt": [
        text("prompt is empty", "prompt", prompt=""),
        text("prompt is empty", "prompt", prompt=[]),
        text("prompt is empty", "prompt", prompt=[[]]),
        text("prompt is empty", "prompt", prompt=["a", ""]),
        text("'prompt' is missing|prompt: ", "prompt", prompt=None),
        chat("messages is empty", "messages", messages=[]),
    ],
    "token ids out of range": [
        text(f"prompt token id {VOCAB} is {RANGE}", "prompt", prompt=[1, VOCAB]),
        text(">= 0", "prompt[1]", prompt=[1, -1]),
        text("<= 2147483647", "prompt[0]", prompt=[2**31]),
        text("<= 2147483647", "prompt[0]", prompt=[10**40]),
        text("got 'float'", "prompt[0]", prompt=[1.5]),
        text(RANGE, "stop_token_ids", stop_token_ids=[VOCAB]),
        text(RANGE, "logit_bias", logit_bias={str(VOCAB): 1}),
        text(RANGE, "allowed_token_ids", allowed_token_ids=[VOCAB]),
    ],
    "negative parameters": [
        text("max_tokens is -1; it must be at least 1", "max_tokens", max_tokens=-1),
        chat("^max_completion_tokens is -1", "max_completion_tokens", max_completion_tokens=-1),
        text("temperature is -0.1; it must be at least 0", "temperature", temperature=-0.1),
        text("top_p is -1.0; it must be above 0", "top_p", top_p=-1),
        text("top_k is -2", "top_k", top_k=-2),
        text("min_p is -1.0", "min_p", min_p=-1),
        text("n is -3", "n", n=-3),
        text("logprobs is -2", "logprobs", logprobs=-2),
        text("min_tokens is -1", "min_tokens", min_tokens=-1),
        text("repetition_penalty is -1.0", "repetition_penalty", repetition_penalty=-1),
        text("num_speculative_tokens is -1", "num_speculative_tokens", num_speculative_tokens=-1),
    ],
    "huge parameters": [
        text("at most 2147483647", "max_tokens", max_tokens=2**31),
        text("<= 9223372036854775807", "max_tokens", max_tokens=10**30),
        text("temperature is 1e.308", "temperature", temperature=1e308),
        text("n is 1000000000; .*at most 128", "n", n=10**9),
        text("logprobs is 1000000; .*at most 20", "logprobs", logprobs=10**6),
        chat("^top_logprobs is 99; .*at most 20", "top_logprobs", logprobs=True, top_logprobs=99),
        text("min_tokens is 600.*leaves room for", "min_tokens", min_tokens=600, max_tokens=700),
        text("seed", "seed", seed=10**30),
        text("presence_penalty is 1e.30", "presence_penalty", presence_penalty=1e30),
        text("at most 100", "logit_bias", logit_bias={"5": 1e9}),
        text("stop has 1000 entries; the limit is 64", "stop", stop=["x"] * 1000),
        text("9 entries|at most 3 drafts", "num_speculative_tokens", num_speculative_tokens=9),
        raw(
            "seed: Integer value out of range", b'{"prompt":"a","seed":%s}' % (b"9" * 9999), "seed"
        ),
    ],
    "NaN and Infinity": [
        raw("JSON has no NaN", b'{"prompt": "a", "temperature": NaN}'),
        raw("JSON has no NaN", b'{"prompt": "a", "top_p": Infinity}'),
        raw("JSON has no NaN", b'{"prompt": "a", "logit_bias": {"5": -Infinity}}'),
        raw("Number out of range", b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    ],
    "an unknown model": [
        Bad(
            404,
            "The model 'gpt-4' does not exist; this server has ",
            "model",
            "model_not_found",
            b'{"prompt": "a", "model": "gpt-4"}',
        ),
        Bad(404, "does not", "model", "model_not_found", method="GET", path="/v1/models/gpt-4"),
    ],
    "an unknown field": [
        text("Unknown field 'max_token'. Did you mean 'max_tokens'", "max_token", max_token=5),
        chat("Did you mean 'temperature'", "temperatur", temperatur=1),
        text("Unknown field 'zzzz'.$", "zzzz", zzzz=1),
        chat("'functions' is not supported", "functions", functions=[{"name": "f"}]),
    ],
    "broken JSON": [
        raw("not JSON", b'{"prompt": "a"'),
        raw("not JSON", b'{"prompt": "a"}}'),
        raw("not JSON", b"{'prompt': 'a'}"),
        raw("must be a JSON object, not an array", b"[1, 2]"),
        raw("is empty", b""),
        raw("not UTF-8", b'{"prompt": "\xff\xfe"}'),
        raw("nested too deeply", b"[" * 100_000),
        raw("not JSON", b"\x00" * 1000),
    ],
    "a wrong content type": [
        Bad(
            415,
            f"is '{kind}'; send JSON with the header 'Content-Type: application/json'",
            code="unsupported_media_type",
            body=b'{"prompt": "a"}',
            headers={"Content-Type": f"{kind}; charset=utf-8"},
        )
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
    ]
    + [
        Bad(
            415,
            "has no Content-Type; send JSON with the header 'Content-Type: application/json'",
            code="unsupported_media_type",
            body=b'{"prompt": "a"}',
            headers={},
        ),
        Bad(
            415,
            "encoded as 'gzip'",
            code="unsupported_media_type",
            body=b"\x1f\x8b",
            headers={**JSON, "Content-Encoding": "gzip"},
        ),
    ],
    "an oversized body": [
        Bad(
            413,
            r"has at least \d+ bytes; the limit is 1048576",
            code="request_too_large",
            body=b'{"prompt": "' + b"a" * (3 << 20) + b'"}',
        )
    ],
    "an unknown route": [
        Bad(
            404, "no '/v1/complete'. Did you mean '/v1/comp", None, "not_found", path="/v1/complete"
        ),
        Bad(404, "There is no '/nowhere'", None, "not_found", method="GET", path="/nowhere"),
    ],
    "a wrong method": [
        Bad(405, "does not take GET; use POST", method="GET"),
        Bad(405, "does not take PUT; use POST", body=b"{}", method="PUT", path=CHAT),
        Bad(405, "does not take DELETE; use .*GET", method="DELETE", path="/v1/models"),
    ],
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_request_gets_its_answer_and_disturbs_no_stream(
    kind: str, healthy: Disturbance
) -> None:
    def disturb() -> None:
        for bad in BAD[kind]:
            bad.send(healthy.server)

    healthy.during(disturb, rounds=3)


def test_one_bad_prompt_among_good_ones_submits_none(healthy: Disturbance) -> None:
    """A list is served whole or refused whole: nothing of it may run on behind the refusal."""
    server = healthy.server
    bad = text(RANGE, "prompt", prompt=[[5, 6], [7, 8], [VOCAB]], max_tokens=400)
    server.await_idle()
    before = server.gauge("prompt_tokens_total")
    bad.send(server)
    assert server.post(TEXT, {"prompt": [9, 9, 9], "max_tokens": 1}).status == 200
    server.await_idle()
    assert server.gauge("prompt_tokens_total") == before + 3
    healthy.during(lambda: bad.send(server), rounds=3)


@pytest.mark.parametrize(
    "send",
    [
        lambda server: server.post(TEXT, {"prompt": [5] * (MAX_MODEL_LEN - 1), "max_tokens": 50}),
        lambda server: server.post(TEXT, {"prompt": "\0\x01\x7f" * 30, "max_tokens": 2**31 - 1}),
        lambda server: server.post(TEXT, {"prompt": "a", "n": 128, "max_tokens": 2}),
        lambda server: server.post(TEXT, {"prompt": ["a"] * 300, "max_tokens": 1}),
        lambda server: server.post(TEXT, {"prompt": "a", "priority": -(2**63), "seed": -(2**63)}),
    ],
    ids=["full prompt", "huge max_tokens", "many choices", "many prompts", "least integers"],
)
def test_what_is_just_within_the_limits_is_served_and_disturbs_no_stream(
    send: Callable[[ServerProcess], Any], healthy: Disturbance
) -> None:
    def disturb() -> None:
        reply = send(healthy.server)
        assert reply.status == 200, reply.body
        reasons = {choice["finish_reason"] for choice in reply.json()["choices"]}
        assert reasons <= {"length", "stop"}

    healthy.during(disturb, rounds=2)
