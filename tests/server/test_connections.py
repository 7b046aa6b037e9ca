"""Many connections, few files: no client hangs, and new clients get room."""

from __future__ import annotations

import asyncio
import errno
import http.client
import socket
from typing import Any

import pytest

from paceline.server.listen import Acceptor, bind, connection_limit, request_limit
from paceline.server.options import ServerOptions
from tests.patience import PATIENCE_S
from tests.server.fake_client import FakeClient
from tests.server.flood import flood
from tests.server.processes import running
from tests.server.serving import serving


def test_a_flood_over_the_limit_of_files_is_answered_to_the_last() -> None:
    """Many times more connections at once than the server may have files."""
    with running("delay_s=0.005 slots=16", max_files=120) as process:
        results = flood(process.port, 800)
        assert results.total() == 800
        assert set(results) <= {"200", "429", "refused"}
        assert results["200"] >= 16
        assert process.request("GET", "/health")[0] == 200
        process.popen.terminate()
        code, said = process.await_exit()
    assert code == 0
    assert "Traceback" not in said


def test_some_connections_are_kept_for_refusing() -> None:
    options = ServerOptions(max_connections=100)
    assert connection_limit(options) <= 100
    assert request_limit(options, 100) == 75
    assert request_limit(ServerOptions(max_waiting=10), 100) == 10
    assert request_limit(options, 1) == 1


def keep_alive(port: int) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", "/health")
    connection.getresponse().read()
    return connection


def test_idle_connections_make_room_for_new_ones() -> None:
    with serving(FakeClient(), max_connections=4) as server:
        idle = [keep_alive(server.port) for _ in range(4)]
        for _ in range(8):  # an idle connection ends by itself after 75 s: `get` waits for 60
            assert server.get("/health").status == 200
        for connection in idle:
            connection.close()


def test_connections_that_ask_nothing_are_closed() -> None:
    with serving(FakeClient(), max_connections=4, header_timeout_s=1.0) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        assert server.get("/health").status == 200
        for sock in silent:
            assert sock.recv(1) == b""
            sock.close()


def test_headers_without_end_are_cut_off() -> None:
    with serving(FakeClient(), header_timeout_s=60.0) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\n")
            endless = (b"X-Padding: " + b"x" * 1000 + b"\r\n") * 10_000
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                sock.sendall(endless)
        assert server.get("/health").status == 200


def test_slow_headers_on_a_used_connection_are_cut_off() -> None:
    with serving(FakeClient(), header_timeout_s=1.0) as server:
        connection = keep_alive(server.port)
        connection.sock.sendall(b"GET /health HTTP/1.1\r\nHost:")
        assert connection.sock.recv(1) == b""
        connection.close()


class FullOnce:
    """A listening socket whose first accept finds no free file."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.failed = 0

    def accept(self) -> Any:
        if not self.failed:
            self.failed += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._sock.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def test_running_out_of_files_is_waited_out() -> None:
    received: list[bytes] = []

    class Greet(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(b"hello")

    async def main() -> None:
        sock = FullOnce(bind(ServerOptions(port=0)))
        acceptor = Acceptor(
            sock,  # type: ignore[arg-type]
            [],
            Greet,
            max_connections=4,
            write_timeout_s=1.0,
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", sock.getsockname()[1])
        async with asyncio.timeout(5):
            received.append(await reader.readexactly(5))
        assert sock.failed == 1
        writer.close()
        acceptor.close()

    asyncio.run(main())
    assert received == [b"hello"]
