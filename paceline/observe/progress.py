"""A status line on a terminal that is rewritten in place, and a progress line made with it.

Nothing is written if the stream is not a terminal. Progress is written at most ten times a second.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from paceline.observe.stream import ERASE_TO_END

# Called with the name of the current stage and the share of all work that is done.
OnProgress = Callable[[str, float], None]

_MIN_INTERVAL_S = 0.1
_BAR = 20  # columns
_COLUMNS = 80  # if the terminal does not report its width


class StatusLine:
    """One line of text, cut to the width of the terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.is_live = self.stream.isatty()

    def show(self, text: str, end: str = "") -> None:
        """Replace the line. With a newline as `end` it stays on the screen."""
        if self.is_live:
            self.stream.write(f"\r{text[: self._columns() - 1]}{ERASE_TO_END}{end}")
            self.stream.flush()

    def clear(self) -> None:
        self.show("")

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or _COLUMNS
        except OSError:
            return _COLUMNS


class ProgressLine:
    """`Prompts  128/1000  12%  [##....]  1,532 tok/s  00:41 left`, rewritten in place."""

    def __init__(
        self, total: int, label: str, stream: TextIO | None = None, *, is_shown: bool = True
    ) -> None:
        self.total = total
        self.label = label
        self.done = 0
        self.tokens = 0
        self._status = StatusLine(stream)
        self._status.is_live &= is_shown
        self._started_s = time.monotonic()
        self._drawn_s = 0.0

    def update(self, done: int, tokens: int = 0) -> None:
        """Add finished items and generated tokens."""
        self.done += done
        self.tokens += tokens
        now = time.monotonic()
        if now - self._drawn_s >= _MIN_INTERVAL_S:
            self._drawn_s = now
            self._status.show(self.line())

    def close(self) -> None:
        self._status.show(self.line(), end="\n")
        self._status.is_live = False

    def line(self) -> str:
        elapsed = max(time.monotonic() - self._started_s, 1e-9)
        percent = 100 * self.done // self.total if self.total else 100
        bar = "#" * (percent * _BAR // 100)
        parts = [self.label, f"{self.done}/{self.total}", f"{percent}%", f"[{bar:.<{_BAR}}]"]
        if self.tokens:
            parts.append(f"{self.tokens / elapsed:,.0f} tok/s")
        if 0 < self.done < self.total:
            left = int(elapsed * (self.total - self.done) / self.done)
            parts.append(f"{left // 60:02d}:{left % 60:02d} left")
        return "  ".join(parts)
