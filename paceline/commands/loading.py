"""The line that says what is being loaded or converted, and how far it is."""

from __future__ import annotations

from typing import TextIO

from paceline.observe.progress import StatusLine


class LoadingLine:
    """`Loading: weights  40%` in place on a terminal; elsewhere one line per stage."""

    def __init__(self, title: str = "Loading", stream: TextIO | None = None) -> None:
        self._title = title
        self._status = StatusLine(stream)
        self._stage = ""

    def __call__(self, stage: str, fraction: float) -> None:
        self._status.show(f"{self._title}: {stage}  {fraction:.0%}")
        if not self._status.is_live and stage != self._stage and fraction < 1:
            self._status.stream.write(f"{self._title}: {stage}\n")
        self._stage = stage

    def close(self) -> None:
        """Leave no trace on a terminal."""
        self._status.clear()
