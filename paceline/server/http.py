"""uvicorn, held by its parts: its HTTP protocol on connections that our own acceptor lets in.

uvicorn's own listener accepts until the process has no files left; everything else is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.server.listen import Acceptor
from paceline.server.options import ServerOptions

HEADER_TIMEOUT_S = 30.0
MAX_HEADER_BYTES = 1 << 16


class _Uvicorn(uvicorn.Server):
    """Without a say in signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpConnection(HttpToolsProtocol):
    """One connection: tells when it ends, and gives headers neither endless time nor room."""

    on_lost: Callable[[], None]
    _patience: asyncio.TimerHandle | None = None
    _header_bytes: int | None = None  # of the headers that arrive now

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        self.on_lost()

    def on_message_begin(self) -> None:
        self._stop_waiting()
        self._wait_for_headers()
        self._header_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._header_bytes = None
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._header_bytes is not None:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self.transport.close()

    def _wait_for_headers(self) -> None:
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(HEADER_TIMEOUT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class HttpServer:
    """Serves `app` on `sock` between `start` and `stop`."""

    def __init__(
        self, app: Starlette, options: ServerOptions, sock: socket.socket, max_connections: int
    ) -> None:
        self._sock = sock
        self._options = options
        self._max_connections = max_connections
        config = uvicorn.Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="on",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            log_level=options.uvicorn_log_level,
            timeout_keep_alive=options.keep_alive_timeout_s,
        )
        self._uvicorn = _Uvicorn(config)
        self._main: asyncio.Task[None] | None = None
        self._acceptor: Acceptor | None = None

    async def start(self) -> None:
        """Returns when connections are accepted."""
        server = self._uvicorn
        self._main = asyncio.create_task(server.serve(sockets=[]))
        while not server.started:
            if self._main.done():
                self._main.result()
                raise RuntimeError("uvicorn ended before it started")
            await asyncio.sleep(0.005)
        self._acceptor = Acceptor(
            self._sock,
            server.server_state.connections,  # type: ignore[arg-type]  # ours: HttpConnection
            self._make_protocol,
            max_connections=self._max_connections,
            write_timeout_s=self._options.write_timeout_s,
        )

    async def stop(self, *, grace_s: float) -> None:
        """Close the listener, let replies flush for `grace_s`, then cut what is left."""
        if self._acceptor is not None:
            self._acceptor.close()
        server = self._uvicorn
        # It would log a traceback for each request that is cut off; the caller has said so.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        server.should_exit = True
        if grace_s == 0.0:
            server.force_exit = True
        if self._main is not None:
            await self._main
        for connection in list(server.server_state.connections):
            connection.transport.abort()

    def _make_protocol(self) -> asyncio.Protocol:
        server = self._uvicorn
        connection = HttpConnection(
            config=server.config,
            server_state=server.server_state,
            app_state=server.lifespan.state,
        )
        acceptor = self._acceptor
        assert acceptor is not None
        connection.on_lost = acceptor.lost
        return connection
