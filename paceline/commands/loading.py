"""Starts an engine and shows how far the loading is."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from paceline.config import EngineConfig
from paceline.observe.progress import StatusLine

if TYPE_CHECKING:
    from paceline.engine.client import EngineClient


def start_engine(config: EngineConfig) -> EngineClient:
    from paceline.engine.client import EngineClient  # slow: a server listens before this

    line = LoadingLine()
    try:
        return EngineClient.start(config, progress=line)
    finally:
        line.close()


def check_model(config: EngineConfig) -> None:
    """Raise CheckpointError if MODEL cannot be loaded. Of a hub id only small files are fetched."""
    from paceline.checkpoint.source import locate

    asked = config.model
    if asked.model:  # the default model is fetched when it is loaded, with a progress line
        locate(
            asked.model,
            revision=asked.revision,
            load_format=asked.load_format,
            with_weights=False,
        )


class LoadingLine:
    """`Loading: weights  40%`, rewritten on a terminal; elsewhere one line per stage."""

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
        """Erase the line on a terminal."""
        self._status.clear()
