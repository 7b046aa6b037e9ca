"""The one log line per request: what it cost, or why it was refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from paceline.errors import PacelineError
from tests.patience import wait_for
from tests.server.fake_client import FakeClient, words
from tests.server.serving import JSON, Served, serving


class Log:
    """The records of the server, as they come."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def line(self, status: int) -> logging.LogRecord:
        """The line about the request with that status."""
        found: list[logging.LogRecord] = []

        def has_come() -> bool:
            found[:] = [r for r in self._caplog.records if f" {status} " in r.getMessage()]
            return bool(found)

        wait_for(has_come)
        assert len(found) == 1
        return found[0]

    def tracebacks(self) -> list[str]:
        return [r.exc_text or "" for r in self._caplog.records if r.exc_info]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    monkeypatch.setattr(logging.getLogger("paceline"), "propagate", True)
    with caplog.at_level(logging.INFO, "paceline.server"):
        yield Log(caplog)


@pytest.mark.parametrize("stream", [False, True])
def test_a_good_request_shows_its_tokens(server: Served, log: Log, stream: bool) -> None:
    assert server.complete(prompt="abcdef", stream=stream).status == 200
    line = log.line(200)
    assert line.levelno == logging.INFO
    assert line.getMessage().endswith(" 6 prompt + 5 completion tokens")
    assert " cmpl-" in line.getMessage()


def test_a_refused_request_shows_why(server: Served, log: Log) -> None:
    server.complete(max_tokens=-1)
    line = log.line(400)
    assert line.levelno == logging.WARNING
    assert ": max_tokens is -1; it must be at least 1" in line.getMessage()


def test_an_unknown_route_shows_why(server: Served, log: Log) -> None:
    server.get("/v1/embeddings")
    line = log.line(404)
    assert line.levelno == logging.WARNING
    assert ": '/v1/embeddings' is not built; " in line.getMessage()


def test_a_text_of_a_client_is_cut_and_stays_on_its_line(server: Served, log: Log) -> None:
    server.get("/%0a%1b[2J" + "x" * 5000)
    said = log.line(404).getMessage()
    assert len(said) < 600
    assert said.isprintable()


def test_a_wrong_key_is_not_written_down(log: Log) -> None:
    with serving(FakeClient(), api_key="sesame") as server:
        server.get("/v1/models", Authorization="Bearer swordfish")
    said = log.line(401).getMessage()
    assert said.endswith(
        "The API key is wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
    )
    assert "swordfish" not in said


def test_a_stream_that_ends_with_an_error_shows_why(log: Log) -> None:
    client = FakeClient(lambda _: [*words("Hel", finish=None), *words("lo", finish="error")])
    with serving(client) as server:
        assert server.complete(stream=True).status == 200
    line = log.line(200)
    assert line.levelno == logging.WARNING
    assert ": The output cannot go on" in line.getMessage()


def test_probes_are_silent_until_they_are_refused(server: Served, log: Log) -> None:
    server.get("/health")
    server.get("/health", Host="evil.example")
    assert "does not answer to the host name" in log.line(403).getMessage()
    assert "GET /health 200" not in log._caplog.text


@pytest.mark.parametrize(
    "error", [KeyError("a bug"), PacelineError("a failure")], ids=["bug", "ours"]
)
def test_every_500_has_its_traceback_in_the_log(
    log: Log, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    with serving(FakeClient()) as server:
        monkeypatch.setattr(server.service, "resolve_model", broken)
        assert server.request("POST", "/v1/completions", b'{"prompt": "x"}', JSON).status == 500
    assert log.line(500).levelno == logging.WARNING
    assert any("in broken" in text for text in log.tracebacks())


def test_a_generation_that_fails_has_its_traceback_in_the_log(log: Log) -> None:
    with serving(FakeClient(lambda _: words("lo", finish="error"))) as server:
        assert server.complete().status == 500
    assert any("GenerationFailed" in text for text in log.tracebacks())
