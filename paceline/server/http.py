"""uvicorn's HTTP protocol, with limits that uvicorn lacks.

uvicorn's listener accepts until the process has no file descriptors left, so connections come from
`Acceptor`. Its protocol limits neither the time nor the size of headers and trailers.
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

# Limit of a request without its body. CHUNK_FRAME_BYTES of each chunk's framing are not counted.
MAX_HEADER_BYTES = 1 << 16
CHUNK_FRAME_BYTES = 16
# After a reply that was sent before the request was complete: time for the client to read it.
LINGER_S = 5.0
# At the connection limit, a connection whose header takes longer may be closed for others.
FAIR_HEADER_S = 0.25
# Bytes are counted in pieces of this size. A piece with the end of one request and the beginning
# of the next counts for the next.
_PIECE_BYTES = 1 << 14


class _Uvicorn(uvicorn.Server):
    """Installs no signal handlers; `run_server` has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class LingeringTransport:
    """The transport that uvicorn writes to. `close` waits while a body still arrives.

    A socket that is closed with unread bytes is reset, and the client may lose the reply. So
    incoming bytes are read and dropped until the client closes or LINGER_S have passed.
    """

    is_receiving = False  # set by the connection: a body is arriving

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._is_lingering = False
        self.write = transport.write  # called for every token, so without a wrapper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """A second call closes without waiting."""
        if self.is_closing() or not self.is_receiving:
            self._transport.close()
            return
        self._is_lingering = True
        self._transport.resume_reading()
        self._transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)


class HttpConnection(HttpToolsProtocol):
    """One connection, with limits on the time and size of a request's header.

    `server/body.py` limits the body. A reply that begins before the request is complete ends the
    connection.
    """

    transport: LingeringTransport  # type: ignore[assignment]
    cycle: Any  # uvicorn's request and reply; None before the first request

    def __init__(
        self, *, on_lost: Callable[[], None], header_timeout_s: float, **uvicorn_parts: Any
    ) -> None:
        super().__init__(**uvicorn_parts)
        self.incomplete_since_s: float | None = None  # by the loop's clock
        self._on_lost = on_lost
        self._header_timeout_s = header_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._in_header = True
        self._keep_alive = False  # whether the connection stays open after the request
        self._num_header_bytes = 0  # of the current request
        self._num_body_bytes = 0  # of the current piece

    def is_overdue(self, now_s: float) -> bool:
        """Whether the client took too long to send its request, and no reply is being sent."""
        if self.incomplete_since_s is None:
            return False
        waited_s = now_s - self.incomplete_since_s
        if not self._in_header:
            return waited_s >= self._header_timeout_s
        return waited_s >= FAIR_HEADER_S and (self.cycle is None or self.cycle.response_complete)

    def shutdown(self) -> None:
        self._keep_alive = False
        super().shutdown()

    # ---- the transport's side

    def connection_made(self, transport: Any) -> None:
        super().connection_made(LingeringTransport(transport))  # type: ignore[arg-type]
        self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_deadline()
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        for at in range(0, len(data), _PIECE_BYTES):
            if self.transport.is_closing():
                return  # the rest is dropped
            self._parse(data[at : at + _PIECE_BYTES])

    def _parse(self, piece: bytes) -> None:
        self._num_body_bytes = 0
        super().data_received(piece)
        if self.incomplete_since_s is not None:
            extra = len(piece) - self._num_body_bytes
            self._num_header_bytes = max(0, self._num_header_bytes + extra)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self.transport.abort()
        elif self.cycle.response_complete:
            # Empty lines before a request have cancelled uvicorn's keep-alive timer.
            self._await_header()

    # ---- the parser's side

    def on_message_begin(self) -> None:
        self._await_header()
        self._num_header_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_header:  # else it is a trailer, which is ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_header = False
        self._end_deadline()
        super().on_headers_complete()
        # The connection can be used again only after a complete request.
        self._keep_alive, self.cycle.keep_alive = self.cycle.keep_alive, False
        self.transport.is_receiving = True

    def on_chunk_header(self) -> None:
        self._num_body_bytes += CHUNK_FRAME_BYTES

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.incomplete_since_s = None
        self.transport.is_receiving = False
        super().on_message_complete()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep_alive

    def _await_header(self) -> None:
        self._in_header = True
        if self._deadline is None:
            self.incomplete_since_s = self.loop.time()
            self._deadline = self.loop.call_later(self._header_timeout_s, self.transport.abort)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


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
            log_config=None,  # observe.log configures its loggers
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
            server.server_state.connections,  # type: ignore[arg-type]  # they are HttpConnections
            self._make_protocol,
            max_connections=self._max_connections,
            write_timeout_s=self._options.write_timeout_s,
        )

    async def stop(self, *, grace_s: float) -> None:
        """Close the listener, let replies finish for `grace_s`, then abort the rest."""
        if self._acceptor is not None:
            self._acceptor.close()
        server = self._uvicorn
        # uvicorn would log a traceback for each aborted request; the caller has logged the stop.
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
        acceptor = self._acceptor
        assert acceptor is not None
        return HttpConnection(
            on_lost=acceptor.lost,
            header_timeout_s=self._options.header_timeout_s,
            config=server.config,
            server_state=server.server_state,
            app_state=server.lifespan.state,
        )
