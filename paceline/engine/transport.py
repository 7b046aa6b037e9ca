"""Frames of bytes over socket pairs between the front and the engine. Never looks inside them.

The front side has no thread: `fileno` goes to a poll or an event loop, `receive` takes what is
there. The engine side has one thread that always reads and one that always writes, so neither
side can make the other wait: what the front is slow to take stays in the engine's outbox, and
what the engine is slow to take stays in its inbox.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

_HEADER = struct.Struct("<I")
_READ_BYTES = 1 << 18
# One `receive` takes at most this much, so that an event loop gets its turn between two of them.
_MAX_TURN_BYTES = 1 << 20
_MAX_JOINED_FRAMES = 64


def connected_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends: (front, engine)."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


class ChannelClosed(Exception):
    """The engine side of the channel is gone."""


class ChannelStuck(ChannelClosed):
    """The engine side stands still: it did not read for as long as it was given."""


class Channel:
    """The front's end. Not thread-safe: one thread sends and receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._inbound = bytearray()
        # Kept across calls: an interrupt in the middle of `send` must not tear a frame.
        self._outbound = bytearray()
        self.at_end = False  # the engine's end is closed and everything it sent was received

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, payload: bytes, timeout_s: float | None = None) -> None:
        """Write one frame. The engine's inbox thread always reads, so this waits for moments.

        One that does not read for `timeout_s` (None: for ever) is cut off.
        """
        if self._socket.fileno() < 0:
            raise ChannelClosed
        self._outbound += _HEADER.pack(len(payload))
        self._outbound += payload
        while self._outbound:
            try:
                sent = self._socket.send(self._outbound)
            except BlockingIOError:
                if self._wait(select.POLLOUT, timeout_s):
                    continue
                self._socket.shutdown(socket.SHUT_RDWR)  # `receive` sees the end as well
                raise ChannelStuck from None
            except (BrokenPipeError, ConnectionResetError):
                raise ChannelClosed from None
            del self._outbound[:sent]

    def receive(self, timeout_s: float | None = 0.0) -> list[bytes]:
        """Every whole frame that has arrived; waits up to `timeout_s` (None: for ever) for one.

        No whole frame stays behind, so `fileno` is readable whenever there is more to take.
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
    """The front's ends of several channels behind one descriptor."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = list(channels)
        self._open = {channel.fileno(): i for i, channel in enumerate(self._channels)}
        self._epoll = select.epoll() if len(self._channels) > 1 else None
        if self._epoll is not None:
            for descriptor in self._open:
                self._epoll.register(descriptor, select.EPOLLIN)

    def fileno(self) -> int:
        return self._channels[0].fileno() if self._epoll is None else self._epoll.fileno()

    def receive(self, timeout_s: float | None = 0.0) -> list[tuple[int, bytes]]:
        """(which channel, frame) of all that has arrived; see `Channel.receive`."""
        if self._epoll is None:
            return [(0, frame) for frame in self._channels[0].receive(timeout_s)]
        if not self._open:
            return []
        found = []
        for descriptor, _ in self._epoll.poll(timeout_s):
            which = self._open[descriptor]
            channel = self._channels[which]
            found += [(which, frame) for frame in channel.receive()]
            if channel.at_end:  # it would be readable for ever
                self._epoll.unregister(descriptor)
                del self._open[descriptor]
        return found

    def show_end(self, which: int) -> None:
        """Make `fileno` readable once more for a channel that has ended."""
        descriptor = self._channels[which].fileno()
        if self._epoll is not None and descriptor >= 0 and descriptor not in self._open:
            self._epoll.register(descriptor, select.EPOLLIN)
            self._open[descriptor] = which

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
        self._open.clear()
        for channel in self._channels:
            channel.close()


class Port:
    """The engine's end: an inbox that a thread fills and an outbox that a thread empties."""

    def __init__(
        self,
        sock: socket.socket,
        on_end: Callable[[], None],
        on_frame: Callable[[bytes], None] | None = None,
    ) -> None:
        """In the inbox thread: `on_frame` sees each frame first, `on_end` runs when the front's
        end is closed.
        """
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
        """Write what is queued, then close this end, so that the front sees the end of it."""
        self._is_closing = True
        self._outbox.put(None)
        self._threads[1].join(timeout_s)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the inbox thread
        self._threads[0].join(timeout_s)
        self._socket.close()

    def _read(self) -> None:
        try:
            while (header := self._read_exactly(_HEADER.size)) is not None:
                payload = self._read_exactly(_HEADER.unpack(header)[0])
                if payload is None:
                    break
                if self._on_frame is not None:
                    self._on_frame(payload)
                self.inbox.put(payload)
        finally:
            if not self._is_closing:
                self._on_end()

    def _read_exactly(self, length: int) -> bytes | None:
        data = bytearray(length)
        view = memoryview(data)
        filled = 0
        while filled < length:
            try:
                count = self._socket.recv_into(view[filled:])
            except OSError:
                return None
            if count == 0:
                return None
            filled += count
        return bytes(data)

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
            data = b"".join(_HEADER.pack(len(f)) + f for f in frames if f is not None)
            try:
                self._socket.sendall(data)
            except OSError:
                return  # the front is gone; the inbox thread says so
