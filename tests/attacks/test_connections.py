"""Clients that send headers, trailers or bodies without end, or never end a request."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Iterator
from itertools import product

import pytest

from paceline.server import body as body_module
from paceline.server import http as http_module
from tests.server.fake_client import FakeClient
from tests.server.processes import Process, resident_bytes, running
from tests.server.serving import JSON, Served, serving
from tests.tiers import first_or_more

MIB = 1 << 20
PATIENCE_S = 60.0
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
GONE = (BrokenPipeError, ConnectionResetError)


def connect(server: Served | Process) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def feed(sock: socket.socket, piece: bytes, num_bytes: int) -> bool:
    """Send `piece` again and again; False when the server has closed the connection before."""
    for _ in range(num_bytes // len(piece)):
        try:
            sock.sendall(piece)
        except GONE:
            return False
    return True


def trickle(sock: socket.socket, piece: bytes, within_s: float = PATIENCE_S) -> None:
    """Send `piece` every now and then until the server has closed the connection."""
    give_up_s = time.monotonic() + within_s
    with contextlib.suppress(*GONE):
        while True:
            assert time.monotonic() < give_up_s, "the connection is still open"
            sock.sendall(piece)
            time.sleep(0.02)


def read_all(sock: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while got := sock.recv(1 << 16):
            found += got
    return found


# ---- bytes


ENDLESS = {
    "trailers": (b"0\r\n", b"X-T: " + b"x" * 1000 + b"\r\n"),
    "one trailer": (b"0\r\nX-T: ", b"x" * 1000),
    "chunk extensions": (b"5;a=", b"x" * 1000),
}


@pytest.mark.parametrize(
    ("kind", "key"),
    first_or_more(
        product(ENDLESS, (None, "sesame")),
        lambda pair: (pair[0] == "trailers") == (pair[1] is not None),
    ),
)
def test_what_never_ends_after_the_header_takes_no_memory(kind: str, key: str | None) -> None:
    """One connection with 64 MiB; without a key it used to be kept whole, and more than that."""
    begin, piece = ENDLESS[kind]
    with running(api_key=key) as process:
        process.request("GET", "/health")
        before = resident_bytes(process.popen.pid)
        with connect(process) as sock:
            sock.sendall(CHUNKED + begin)
            was_read = feed(sock, piece, 64 * MIB)
            reply = read_all(sock)
        # Cut off; or it was answered first, and what came then was dropped.
        assert not was_read or (key is not None and reply.startswith(b"HTTP/1.1 401"))
        assert process.request("GET", "/health")[0] == 200
        assert resident_bytes(process.popen.pid) - before < 16 * MIB
        process.popen.terminate()
        assert "Traceback" not in process.await_exit()[1]


def test_trailers_are_not_taken_for_headers() -> None:
    with serving(FakeClient(), api_key="sesame") as server, connect(server) as sock:
        body = b'5\r\n{"pro\r\n0\r\nAuthorization: Bearer sesame\r\n\r\n'
        sock.sendall(CHUNKED + body)
        assert read_all(sock).startswith(b"HTTP/1.1 401")


def test_a_body_in_very_many_chunks_is_served() -> None:
    """Its framing is longer than a header may be."""
    body = b'{"prompt": "x"}' + b" " * 30_000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    assert len(chunks) - len(body) > http_module.MAX_HEADER_BYTES
    with serving(FakeClient()) as server, connect(server) as sock:
        sock.sendall(CHUNKED.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nConnection: close\r\n"))
        sock.sendall(chunks + b"0\r\nX-Sum: 1\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 200")


def test_requests_sent_without_waiting_are_all_answered() -> None:
    """Together they are longer than one header may be."""
    asked = b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Padding: " + b"x" * 500 + b"\r\n"
    with serving(FakeClient()) as server, connect(server) as sock:
        sock.sendall((asked + b"\r\n") * 300 + asked + b"Connection: close\r\n\r\n")
        assert read_all(sock).count(b"HTTP/1.1 200") == 301


# ---- time


def test_a_trailer_that_trickles_ends_with_the_time_of_a_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_module, "BODY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(http_module, "LINGER_S", 0.2)
    with serving(FakeClient()) as server, connect(server) as sock:
        sock.sendall(CHUNKED + b"2\r\n{}\r\n0\r\nX-T: 1\r\n")
        trickle(sock, b"X-T: 1\r\n")


@pytest.mark.parametrize(
    "begin",
    [CHUNKED, POST + b"Content-Length: 1000000000\r\n\r\n"],
    ids=["chunked", "announced"],
)
def test_a_refused_request_cannot_be_fed_on(monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    monkeypatch.setattr(http_module, "LINGER_S", 0.2)
    with serving(FakeClient(), api_key="sesame") as server, connect(server) as sock:
        sock.sendall(begin)
        trickle(sock, b"1\r\nx\r\n")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/nowhere"])
def test_a_connection_closes_after_a_401(path: str) -> None:
    with serving(FakeClient(), api_key="sesame") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        connection.request("POST", path, b"{}", JSON)
        reply = connection.getresponse()
        assert (reply.status, reply.getheader("Connection")) == (401, "close")
        reply.read()
        connection.close()


def test_a_client_that_is_still_sending_can_read_its_refusal() -> None:
    """A socket that is closed with unread bytes is reset, and the reply is lost."""
    body = b'{"prompt": "' + b"x" * 12 * MIB + b'"}'
    with serving(FakeClient(), api_key="sesame") as server:
        for _ in range(3):
            assert server.post("/v1/completions", body).status == 401


def test_empty_lines_do_not_keep_a_connection_open() -> None:
    with serving(FakeClient(), header_timeout_s=1.0) as server, connect(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
        trickle(sock, b"\r\n")


# ---- places


@contextlib.contextmanager
def many(process: Process, count: int, sent: bytes) -> Iterator[None]:
    """`count` connections that have sent the beginning of a request."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(connect(process))
            with contextlib.suppress(*GONE):
                sock.sendall(sent)
        yield


HALVES = {
    "nothing": b"",
    "half a header": b"POST /v1/completions HTTP/1.1\r\nHost: loc",
    "a header without its body": POST + b"Content-Length: 9\r\n\r\n",
}


@pytest.mark.parametrize("half", first_or_more(HALVES, lambda half: half == "half a header"))
def test_half_sent_requests_at_the_limit_of_connections_keep_no_client_out(half: str) -> None:
    with running(max_connections=32, header_timeout_s=2.0) as process:
        # Bodies have more time than headers, so fewer of them wait here.
        count = 100 if "body" in half else 400
        with many(process, count, HALVES[half]):
            for _ in range(20):
                assert process.request("GET", "/health")[0] == 200
        assert process.request("POST", "/v1/completions", prompt="abc", max_tokens=3)[0] == 200
        process.popen.terminate()
        code, said = process.await_exit()
    assert (code, "Traceback" in said) == (0, False)


def test_a_running_request_makes_no_room_for_half_sent_ones() -> None:
    with running("delay_s=0.02", max_connections=16) as process:
        stream = process.open_stream(prompt="abc", max_tokens=150)
        first = stream.read1()
        with many(process, 100, HALVES["half a header"]):
            assert process.request("GET", "/health")[0] == 200
            body = first + stream.read()
        assert body.endswith(b"data: [DONE]\n\n")
        assert b"error" not in body
