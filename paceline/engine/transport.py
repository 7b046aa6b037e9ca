"""Frames of bytes over socket pairs between front and engine. Neither side blocks the other.

The front side has no thread and never waits to send: `send` writes what fits into the socket, and
the rest stays in a mailbox until `receive` is called. The engine side has a thread that reads into
its inbox and a thread that writes from its outbox.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from paceline.engine.mailbox import Mailbox

_HEADER = struct.Struct("<I")
_READ_BYTES = 1 << 18
# One `receive` reads at most this much, so that the event loop can run other tasks in between.
_MAX_TURN_BYTES = 1 << 20
_MAX_JOINED_FRAMES = 64


def connected_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends: (front, engine)."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def read_exactly(sock: socket.socket, size: int, give_up_s: float | None = None) -> bytes | None:
    """Block until `size` bytes have come. None: the other end is closed. Raises TimeoutError if
    they have not all come at `give_up_s` (of time.monotonic)."""
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        if give_up_s is not None:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            sock.settimeout(left_s)
        try:
            count = sock.recv_into(view[filled:])
        except ConnectionResetError:
            return None
        if not count:
            return None
        filled += count
    return bytes(data)


def framed(payload: bytes) -> bytes:
    return _HEADER.pack(len(payload)) + payload


def read_frame(
    sock: socket.socket, give_up_s: float | None = None, most: int | None = None
) -> bytes | None:
    """Block for a frame, as `read_exactly` does. None also if it has more than `most` bytes."""
    header = read_exactly(sock, _HEADER.size, give_up_s)
    if header is None:
        return None
    size = _HEADER.unpack(header)[0]
    return None if most is not None and size > most else read_exactly(sock, size, give_up_s)


class ChannelClosed(Exception):
    """The engine has closed its side of the channel."""


class Channel:
    """The front's end. Not thread-safe: one thread sends and receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._inbound = bytearray()
        self._outbox = Mailbox()
        self._outbound = bytearray()  # the rest of a frame that was sent in part
        self._blocked_since_s = 0.0
        self.at_end = False  # the engine's end is closed and everything it sent was received

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def num_unsent_bytes(self) -> int:
        return len(self._outbound) + self._outbox.num_bytes

    @property
    def blocked_s(self) -> float:
        """How long the engine has read nothing while something waits to be sent."""
        return time.monotonic() - self._blocked_since_s if self._outbound else 0.0

    def send(self, payload: bytes) -> None:
        """Queue one frame and write what fits into the socket. Returns at once."""
        if self._socket.fileno() < 0:
            raise ChannelClosed
        self._outbox.put(payload)
        self.flush()

    def flush(self, timeout_s: float = 0.0) -> None:
        """Write what fits into the socket; wait up to `timeout_s` each time that it is full."""
        while self._outbound or self._begin_frame():
            try:
                sent = self._socket.send(self._outbound)
            except BlockingIOError:
                if not self._wait(select.POLLOUT, timeout_s):
                    return
            except (BrokenPipeError, ConnectionResetError):
                raise ChannelClosed from None
            else:
                del self._outbound[:sent]
                self._blocked_since_s = time.monotonic()

    def _begin_frame(self) -> bool:
        frame = self._outbox.take_joined()
        if frame is None:
            return False
        self._outbound += framed(frame)
        self._blocked_since_s = time.monotonic()
        return True

    def cut(self) -> None:
        """Close the channel, so that `receive` finds it at its end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def receive(self, timeout_s: float | None = 0.0) -> list[bytes]:
        """All complete frames that have come; waits up to `timeout_s` (None: for ever) for one.

        Leaves no complete frame in its buffer, so `fileno` is readable if there is more.
        """
        if self.at_end or not self._wait(select.POLLIN, timeout_s):
            return []
        taken = 0
        while taken < _MAX_TURN_BYTES:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self.at_end = True
                break
            self._inbound += data
            taken += len(data)
        return self._cut_frames()

    def close(self) -> None:
        self._socket.close()
        self.at_end = True

    def _cut_frames(self) -> list[bytes]:
        frames = []
        start = 0
        while len(self._inbound) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._inbound, start)
            end = start + _HEADER.size + length
            if end > len(self._inbound):
                break
            frames.append(bytes(self._inbound[start + _HEADER.size : end]))
            start = end
        del self._inbound[:start]
        return frames

    def _wait(self, events: int, timeout_s: float | None) -> bool:
        # poll, not select: a busy server has descriptors above 1024.
        poll = select.poll()
        poll.register(self._socket, events)
        return bool(poll.poll(None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)))


class Channels:
    """The front's ends of all channels behind one descriptor. It is readable if a channel has
    something to receive, or has room for what waits to be sent."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = list(channels)
        self._open = {channel.fileno(): i for i, channel in enumerate(self._channels)}
        self._epoll = select.epoll()
        self._has_unsent: set[int] = set()
        for descriptor in self._open:
            self._epoll.register(descriptor, select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def send(self, which: int, payload: bytes) -> None:
        try:
            self._channels[which].send(payload)
        finally:
            self._watch(which)

    def receive(self, timeout_s: float | None = 0.0) -> list[tuple[int, bytes]]:
        """All (channel index, frame) that have come; see `Channel.receive`. Sends as well."""
        if not self._open:
            return []
        found = []
        for descriptor, events in self._epoll.poll(timeout_s):
            which = self._open[descriptor]
            channel = self._channels[which]
            if events & select.EPOLLOUT:
                with contextlib.suppress(ChannelClosed):  # `receive` finds it at its end
                    channel.flush()
            if events & ~select.EPOLLOUT:
                found += [(which, frame) for frame in channel.receive()]
            if channel.at_end:  # else it would stay readable
                self._epoll.unregister(descriptor)
                del self._open[descriptor]
            self._watch(which)
        return found

    def _watch(self, which: int) -> None:
        """Have epoll report room in a channel while it has something to send."""
        channel = self._channels[which]
        has_unsent = channel.num_unsent_bytes > 0
        if has_unsent == (which in self._has_unsent) or channel.fileno() not in self._open:
            return
        self._has_unsent ^= {which}
        events = select.EPOLLIN | (select.EPOLLOUT if has_unsent else 0)
        self._epoll.modify(channel.fileno(), events)

    def show_end(self, which: int) -> None:
        """Make `fileno` readable again for a channel that has ended."""
        descriptor = self._channels[which].fileno()
        if descriptor >= 0 and descriptor not in self._open:
            self._epoll.register(descriptor, select.EPOLLIN)
            self._open[descriptor] = which

    def close(self) -> None:
        self._epoll.close()
        self._open.clear()
        for channel in self._channels:
            channel.close()


class Port:
    """The engine's end. One thread fills its inbox, another one empties its outbox."""

    def __init__(
        self,
        sock: socket.socket,
        on_end: Callable[[], None],
        on_frame: Callable[[bytes], None] | None = None,
    ) -> None:
        """The inbox thread calls `on_frame` for each frame, and `on_end` when the front has closed
        its end."""
        sock.setblocking(True)
        self._socket = sock
        self._on_end = on_end
        self._on_frame = on_frame
        self._is_closing = False
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self.inbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._read, name="paceline-inbox", daemon=True),
            threading.Thread(target=self._write, name="paceline-outbox", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def send(self, payload: bytes) -> None:
        """Queue one frame; returns at once."""
        self._outbox.put(payload)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, then close this end."""
        self._is_closing = True
        self._outbox.put(None)
        self._threads[1].join(timeout_s)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the inbox thread
        self._threads[0].join(timeout_s)
        self._socket.close()

    def _read(self) -> None:
        try:
            while (payload := read_frame(self._socket)) is not None:
                if self._on_frame is not None:
                    self._on_frame(payload)
                self.inbox.put(payload)
        except OSError:
            pass  # `close` has closed this end
        finally:
            if not self._is_closing:
                self._on_end()

    def _write(self) -> None:
        open_for_more = True
        while open_for_more:
            frames = [self._outbox.get()]
            while len(frames) < _MAX_JOINED_FRAMES:
                try:
                    frames.append(self._outbox.get_nowait())
                except Empty:
                    break
            open_for_more = None not in frames
            data = b"".join(framed(f) for f in frames if f is not None)
            try:
                self._socket.sendall(data)
            except OSError:
                return  # the front has closed its end; the inbox thread reports it
