"""Replaces standard output and error so that writing never blocks and never fails.

A thread writes the queue. While the reader is stuck or the disk is full, text is dropped and its
lines are counted. On a terminal this also keeps the status line below the log.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import sys
import threading
from typing import Literal, TextIO, cast

ERASE_TO_END = "\x1b[K"
_ERASE_LINE = f"\r{ERASE_TO_END}"
_MAX_QUEUED_CHARS = 1 << 20
_FLUSH_S = 1.0
_DESCRIPTORS = {"stdin": 0, "stdout": 1, "stderr": 2}


class LossyStream(io.TextIOBase):
    """Text for one descriptor, written by a thread.

    On a terminal, text that begins with a carriage return replaces the status line. Without a
    newline it is the new status line, which stays below the lines that follow.
    """

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_terminal = os.isatty(descriptor)
        self._thread: threading.Thread | None = None
        # Guards the fields below. Reentrant, because a signal handler may write too.
        self._changed = threading.Condition(threading.RLock())
        self._queued: list[str] = []
        self._num_queued_chars = 0
        self._status = ""
        self._is_status_new = False
        self._is_mid_line = False
        self._is_writing = False
        self._has_failed = False  # the last write
        self._is_stuck = False  # a flush timed out
        self.num_dropped = 0  # lines
        self._num_reported = 0

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._is_terminal

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        """Queue `text`; when the queue is full or the stream is closed, drop it."""
        if self.closed:
            return len(text)
        with self._changed:
            is_line = True
            if self._is_terminal and text.startswith("\r"):
                is_line = text.endswith("\n")
                self._status = "" if is_line or text == _ERASE_LINE else text
                self._is_status_new = True
            if is_line and self._num_queued_chars + len(text) <= _MAX_QUEUED_CHARS:
                self._queued.append(text)
                self._num_queued_chars += len(text)
            elif is_line:
                self.num_dropped += text.count("\n")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="paceline-log", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Wait until the queue is written, at most _FLUSH_S, and not at all for a stuck reader."""
        with self._changed:
            limit_s = 0.0 if self._is_stuck else _FLUSH_S
            self._is_stuck = not self._changed.wait_for(self._is_idle, limit_s)

    def _is_idle(self) -> bool:
        return not (self._queued or self._is_status_new or self._is_writing)

    def _has_work(self) -> bool:
        # After a failure, losses are reported together with the next line.
        has_report = self.num_dropped > self._num_reported and not self._has_failed
        return bool(self._queued) or self._is_status_new or has_report

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(self._has_work)
                self._is_writing = True
                lines, num_dropped = "".join(self._queued), self.num_dropped
                text = self._compose(self._with_report(lines), self._status)
                self._queued.clear()
                self._num_queued_chars = 0
                self._is_status_new = False
            is_written = self._put(text.encode(self.encoding, "backslashreplace"))
            with self._changed:
                self._has_failed = not is_written
                if is_written:
                    self._num_reported = num_dropped
                    self._is_stuck = False
                else:
                    self.num_dropped += lines.count("\n")

    def _with_report(self, lines: str) -> str:
        num_lost = self.num_dropped - self._num_reported
        if not num_lost:
            return lines
        report = f"paceline: {num_lost} log lines were dropped, because they could not be written\n"
        # A failed write lost lines before these. A full queue lost lines after these.
        return report + lines if self._has_failed else lines + report

    def _compose(self, lines: str, status: str) -> str:
        """On a terminal: erase the status line, write `lines`, then `status` below them.

        The erased line may belong to another process: front and engine share a terminal.
        """
        if not self._is_terminal:
            return lines
        if not lines:
            return "" if self._is_mid_line else status or _ERASE_LINE
        begins_line = not self._is_mid_line and not lines.startswith("\n")
        self._is_mid_line = not lines.endswith("\n")
        return (_ERASE_LINE if begins_line else "") + lines + ("" if self._is_mid_line else status)

    def _put(self, data: bytes) -> bool:
        """Write all of `data`; False on an error. Blocks while the reader does not read."""
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another program has made the descriptor non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            except OSError:
                return False
        return True


def fill_closed_streams() -> None:
    """Open /dev/null for closed standard descriptors, so that no socket gets their number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= max(_DESCRIPTORS.values()):
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, number in _DESCRIPTORS.items():
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))


def make_lossy(name: Literal["stdout", "stderr"]) -> None:
    """Replace a standard stream of this process. At exit the queue is still written."""
    before: TextIO = getattr(sys, name)
    try:
        is_ours = before.fileno() == _DESCRIPTORS[name] and not isinstance(before, LossyStream)
    except io.UnsupportedOperation:  # an in-memory stream never blocks
        is_ours = False
    if not is_ours:
        return
    with contextlib.suppress(OSError):
        before.flush()
    stream = LossyStream(_DESCRIPTORS[name])
    setattr(sys, name, cast(TextIO, stream))

    def give_back() -> None:
        if stream._status:  # of a thread that still runs
            stream.write(_ERASE_LINE)
        stream.close()  # flushes
        if not stream._is_stuck:  # for messages of the interpreter while it exits
            setattr(sys, name, before)

    atexit.register(give_back)


def flush_streams() -> None:
    """Flush before os._exit, which skips the interpreter's flush."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def num_dropped_lines() -> int:
    """Log lines of this process that were dropped."""
    stream: object = sys.stderr
    return stream.num_dropped if isinstance(stream, LossyStream) else 0
