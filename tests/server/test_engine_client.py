"""The server over the real EngineClient and an engine that repeats prompts; nothing is faked."""

from __future__ import annotations

import gc
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline.engine.client import EngineClient
from paceline.engine.outputs import Delta, Generation, SequenceOutput
from paceline.errors import Overloaded
from paceline.server.job import Job
from tests.engine.echo_client import echo_client, echo_front
from tests.patience import PATIENCE_S, wait_for
from tests.server.serving import JSON, Served, serving


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineClient]:
    front = echo_front(default_sampling={"temperature": 0.5})
    behaviour = "k=2 delay_s=0.001 slots=16"
    spec = {"method": "ngram", "num_speculative_tokens": 2}
    with echo_client(behaviour, front=front, speculative_config=spec) as client:
        yield client


@pytest.fixture(scope="module")
def server(engine: EngineClient) -> Iterator[Served]:
    with serving(engine, max_request_bytes=100_000) as served:
        yield served


def text_of(body: bytes) -> str:
    found = [json.loads(e[6:]) for e in body.split(b"\n\n") if e.startswith(b"data: {")]
    return "".join(c["text"] for e in found for c in e.get("choices", []))


def test_text_usage_and_the_end_are_the_engines(server: Served) -> None:
    body = server.complete(prompt="abc", max_tokens=9).json()
    assert body["choices"][0]["text"] == "abcabcabc"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 9
    assert body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_a_stop_string_is_never_shown(server: Served) -> None:
    for stream in (False, True):
        reply = server.complete(prompt="one two ", max_tokens=50, stop=["two"], stream=stream)
        text = text_of(reply.body) if stream else reply.json()["choices"][0]["text"]
        assert text == "one "
    choice = server.complete(prompt="one two ", max_tokens=50, stop="two").json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "two")


def test_characters_of_several_tokens_come_whole(server: Served) -> None:
    text = "żółw 🐢 "
    size = len(text.encode())
    body = server.complete(prompt=text, max_tokens=2 * size, stream=True).body
    assert text_of(body) == text * 2


def test_echoed_logprobs_hold_prompt_and_output(server: Served) -> None:
    choice = server.complete(prompt="abcd", max_tokens=4, echo=True, logprobs=2, n=2).json()[
        "choices"
    ][1]
    assert choice["text"] == "abcdabcd"
    assert choice["logprobs"]["tokens"] == list("abcdabcd")
    assert choice["logprobs"]["token_logprobs"] == [None, *[-1.5] * 7]
    assert choice["logprobs"]["text_offset"] == list(range(8))
    assert all(len(t) == 2 for t in choice["logprobs"]["top_logprobs"][1:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fails_at", ["first", "last"])
def test_a_job_that_cannot_take_its_output_answers_500_and_others_go_on(
    server: Served, monkeypatch: pytest.MonkeyPatch, fails_at: str, stream: bool
) -> None:
    """Its request was aborted, and the client waited for ever."""
    add = Job._add

    def broken(job: Job, choice: int, delta: Delta, now: float) -> None:
        add(job, choice, delta, now)
        if fails_at == "first" or delta.finish_reason is not None:
            raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Job, "_add", broken)
        reply = server.complete(prompt="abc", max_tokens=5, stream=stream)
    if fails_at == "first" and not stream:
        assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert server.complete(prompt="abc", max_tokens=3).json()["choices"][0]["text"] == "abc"


def test_limits_of_the_engine_are_400s(server: Served) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": [999]}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"num_speculative_tokens": 9}, "num_speculative_tokens"),
        ({"speculative": {"num_speculative_tokens": 9}}, "num_speculative_tokens"),
        ({"speculative": {"method": "eagle3"}}, "speculative.method"),
        ({"speculative": {"tokens": 1}}, "speculative.tokens"),
        (
            {"speculative": {"num_speculative_tokens": 1}, "num_speculative_tokens": 2},
            "speculative",
        ),
        ({"logits_processors": ["unknown"]}, "logits_processors"),
        ({"min_tokens": 5000, "max_tokens": 5001}, "min_tokens"),
    ]
    for fields, param in cases:
        reply = server.complete(**fields)
        assert (reply.status, reply.error["param"]) == (400, param), fields


def test_a_client_that_leaves_frees_its_slot(server: Served, engine: EngineClient) -> None:
    before = engine.stats.finished["abort"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    asked = {"prompt": "abc", "max_tokens": 500, "stream": True, "n": 3}
    connection.request("POST", "/v1/completions", json.dumps(asked), JSON)
    response = connection.getresponse()
    response.read1()
    response.close()
    connection.close()
    wait_for(lambda: engine.stats.finished["abort"] == before + 3)
    wait_for(lambda: engine.num_open == 0)


def ask_and_fail(server: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.complete, prompt="abc", max_tokens=400)
        wait_for(lambda: any(job.generations for job in list(server.service.jobs)))
        server.loop.call_soon_threadsafe(server.service.fail_all, Overloaded("too late"))
        assert reply.result().status == 429


ENDINGS: dict[str, Callable[[Served], object]] = {
    "whole": lambda s: s.complete(prompt="abc", max_tokens=5),
    "two prompts": lambda s: s.complete(prompt=["abc", "xyz"], max_tokens=5, n=2),
    "stream": lambda s: s.complete(prompt="abc", max_tokens=5, stream=True),
    "stop string": lambda s: s.complete(prompt="one two ", max_tokens=50, stop=["two"]),
    "logprobs": lambda s: s.complete(prompt="abc", max_tokens=5, logprobs=2, echo=True),
    "client leaves": lambda s: s.post_and_leave(
        "/v1/completions", {"prompt": "abc", "max_tokens": 400, "stream": True}, lambda: None
    ),
    "refused": lambda s: s.complete(prompt="x" * 600),
    "fails": ask_and_fail,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_request_that_has_ended_is_freed_without_a_garbage_collection(
    server: Served, ending: str
) -> None:
    """Collections are rare in a server. Prompts of dead requests must not wait for one."""

    def num_kept() -> int:
        return sum(isinstance(o, Job | Generation | SequenceOutput) for o in gc.get_objects())

    wait_for(lambda: not server.service.jobs)
    gc.collect()
    before = num_kept()
    gc.disable()
    try:
        for _ in range(3):
            ENDINGS[ending](server)
        wait_for(lambda: num_kept() <= before)
    finally:
        gc.enable()


# ---- eight healthy streams while others misbehave


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def slow_reader(server: Served) -> None:
    sock = socket.create_connection(("127.0.0.1", server.port))
    body = json.dumps({"prompt": "xyz", "max_tokens": 400, "stream": True, "logprobs": 5}).encode()
    sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    sock.recv(1)
    sock.close()


def leave_at_once(server: Served) -> None:
    for _ in range(5):
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.sendall(HEAD + b'Content-Length: 15\r\n\r\n{"prompt":')
        sock.close()


DISTURBANCES: dict[str, Callable[[Served], object]] = {
    "broken json": lambda s: s.post("/v1/completions", b'{"prompt": '),
    "unknown field": lambda s: s.complete(promt="x"),
    "too long": lambda s: s.complete(prompt="x" * 5000),
    "too large": lambda s: s.complete(prompt="x" * 200_000),
    "huge numbers": lambda s: s.complete(max_tokens=10**18, temperature=1e300),
    "unknown model": lambda s: s.complete(model="unknown"),
    "slow reader": slow_reader,
    "left": leave_at_once,
}


@pytest.mark.parametrize("name", DISTURBANCES)
def test_healthy_streams_do_not_notice(server: Served, name: str) -> None:
    words = [f"word {i} " for i in range(8)]

    def healthy(word: str) -> str:
        reply = server.complete(prompt=word, max_tokens=20 * len(word), stream=True, temperature=0)
        return text_of(reply.body)

    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(healthy, word) for word in words]
        while not all(s.done() for s in streams):
            DISTURBANCES[name](server)
        assert [s.result() for s in streams] == [word * 20 for word in words]
