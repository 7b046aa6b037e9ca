"""Logging: one line per record, the request id where one is known.

Never touches the root logger, and a program that uses `LLM` keeps its own logging setup.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import MutableMapping
from typing import Any, TextIO

LEVELS = ("debug", "info", "warning", "error")
_COLOURS = {"DEBUG": "\x1b[2m", "INFO": "\x1b[32m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m"}
_RESET = "\x1b[0m"
# Ours, and those of the libraries that speak while a server runs.
_LOGGERS = ("paceline", "uvicorn", "asyncio")


class LineFormatter(logging.Formatter):
    """`12:30:59.123 INFO  front client [request-id] message`; a traceback follows as it is."""

    def __init__(self, process: str, *, colour: bool) -> None:
        super().__init__()
        self.process = process
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = f"{record.levelname:<7}"
        if self.colour:
            level = f"{_COLOURS.get(record.levelname, '')}{level}{_RESET}"
        where = record.name.removeprefix("paceline").removeprefix(".") or "paceline"
        request_id = getattr(record, "request_id", None)
        about = f" [{request_id}]" if request_id else ""
        # One record is one line, also when a message quotes text of a user.
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"{clock}.{int(record.msecs):03d} {level} {self.process} {where}{about} {message}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


class RequestLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that puts one request's id on each of its lines."""

    def __init__(self, logger: logging.Logger, request_id: str) -> None:
        super().__init__(logger, {"request_id": request_id})

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **kwargs.get("extra", {})}
        return msg, kwargs


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes whole lines, which need no flush. To flush is to wait for the log's reader."""

    def flush(self) -> None:
        pass


def configure_logging(
    level: str = "info", *, process: str = "front", stream: TextIO | None = None
) -> None:
    """Send this process's records to `stream` (stderr). Called again, it replaces its handler."""
    stream = sys.stderr if stream is None else stream
    new = LineHandler(stream)
    new.setFormatter(LineFormatter(process, colour=stream.isatty()))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [h for h in logger.handlers if not isinstance(h, LineHandler)] + [new]
        logger.propagate = False
    logging.getLogger("paceline").setLevel(level.upper())


def current_level() -> str:
    """The level that Paceline's records pass now, for a process that is started from this one."""
    name = logging.getLevelName(logging.getLogger("paceline").getEffectiveLevel()).lower()
    return name if name in LEVELS else "warning"
