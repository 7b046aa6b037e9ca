"""Streams: their bytes, their order, slow readers, readers that leave."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from typing import Any

import pytest

from paceline.engine.outputs import Delta
from paceline.server import generate
from tests.patience import wait_for
from tests.server.fake_client import (
    Asked,
    FakeClient,
    Steps,
    ids_of,
    table,
    words,
)
from tests.server.serving import JSON, Served, serving


def events(body: bytes) -> list[Any]:
    """The JSON of each event; asserts the framing and the end."""
    parts = body.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""]
    assert all(p.startswith(b"data: {") for p in parts[:-2])
    return [json.loads(p[6:]) for p in parts[:-2]]


def choices(body: bytes) -> list[dict[str, Any]]:
    return [c for e in events(body) for c in e["choices"]]


def in_one_go(script: Any, **fields: Any) -> bytes:
    """The bytes of a stream whose steps arrive one per pump."""
    with serving(FakeClient(script)) as server:
        reply = server.chat(stream=True, **fields)
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return reply.body


def test_the_bytes_of_a_chat_stream_are_exact() -> None:
    body = in_one_go(lambda _: words("Hel", "lo ", "wörld"), stream_options={"include_usage": True})
    first = events(body)[0]
    head = (
        f'data: {{"id":"{first["id"]}","object":"chat.completion.chunk",'
        f'"created":{first["created"]},"model":"tiny",'
        f'"system_fingerprint":"{first["system_fingerprint"]}","choices":'
    )
    rest = ',"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    expected = (
        head + '[{"index":0,"delta":{"role":"assistant","content":""}' + rest
        + head + '[{"index":0,"delta":{"content":"Hel"}' + rest
        + head + '[{"index":0,"delta":{"content":"lo "}' + rest
        + head + '[{"index":0,"delta":{"content":"wörld"}' + rest
        + head + '[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"usage":null}\n\n'
        + head + '[],"usage":{"prompt_tokens":19,"completion_tokens":12,"total_tokens":31,'
        '"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":'
        '{"reasoning_tokens":0,"accepted_prediction_tokens":0,"rejected_prediction_tokens":0}}}\n\n'
        "data: [DONE]\n\n"
    )  # fmt: skip
    assert body == expected.encode()


def test_the_bytes_of_a_text_stream_are_exact() -> None:
    with serving(FakeClient(lambda _: words("a", "b", finish="length"))) as server:
        body = server.complete(prompt="Hi", stream=True, echo=True).body
    first = events(body)[0]
    head = (
        f'data: {{"id":"{first["id"]}","object":"text_completion",'
        f'"created":{first["created"]},"model":"tiny",'
        f'"system_fingerprint":"{first["system_fingerprint"]}","choices":'
    )
    assert first["id"].startswith("cmpl-")
    expected = (
        head + '[{"text":"Hi","index":0,"logprobs":null,"finish_reason":null}]}\n\n'
        + head + '[{"text":"a","index":0,"logprobs":null,"finish_reason":null}]}\n\n'
        + head + '[{"text":"b","index":0,"logprobs":null,"finish_reason":null}]}\n\n'
        + head + '[{"text":"","index":0,"logprobs":null,"finish_reason":"length"}]}\n\n'
        "data: [DONE]\n\n"
    )  # fmt: skip
    assert body == expected.encode()


def test_without_include_usage_there_is_no_usage() -> None:
    found = events(in_one_go(lambda _: words("x")))
    assert all("usage" not in e for e in found)
    assert all(e["choices"] for e in found)


def test_continuous_usage_counts_as_it_goes() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(in_one_go(lambda _: words("ab", "cde"), stream_options=options))
    assert [e["usage"]["completion_tokens"] for e in found] == [2, 2, 5, 5, 5]
    assert found[-1]["choices"] == []


def test_the_stop_reason_comes_with_the_end_only() -> None:
    found = choices(in_one_go(lambda _: words("a", "b", stop_reason="END")))
    assert [c.get("stop_reason") for c in found] == [None, None, None, "END"]


def test_choices_of_n_interleave_and_each_begins_with_its_role() -> None:
    def script(asked: Asked) -> Steps:
        one, two = words("a", "b", "c"), words("x", "y", index=1)
        return [one[0], [*two[0], *one[1]], two[1], one[2]]

    found = choices(in_one_go(script, n=2))
    said = [(c["index"], c["delta"].get("content"), c["finish_reason"]) for c in found]
    assert said == [
        *[(0, "", None), (0, "a", None)],
        *[(0, "b", None), (1, "", None), (1, "x", None)],
        *[(1, "y", None), (1, None, "stop")],
        *[(0, "c", None), (0, None, "stop")],
    ]
    roles = [c["index"] for c in found if "role" in c["delta"]]
    assert roles == [0, 1]


def test_tokens_whose_text_is_held_back_make_no_empty_chunk() -> None:
    def script(asked: Asked) -> Steps:
        return [[Delta(0, "", [1])], [Delta(0, "", [2])], *words("done")]

    found = choices(in_one_go(script))
    assert [c["delta"].get("content") for c in found] == ["", "done", None]


def test_logprobs_and_token_ids_travel_with_their_tokens() -> None:
    def script(asked: Asked) -> Steps:
        a, b = ids_of("ab")
        held = Delta(0, "", [a], logprobs=[table(a)])
        return [[held], [Delta(0, "ab", [b], logprobs=[table(b)], finish_reason="stop")]]

    found = choices(in_one_go(script, logprobs=True, return_token_ids=True))
    content = [c["delta"].get("content") for c in found]
    assert content == ["", "", "ab", None]
    tokens = [t["token"] for c in found if c["logprobs"] for t in c["logprobs"]["content"]]
    assert tokens == ["a", "b"]
    assert [t for c in found for t in c.get("token_ids", [])] == ids_of("ab")


def test_prompt_extras_come_with_the_first_chunk(server: Served, client: FakeClient) -> None:
    found = events(server.chat(stream=True, return_token_ids=True, prompt_logprobs=0).body)
    assert found[0]["prompt_token_ids"] == client.last.prompt_token_ids
    assert len(found[0]["prompt_logprobs"]) == len(client.last.prompt_token_ids)
    assert all("prompt_token_ids" not in e for e in found[1:])


def test_an_echoing_stream_holds_choices_back_until_the_prompt_is_scored() -> None:
    def script(asked: Asked) -> Steps:
        # Sequence 1 is faster than sequence 0, which brings the prompt's logprobs.
        steps = [*words("x", finish=None, index=1), *words("a"), *words("y", index=1)]
        for (delta,) in steps:
            delta.logprobs = [table(t) for t in delta.token_ids]
        rest = asked.prompt_token_ids[1:]
        steps[1][0].prompt_logprobs = [None, *(table(t) for t in rest)]
        return steps

    with serving(FakeClient(script)) as server:
        found = choices(server.complete(stream=True, echo=True, logprobs=0, n=2).body)
    said = [(c["index"], c["text"]) for c in found]
    assert said[0] == (0, "Hi")
    assert [t for i, t in said if i == 1] == ["Hi", "x", "y", ""]
    first = next(c for c in found if c["index"] == 1)
    assert first["logprobs"]["token_logprobs"] == [None, -0.5]
    offsets = [
        o for c in found if c["index"] == 1 and c["logprobs"] for o in c["logprobs"]["text_offset"]
    ]
    assert offsets == [0, 1, 2, 3]


def test_an_error_before_the_first_token_has_a_status() -> None:
    with serving(FakeClient(lambda _: words("", finish="error"))) as server:
        reply = server.chat(stream=True)
    assert reply.status == 500
    assert reply.error["type"] == "server_error"


def test_an_error_in_the_middle_is_an_event() -> None:
    body = in_one_go(lambda _: [*words("Hel", finish=None), *words("lo", finish="error")])
    found = events(body)
    said = [c["delta"].get("content") for e in found[:-1] for c in e["choices"]]
    assert said == ["", "Hel", "lo"]
    assert list(found[-1]) == ["error"]
    assert found[-1]["error"]["type"] == "server_error"


def test_a_dead_engine_ends_streams_with_an_event_and_then_answers_503() -> None:
    client = FakeClient(lambda _: words("a", "b"), by_hand=True)
    with serving(client) as server:
        stream = open_stream(server)
        client.allow(1)
        read_until(stream, b'"content":"a"')
        client.die(f"OSError: '/srv/models/x.bin' {'y' * 300}\n  at /srv/engine.py:7 in turn")
        rest = stream.read()
        assert b'"code":"engine_dead"' in rest
        assert b"The engine has stopped; the server's log says why. OSError: 'x.bin' yyy" in rest
        assert b"/srv" not in rest
        assert b"engine.py" not in rest
        assert b"y" * 200 not in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert server.chat().status == 503
        assert server.chat().error["code"] == "engine_dead"
        assert server.get("/health").status == 503
        assert server.get("/readyz").status == 503


# ---- readers that are slow or leave


def open_stream(server: Served, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    """A response whose body has not been read."""
    fields.setdefault("messages", [{"role": "user", "content": "Hi"}])
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path, json.dumps({"stream": True, **fields}), JSON)
    # The status line comes with the first token.
    return Stream(connection)


class Stream:
    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.connection = connection
        self.socket: socket.socket = connection.sock
        self._response: http.client.HTTPResponse | None = None

    def read(self, amount: int | None = None) -> bytes:
        if self._response is None:
            self._response = self.connection.getresponse()
        return self._response.read(amount) if amount is not None else self._response.read()

    def read1(self) -> bytes:
        if self._response is None:
            self._response = self.connection.getresponse()
        return self._response.read1()

    def close(self) -> None:
        self.socket.close()
        self.connection.close()
        if self._response is not None:
            self._response.close()


def read_until(stream: Stream, mark: bytes) -> bytes:
    found = b""
    while mark not in found:
        more = stream.read1()
        assert more, found
        found += more
    return found


def test_a_stream_is_aborted_when_its_client_leaves() -> None:
    client = FakeClient(lambda _: words("a", "b", "c"), by_hand=True)
    with serving(client) as server:
        stream = open_stream(server)
        client.allow(1)
        read_until(stream, b'"content":"a"')
        stream.close()
        wait_for(lambda: client.aborted == [client.last.request_id])
        wait_for(lambda: not server.service.jobs)


def test_a_request_that_waits_for_its_first_token_is_aborted_when_its_client_leaves() -> None:
    client = FakeClient(by_hand=True)
    with serving(client) as server:
        for stream in (True, False):
            reader = open_stream(server, stream=stream)
            client.await_asked(len(client.aborted) + 1)
            reader.close()
            wait_for(lambda: client.aborted == [a.request_id for a in client.asked])


def test_every_prompt_of_a_request_is_aborted() -> None:
    client = FakeClient(by_hand=True)
    with serving(client) as server:
        reader = open_stream(server, "/v1/completions", prompt=["a", "b", "c"], messages=None)
        reader.close()
        reader = open_stream(server, "/v1/completions", prompt=["a", "b", "c"])
        reader.close()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        asked = json.dumps({"prompt": ["a", "b", "c"]})
        connection.request("POST", "/v1/completions", asked, JSON)
        client.await_asked(3)
        connection.close()
        wait_for(lambda: len(client.aborted) == 3)


def test_a_finished_request_is_not_aborted(server: Served, client: FakeClient) -> None:
    assert server.chat(stream=True).status == 200
    assert server.chat().status == 200
    wait_for(lambda: not server.service.jobs)
    assert client.aborted == []


LONG = "x" * 4000


def long_pieces(count: int) -> Steps:
    steps = [[Delta(0, f"{i:05d}{LONG}", [1])] for i in range(count)]
    steps[-1][0].finish_reason = "length"
    return steps


def test_a_slow_reader_gets_joined_pieces_and_delays_no_other() -> None:
    """The slow stream's socket fills up; its pieces are joined, and the other stream flows."""
    steps = 4000

    def script(asked: Asked) -> Steps:
        if asked.prompt and "slow" in asked.prompt:
            return long_pieces(steps)
        return words(*["tick"] * 5)

    client = FakeClient(script, by_hand=True)
    with serving(client) as server:
        slow = open_stream(server, messages=[{"role": "user", "content": "slow"}])
        slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.await_asked(1)
        client.allow(steps + 100)
        wait_for(lambda: client.last.generation.finished)  # all of it arrived, hardly any was sent
        assert choices(server.chat(stream=True).body)[-1]["finish_reason"] == "stop"
        (job,) = server.service.jobs
        assert len(job._pending) == 1
        body = slow.read()
    found = choices(body)
    text = "".join(c["delta"].get("content", "") for c in found)
    assert text == "".join(f"{i:05d}{LONG}" for i in range(steps))
    # What did not fit the socket's buffers came as one piece, not as four thousand.
    assert len(found) < steps // 2


def test_a_client_that_never_reads_is_dropped_after_the_write_timeout() -> None:
    client = FakeClient(lambda _: long_pieces(4000))
    with serving(client, write_timeout_s=1.0) as server:
        stream = open_stream(server)
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.await_asked(1)
        wait_for(lambda: client.last.generation.finished)
        wait_for(lambda: not server.service.jobs)
        rest = b""
        with contextlib.suppress(ConnectionResetError, http.client.IncompleteRead):
            while piece := stream.read1():
                rest += piece
        assert b"[DONE]" not in rest, "it was served to its end"
        stream.close()


def test_a_silent_stream_says_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "PING_INTERVAL_S", 0.05)
    client = FakeClient(lambda _: words("a", "b"), by_hand=True)
    with serving(client) as server:
        stream = open_stream(server)
        assert read_until(stream, b"\n\n").startswith(b": waiting\n\n")
        client.allow(2)
        rest = stream.read()
    found = rest.replace(b": waiting\n\n", b"")
    assert [c["delta"].get("content") for c in choices(found)] == ["", "a", "b", None]
