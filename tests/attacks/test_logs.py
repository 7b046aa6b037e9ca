"""A log that is not read, or cannot be written, stops no server. Real processes each."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.attacks.echo_cli import NOISY, PIPE_BYTES
from tests.patience import wait_for
from tests.server.processes import ROOT, processes_of
from tests.tiers import first_or_more

PATIENCE_S = 60.0  # for machines that are busy with something else
SERVE = [sys.executable, "-m", "tests.attacks.echo_cli", "serve"]


class Server:
    """`paceline serve` on the echo engine, in a process group of its own."""

    def __init__(self, model: str = "slots=2", *, redirect: str = "", stderr: int | None) -> None:
        """`redirect` is what a shell would be told: "2>&-", "| true"."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [*SERVE, model, "--port", str(self.port), "--max-restarts", "0"]
        if redirect:
            run = '"$@"' if "|" in redirect else 'exec "$@"'
            line = f"set -o pipefail; {run} {redirect}"
            command = ["bash", "-c", line, "bash", *command]
        self.popen = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )

    def get(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            reply.read()
            return reply.status
        finally:
            connection.close()

    def complete(self) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            body = json.dumps({"prompt": "abc", "max_tokens": 6})
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers)
            return str(json.loads(connection.getresponse().read())["choices"][0]["text"])
        finally:
            connection.close()

    def await_ready(self) -> None:
        wait_for(self._is_ready, PATIENCE_S)

    def _is_ready(self) -> bool:
        assert self.popen.poll() is None, "it has ended"
        try:
            return self.get("/readyz") == 200
        except OSError:
            return False

    def await_exit(self, number: signal.Signals) -> int:
        """Send a signal to all of it; the exit code."""
        os.killpg(self.popen.pid, number)
        code = self.popen.wait(PATIENCE_S)
        wait_for(lambda: not processes_of(self.popen.pid), PATIENCE_S)
        return code


@contextlib.contextmanager
def serving(
    model: str = "slots=2", *, redirect: str = "", stderr: int | None = subprocess.DEVNULL
) -> Iterator[Server]:
    server = Server(model, redirect=redirect, stderr=stderr)
    try:
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.popen.pid, signal.SIGKILL)
        server.popen.wait()


@contextlib.contextmanager
def unread_pipe() -> Iterator[tuple[int, int]]:
    """(reading end, writing end) of a pipe that nothing reads."""
    inward, outward = os.pipe()
    try:
        yield inward, outward
    finally:
        os.close(inward)
        os.close(outward)


def test_a_log_that_is_not_read_stops_no_request() -> None:
    with unread_pipe() as (inward, outward), serving(stderr=outward) as server:
        server.await_ready()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        line_bytes = 80  # of a request in the log, at least
        for _ in range(2 * PIPE_BYTES // line_bytes):
            connection.request("GET", "/v1/models")
            connection.getresponse().read()
        connection.close()
        os.set_blocking(outward, False)
        with pytest.raises(BlockingIOError):  # the pipe is full
            os.write(outward, b"x" * PIPE_BYTES)
        os.set_blocking(outward, True)
        assert server.get("/health") == 200
        assert server.complete() == "abcabc"
        assert server.await_exit(signal.SIGTERM) == 0
        assert b"GET /v1/models" in os.read(inward, PIPE_BYTES)


def test_an_engine_whose_log_is_not_read_loads_and_answers() -> None:
    with unread_pipe() as (_, outward), serving(NOISY, stderr=outward) as server:
        server.await_ready()
        assert server.complete() == "abcabc"
        assert server.await_exit(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    "redirect",
    first_or_more(
        [">&-", "2>&-", "<&- >&- 2>&-", "> /dev/full", "2> /dev/full", "| true", "2>&1 | true"],
        lambda how: how in ("<&- >&- 2>&-", "2> /dev/full", "2>&1 | true"),
    ),
)
def test_a_server_without_a_log_or_an_announcement_serves(redirect: str) -> None:
    with serving(redirect=redirect) as server:
        server.await_ready()
        assert server.get("/v1/models") == 200
        assert server.complete() == "abcabc"
        if "|" not in redirect:  # there the shell is what the signal ends
            assert server.await_exit(signal.SIGTERM) == 0


def test_what_a_dying_engine_says_is_in_the_log() -> None:
    with serving("fail_at=2", stderr=subprocess.PIPE) as server:
        assert server.popen.stderr is not None
        server.await_ready()
        with contextlib.suppress(KeyError, OSError, http.client.HTTPException):
            server.complete()
        said = server.popen.stderr.read().decode()
        assert server.popen.wait(PATIENCE_S) == 1
    assert "Traceback (most recent call last)" in said
    assert "the engine" in said.splitlines()[-1]
