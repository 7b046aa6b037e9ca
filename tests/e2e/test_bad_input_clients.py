"""Clients that go away, read slowly or never finish asking, while eight healthy streams run."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.disturbance import Disturbance
from tests.e2e.serving import ServerProcess, Streamed, events_in
from tests.patience import PATIENCE_S, wait_for

TEXT = "/v1/completions"
NUM_TOKENS = 480
LONG = {"prompt": [7, 8, 9], "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
BYTE_INTERVAL_S = 0.05  # what makes a slow reader slow
NUM_CHOICES = 4
MIB = 1 << 20


def reset(sock: socket.socket) -> None:
    """Close without a farewell, as a process that was killed or a cable that was pulled does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def half_close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)
    sock.close()


def leave_a_stream(server: ServerProcess, leave: Callable[[socket.socket], None]) -> None:
    sock = server.open_stream(TEXT, {**LONG, "n": 2})
    assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
    leave(sock)


def leave_before_the_answer(server: ServerProcess, leave: Callable[[socket.socket], None]) -> None:
    leave(server.send_raw(TEXT, json.dumps(LONG).encode()))


def leave_in_the_body(server: ServerProcess, leave: Callable[[socket.socket], None]) -> None:
    leave(server.send_raw(TEXT, json.dumps(LONG).encode()[:-9], missing=9))


def leave_in_the_headers(server: ServerProcess, leave: Callable[[socket.socket], None]) -> None:
    sock = socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
    leave(sock)


@pytest.mark.parametrize(
    "moment", [leave_a_stream, leave_before_the_answer, leave_in_the_body, leave_in_the_headers]
)
def test_clients_that_go_away_end_their_own_request_only(
    moment: Callable[..., None], healthy: Disturbance
) -> None:
    server = healthy.server

    def disturb() -> None:
        for leave in (reset, socket.socket.close, half_close):
            moment(server, leave)

    healthy.during(disturb, rounds=8)
    # Each would run on for 480 tokens; no client waits for them any more.
    server.await_idle()
    assert server.gauge("kv_cache_usage_perc") == 0


def test_a_client_that_goes_away_stops_its_generation(healthy: Disturbance) -> None:
    """What it would have been given is not computed: the counter stays far below it."""
    server = healthy.server
    server.await_idle()
    before = server.gauge("generation_tokens_total")
    for _ in range(5):
        leave_a_stream(server, reset)
        server.await_idle()
    assert server.gauge("generation_tokens_total") - before < 5 * 2 * NUM_TOKENS


class SlowReader:
    """Reads one byte at a time of a stream with several choices, and the rest when told."""

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        self._sock = server.open_stream(TEXT, fields, read_buffer=4096)
        self._got = bytearray()

    def read_byte(self) -> None:
        self._got += self._sock.recv(1)

    def read_rest(self) -> list[Streamed]:
        """What each choice said."""
        with contextlib.closing(self._sock):
            while not self._got.endswith(b"0\r\n\r\n"):  # the last chunk
                got = self._sock.recv(1 << 20)
                assert got, "it was cut off"
                self._got += got
        choices = [Streamed() for _ in range(NUM_CHOICES)]
        for event in events_in(bytes(self._got)):
            for choice in event["choices"]:
                choices[choice["index"]].take({"choices": [choice]})
        return choices


def test_a_slow_reader_delays_no_other_and_costs_its_own_output_only(
    healthy: Disturbance,
) -> None:
    server = healthy.server
    asked = {**LONG, "n": NUM_CHOICES, "logprobs": 20, "return_token_ids": True}
    expected = server.post(TEXT, {**asked, "n": 1}).json()["choices"][0]
    server.await_idle()
    memory_before = server.resident_bytes()
    readers = [SlowReader(server, **asked) for _ in range(2)]

    def disturb() -> None:
        for reader in readers:
            reader.read_byte()
        time.sleep(BYTE_INTERVAL_S)

    healthy.during(disturb, rounds=20)
    # The engine is done with them although their readers have seen a few bytes each.
    wait_for(lambda: server.gauge("num_requests_running") == 0, PATIENCE_S)
    healthy.during(disturb, rounds=1)
    assert server.resident_bytes() - memory_before < 16 * MIB
    for reader in readers:
        choices = reader.read_rest()
        assert [c.token_ids for c in choices] == [expected["token_ids"]] * NUM_CHOICES
        assert [c.text for c in choices] == [expected["text"]] * NUM_CHOICES
