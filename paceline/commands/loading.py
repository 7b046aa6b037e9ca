"""The line that says what is being loaded and how far it is. Owns standard error meanwhile."""

from __future__ import annotations

import sys
from typing import TextIO


class LoadingLine:
    """What is being loaded and how far, on one line of standard error."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._stage = ""
        self._width = 0

    def __call__(self, stage: str, fraction: float) -> None:
        if self._live:
            text = f"Loading: {stage}  {fraction:.0%}"
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        elif stage != self._stage and fraction < 1:
            self._stream.write(f"Loading: {stage}\n")
        self._stage = stage
        self._stream.flush()

    def close(self) -> None:
        """Leave no trace on a terminal."""
        if self._live and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0
