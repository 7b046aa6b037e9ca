"""Ctrl-C as a flag, for loops that must not be torn in the middle of a message.

Takes the signal over only where Python's own handler would raise KeyboardInterrupt.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class InterruptFlag:
    """Within it the first Ctrl-C waits for `check` to raise it; a second one raises at once."""

    def __init__(self) -> None:
        self._is_set = False
        self._is_mine = False

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()
        # Somebody else's handler (an event loop's, a notebook's) knows better than we do.
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)
            self._is_mine = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if error is None:
                self.check()

    def check(self) -> None:
        if self._is_set:
            self._is_set = False
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_set:
            raise KeyboardInterrupt
        self._is_set = True
