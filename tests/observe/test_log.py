"""One line per record, the request id on it, and colours on terminals only."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from paceline.observe.log import RequestLogger, configure_logging, current_level


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("paceline", "uvicorn", "asyncio")]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, values in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level, logger.propagate = values


def test_a_record_is_one_line_with_level_process_place_and_request() -> None:
    stream = io.StringIO()
    configure_logging("info", process="engine", stream=stream)
    logger = logging.getLogger("paceline.engine.client")
    RequestLogger(logger, "req-7").info("took %d tokens", 5)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\.\d{3} INFO    engine engine\.client \[req-7\] took 5 tokens\n",
        stream.getvalue(),
    )


def test_text_of_a_user_cannot_forge_a_line() -> None:
    stream = io.StringIO()
    configure_logging("info", stream=stream)
    logging.getLogger("paceline.server").warning("bad prompt %s", "a\n12:00:00 ERROR forged\r")
    assert stream.getvalue().count("\n") == 1
    assert "\r" not in stream.getvalue()


def test_levels_filter_and_are_passed_on() -> None:
    stream = io.StringIO()
    configure_logging("warning", stream=stream)
    logging.getLogger("paceline").info("not shown")
    assert stream.getvalue() == ""
    assert current_level() == "warning"


def test_configured_twice_it_writes_once() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("info", stream=first)
    configure_logging("info", stream=second)
    logging.getLogger("paceline").info("hello")
    assert first.getvalue() == ""
    assert second.getvalue().count("hello") == 1


def test_libraries_that_speak_while_serving_write_the_same_lines() -> None:
    stream = io.StringIO()
    configure_logging("info", stream=stream)
    logging.getLogger("uvicorn.tests").warning("Invalid HTTP request received.")
    logging.getLogger("asyncio").error("Task exception was never retrieved")
    assert [line.split()[1:4] for line in stream.getvalue().splitlines()] == [
        ["WARNING", "front", "uvicorn.tests"],
        ["ERROR", "front", "asyncio"],
    ]


def test_colours_are_for_terminals() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        configure_logging("info", stream=stream)
        logging.getLogger("paceline").error("broken")
    assert "\x1b[31m" in terminal.getvalue()
    assert "\x1b" not in pipe.getvalue()


def test_a_traceback_follows_its_line() -> None:
    stream = io.StringIO()
    configure_logging("info", stream=stream)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("paceline").exception("it failed")
    assert "it failed\nTraceback" in stream.getvalue()
    assert stream.getvalue().rstrip().endswith("ValueError: boom")
