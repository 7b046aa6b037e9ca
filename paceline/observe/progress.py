"""A progress line on a terminal: done of total, tokens per second, time left. Owns that one line.

Writes nothing when the stream is not a terminal, and never more than ten times a second.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

_MIN_INTERVAL_S = 0.1


class ProgressLine:
    """`Processed prompts  128/1000  12%  1,532 tok/s  00:41 left`, rewritten in place."""

    def __init__(self, total: int, label: str, stream: TextIO | None = None) -> None:
        self.total = total
        self.label = label
        self.done = 0
        self.tokens = 0
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._started_s = time.monotonic()
        self._drawn_s = 0.0
        self._width = 0

    def update(self, done: int, tokens: int = 0) -> None:
        """Add finished items and generated tokens."""
        self.done += done
        self.tokens += tokens
        now = time.monotonic()
        if self._live and now - self._drawn_s >= _MIN_INTERVAL_S:
            self._drawn_s = now
            self._draw()

    def close(self) -> None:
        if self._live:
            self._draw()
            self._stream.write("\n")
            self._stream.flush()
            self._live = False

    def line(self) -> str:
        elapsed = max(time.monotonic() - self._started_s, 1e-9)
        percent = 100 * self.done // self.total if self.total else 100
        parts = [self.label, f"{self.done}/{self.total}", f"{percent}%"]
        if self.tokens:
            parts.append(f"{self.tokens / elapsed:,.0f} tok/s")
        if 0 < self.done < self.total:
            left = int(elapsed * (self.total - self.done) / self.done)
            parts.append(f"{left // 60:02d}:{left % 60:02d} left")
        return "  ".join(parts)

    def _draw(self) -> None:
        text = self.line()
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)
