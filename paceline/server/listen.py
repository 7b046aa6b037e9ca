"""The listening socket: binds, and accepts connections within the limit of open files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError
from paceline.server.options import ServerOptions

if TYPE_CHECKING:
    from paceline.server.http import HttpConnection

logger = logging.getLogger(__name__)

BACKLOG = 4096
# File descriptors that are no connections: the engine's socket, files, the event loop.
RESERVED_FILES = 64
# One in SPARE_SHARE connections is kept for answering 429 when the others run requests.
SPARE_SHARE = 4
_ACCEPTS_PER_TURN = 64
_RETRY_S = 0.05
_ROOM_INTERVAL_S = 0.25
_ROOM_SHARE = 16  # 1/16 of the connections is closed at a time
_OUT_OF_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def bind(options: ServerOptions) -> socket.socket:
    """Open the listening socket."""
    host, port = options.host, options.port
    family, address = _resolve(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PacelineError(
                f"Port {port} on {host} is in use; stop the process that uses it or choose another "
                "port with --port."
            ) from None
        raise PacelineError(
            f"Cannot listen on {host} port {port}: {error.strerror}. Check --host and --port."
        ) from None
    sock.setblocking(False)
    return sock


def is_loopback(options: ServerOptions) -> bool:
    """Whether only clients on this machine can connect."""
    return ip_address(_resolve(options.host, options.port)[1][0]).is_loopback


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise PacelineError(f"Cannot listen on {host!r}: {error.strerror}. Check --host.") from None
    family, _, _, _, address = found[0]
    return family, address


def url_of(sock: socket.socket) -> str:
    """A URL for clients on this machine."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def connection_limit(options: ServerOptions) -> int:
    """Raise the soft limit of open files to the hard one; most of it is for connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        soft = 1 << 20
    allowed = max(8, soft - RESERVED_FILES)
    return min(allowed, options.max_connections or allowed)


def request_limit(options: ServerOptions, max_connections: int) -> int:
    """Most open requests; some connections are kept for refusing further requests."""
    return max(1, min(options.max_waiting, max_connections - max_connections // SPARE_SHARE))


class Acceptor:
    """Accepts up to `max_connections`. Beyond that, clients wait in the kernel's queue."""

    def __init__(
        self,
        sock: socket.socket,
        connections: Iterable[HttpConnection],
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        max_connections: int,
        write_timeout_s: float,
    ) -> None:
        self._sock = sock
        self._connections = connections  # uvicorn's set; it adds and removes
        self._make_protocol = make_protocol
        self._max = max_connections
        self._write_timeout_ms = int(write_timeout_s * 1000)
        self._num_open = 0
        self._starting: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._is_listening = False
        self._room_timer: asyncio.TimerHandle | None = None
        self._resume()

    def close(self) -> None:
        """Stop listening. Open connections stay."""
        self._is_closed = True
        self._pause()
        self._sock.close()

    def lost(self) -> None:
        """A connection has ended."""
        self._num_open -= 1
        if self._num_open <= self._max - self._max // _ROOM_SHARE:  # not for each lost connection
            self._resume()

    def _resume(self) -> None:
        if not self._is_closed and not self._is_listening and self._num_open < self._max:
            self._is_listening = True
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _pause(self) -> None:
        if self._is_listening:
            self._is_listening = False
            self._loop.remove_reader(self._sock.fileno())

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if self._num_open >= self._max:
                self._pause()
                self._make_room()
                return
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_FILES:
                    raise
                # Other code in this process has used up the descriptors. Clients stay queued.
                logger.warning("cannot accept: %s; trying again", error.strerror)
                self._pause()
                self._make_room()
                self._loop.call_later(_RETRY_S, self._resume)
                return
            self._num_open += 1
            self._start(sock)

    def _start(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # The kernel ends a connection whose peer reads nothing for this long. The server then
            # sees a disconnect.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._write_timeout_ms)
        task = self._loop.create_task(self._connect(sock))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _connect(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, sock)
        except OSError:
            sock.close()
            self.lost()

    def _make_room(self) -> None:
        """End the oldest connections whose request is overdue, and all idle ones."""
        now_s = self._loop.time()
        overdue = [c for c in self._connections if c.is_overdue(now_s)]
        overdue.sort(key=lambda c: c.incomplete_since_s or now_s)
        for connection in overdue[: max(1, self._max // _ROOM_SHARE)]:
            connection.transport.abort()
        if self._room_timer is None:
            self._room_timer = self._loop.call_later(_ROOM_INTERVAL_S, self._make_room_again)
            for connection in list(self._connections):
                if connection.cycle is not None:  # a new connection will send a request
                    connection.shutdown()

    def _make_room_again(self) -> None:
        self._room_timer = None
        self._resume()
        if not self._is_closed and not self._is_listening:
            self._make_room()


def curl_line(url: str, options: ServerOptions) -> str:
    """A curl command that sends a chat request."""
    key = ' -H "Authorization: Bearer $PACELINE_API_KEY"' if options.needs_key else ""
    message = '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{message}'"
