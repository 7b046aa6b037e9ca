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

from paceline.server.listen import HEADER_TIMEOUT_S, Acceptor
from paceline.server.options import ServerOptions


class _Uvicorn(uvicorn.Server):
    """Without a say in signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpConnection(HttpToolsProtocol):
    """One connection: tells when it ends, and does not wait for ever for a first request."""

    on_lost: Callable[[], None]
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(HEADER_TIMEOUT_S, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._patience is not None:
            self._patience.cancel()
        self.on_lost()

    def _close_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.close()


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
