"""Unread messages to the engine: in order, but aborts first.

Both sides of the channel use it: for frames that the front has not sent, and for frames that the
engine's loop has not read. Frames stay bytes until the loop reads them.
"""

from __future__ import annotations

from collections import OrderedDict
from queue import SimpleQueue

from paceline.engine.messages import (
    Control,
    decode_abort,
    encode,
    encode_abort,
    join_submits,
    split_submits,
    submit_uid,
)

_MOST_JOINED_BYTES = 1 << 18


class Mailbox:
    """An abort removes its submit, and is passed on: the engine answers each abort."""

    def __init__(self) -> None:
        # The key of a submit is its uid; other frames have keys below 0.
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
        for part in split_submits(frame):
            key = submit_uid(part)
            if key is None:
                self._newest_number -= 1
                key = self._newest_number
            self._frames[key] = part
            self.num_bytes += len(part)

    def take_aborts(self) -> list[int]:
        aborted, self._aborted = self._aborted, []
        return aborted

    def take(self) -> bytes | None:
        """The next frame, or None. All aborts are one frame."""
        if self._aborted:
            return encode_abort(self.take_aborts())
        if not self._frames:
            return None
        _, frame = self._frames.popitem(last=False)
        self.num_bytes -= len(frame)
        return frame

    def take_joined(self) -> bytes | None:
        """The same, but submits that follow each other are one frame. The engine reads many of them
        before it plans a step."""
        frame = self.take()
        if frame is None or submit_uid(frame) is None:
            return frame
        submits, num_bytes = [frame], len(frame)
        while self._frames and next(iter(self._frames)) >= 0 and num_bytes < _MOST_JOINED_BYTES:
            _, frame = self._frames.popitem(last=False)
            submits.append(frame)
            num_bytes += len(frame)
            self.num_bytes -= len(frame)
        return join_submits(submits)


class Inbox:
    """What the engine's loop reads. Another thread fills `arrived`. None there means that the front
    has ended; it is read as Stop."""

    def __init__(self, arrived: SimpleQueue[bytes | None]) -> None:
        self._arrived = arrived
        self._unread = Mailbox()

    def get(self, timeout_s: float = 0.0) -> bytes:
        """The next frame; waits up to `timeout_s` for it. Raises queue.Empty."""
        self._gather()
        frame = self._unread.take()
        if frame is None:
            self._put(self._arrived.get(timeout_s > 0, timeout_s))
            frame = self._unread.take()
            assert frame is not None, "a frame that was put can be taken"
        return frame

    def take_aborts(self) -> list[int]:
        """The uids of all aborts that have come."""
        self._gather()
        return self._unread.take_aborts()

    def _gather(self) -> None:
        while not self._arrived.empty():
            self._put(self._arrived.get())

    def _put(self, frame: bytes | None) -> None:
        self._unread.put(encode(Control.STOP) if frame is None else frame)
