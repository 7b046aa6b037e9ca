"""Logging: one line per record, with the request id if it is known.

The root logger is not changed, and programs that use `LLM` keep their logging configuration.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

from paceline.config import terminal_styles_from_env

LEVELS = ("debug", "info", "warning", "error")
_COLOURS = {"DEBUG": "\x1b[2m", "INFO": "\x1b[32m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m"}
_RESET = "\x1b[0m"
# Paceline's logger, and loggers of libraries that write while a server runs.
_LOGGERS = ("paceline", "uvicorn", "asyncio")


class LineFormatter(logging.Formatter):
    """`12:30:59.123 INFO  front client [request-id] message`, then a traceback if any."""

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
        # One record is one line, even if the message quotes text of a user.
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"{clock}.{int(record.msecs):03d} {level} {self.process} {where}{about} {message}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


class RequestLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that adds a request id to each line."""

    def __init__(self, logger: logging.Logger, request_id: str) -> None:
        super().__init__(logger, {"request_id": request_id})


class LineHandler(logging.StreamHandler[TextIO]):
    """Does not flush, because a flush waits for the reader of the log. It writes whole lines."""

    def flush(self) -> None:
        pass


def configure_logging(
    level: str = "info", *, process: str = "front", stream: TextIO | None = None
) -> None:
    """Send this process's records to `stream` (stderr). Called again, it replaces its handler."""
    stream = sys.stderr if stream is None else stream
    new = LineHandler(stream)
    has_colour = stream.isatty() and terminal_styles_from_env().has_colour
    new.setFormatter(LineFormatter(process, colour=has_colour))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [h for h in logger.handlers if not isinstance(h, LineHandler)] + [new]
        logger.propagate = False
    logging.getLogger("paceline").setLevel(level.upper())


def current_level() -> str:
    """The present log level, for child processes."""
    name = logging.getLevelName(logging.getLogger("paceline").getEffectiveLevel()).lower()
    return name if name in LEVELS else "warning"
