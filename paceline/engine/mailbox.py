"""Messages to the engine that were not read yet: in order, but aborts first.

The rule of both sides of the channel: what the front has not sent and what the engine's loop has
not read wait in a `Mailbox`. Frames stay bytes: a submit is decoded when its turn comes.
"""

from __future__ import annotations

from collections import OrderedDict
from queue import SimpleQueue

from paceline.engine.messages import Stop, decode_abort, encode, encode_abort, submit_uid


class Mailbox:
    """A submit that is aborted here is dropped. Its abort goes on: the engine answers each one."""

    def __init__(self) -> None:
        # By the uid of a submit; other frames have numbers below 0.
        self._frames: OrderedDict[int, bytes] = OrderedDict()
        self._newest_number = 0
        self._aborted: list[int] = []
        self.num_bytes = 0  # of the frames

    def put(self, frame: bytes) -> None:
        aborted = decode_abort(frame)
        if aborted is not None:
            self._aborted += aborted
            for uid in aborted:
                self.num_bytes -= len(self._frames.pop(uid, b""))
            return
        key = submit_uid(frame)
        if key is None:
            self._newest_number -= 1
            key = self._newest_number
        self._frames[key] = frame
        self.num_bytes += len(frame)

    def take_aborts(self) -> list[int]:
        aborted, self._aborted = self._aborted, []
        return aborted

    def take(self) -> bytes | None:
        """The next frame; None: there is none. All aborts come as one."""
        if self._aborted:
            return encode_abort(self.take_aborts())
        if not self._frames:
            return None
        _, frame = self._frames.popitem(last=False)
        self.num_bytes -= len(frame)
        return frame


class Inbox:
    """What the loop of an engine reads. Another thread fills `arrived`; None there: the front is
    gone, which means Stop."""

    def __init__(self, arrived: SimpleQueue[bytes | None]) -> None:
        self._arrived = arrived
        self._unread = Mailbox()

    def get(self, timeout_s: float = 0.0) -> bytes:
        """The next frame, which may take `timeout_s` to come. Raises queue.Empty."""
        self._gather()
        frame = self._unread.take()
        if frame is None:
            self._put(self._arrived.get(timeout_s > 0, timeout_s))
            frame = self._unread.take()
            assert frame is not None, "what was put can be taken"
        return frame

    def take_aborts(self) -> list[int]:
        """All that have come, ahead of everything else."""
        self._gather()
        return self._unread.take_aborts()

    def _gather(self) -> None:
        while not self._arrived.empty():
            self._put(self._arrived.get())

    def _put(self, frame: bytes | None) -> None:
        self._unread.put(encode(Stop()) if frame is None else frame)
