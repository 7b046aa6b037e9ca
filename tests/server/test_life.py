"""The process from bind to exit: loading, signals, draining, dying. A real engine process each."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.patience import wait_for
from tests.server.processes import ROOT, Process, running


@pytest.fixture(autouse=True)
def _hangups_are_not_ignored() -> Iterator[None]:
    """Whatever the tests were started by: servers inherit it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def text_of(body: bytes) -> str:
    found = [json.loads(e[6:]) for e in body.split(b"\n\n") if e.startswith(b"data: {")]
    return "".join(c["text"] for e in found for c in e.get("choices", []))


def text_of_completion(process: Process) -> str:
    body = process.request("POST", "/v1/completions", prompt="abc", max_tokens=6)[2]
    return str(json.loads(body)["choices"][0]["text"])


def test_it_listens_before_the_model_is_there_and_says_when_it_is() -> None:
    with running("load_s=0.7", wait=False) as process:
        assert process.request("GET", "/health")[0] == 200
        assert process.request("GET", "/readyz")[0] == 503
        status, headers, _ = process.request("POST", "/v1/completions", prompt="x")
        assert (status, "retry-after" in headers) == (503, True)
        curl = process.await_ready()
        assert process.request("GET", "/readyz")[0] == 200
        asked = re.search(r"-d '(.*)'$", curl)
        assert asked is not None
        assert list(json.loads(asked[1])) == ["messages"]


EACH_SIGNAL = pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="term"),
        pytest.param(signal.SIGINT, id="int", marks=pytest.mark.more),
        pytest.param(signal.SIGHUP, id="hup", marks=pytest.mark.more),
    ],
)


@EACH_SIGNAL
def test_a_signal_drains_what_runs_and_refuses_what_comes(number: signal.Signals) -> None:
    with running("delay_s=0.02") as process:
        stream = process.open_stream(prompt="abc", max_tokens=60)
        first = stream.read1()
        process.popen.send_signal(number)
        wait_for(lambda: process.request("GET", "/readyz")[0] == 503)
        assert b"draining" in process.request("GET", "/readyz")[2]
        assert process.request("GET", "/health")[0] == 200
        status, headers, _ = process.request("POST", "/v1/completions", prompt="x")
        assert (status, "retry-after" in headers) == (503, True)
        body = first + stream.read()
        assert text_of(body) == "abc" * 20
        assert body.endswith(b"data: [DONE]\n\n")
        code, _ = process.await_exit()
        assert code == 0


def test_the_drain_has_a_limit_and_those_cut_off_are_told() -> None:
    with running("delay_s=0.02", drain_timeout=0.3) as process:
        stream = process.open_stream(prompt="abc", max_tokens=500)
        stream.read1()
        process.popen.terminate()
        body = stream.read()
        assert b'"code":"not_ready"' in body
        code, said = process.await_exit()
        assert code == 0
        assert "Traceback" not in said


def test_a_second_signal_ends_it_at_once() -> None:
    with running("delay_s=0.05") as process:
        stream = process.open_stream(prompt="abc", max_tokens=500)
        stream.read1()
        process.popen.send_signal(signal.SIGINT)
        wait_for(lambda: process.request("GET", "/readyz")[0] == 503)
        process.popen.send_signal(signal.SIGINT)
        code, said = process.await_exit()
        assert code == 130  # 0 after a drain
        assert "Traceback" not in said
        stream.close()


def test_a_signal_to_an_idle_server_ends_it_with_0() -> None:
    with running() as process:
        idle = http.client.HTTPConnection("127.0.0.1", process.port, timeout=60)
        idle.request("GET", "/health")
        idle.getresponse().read()
        process.popen.terminate()
        assert process.await_exit()[0] == 0
        idle.close()


def test_a_server_under_nohup_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited, as from nohup
    with running() as process:
        process.popen.send_signal(signal.SIGHUP)
        assert text_of_completion(process) == "abcabc"
        process.popen.terminate()
        assert process.await_exit()[0] == 0


@EACH_SIGNAL
def test_a_signal_while_loading_ends_it_with_a_word_and_leaves_no_engine(
    number: signal.Signals,
) -> None:
    with running("load_s=60", wait=False) as process:
        wait_for(lambda: process.request("GET", "/health")[0] == 200)
        time.sleep(0.3)  # the engine process is somewhere in its start
        process.find_engine()
        process.popen.send_signal(number)
        code, said = process.await_exit()
        assert code == 128 + number
        assert "stopped while loading" in said
        assert "Traceback" not in said


def test_a_model_that_cannot_be_loaded_ends_it_with_the_reason() -> None:
    with running("refuse=folder", wait=False) as process:
        code, said = process.await_exit()
        assert code == 1
        assert "folder is no checkpoint" in said


def test_a_port_in_use_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["", json.dumps({"port": port})]
        done = subprocess.run(
            [sys.executable, "-m", "tests.server.serve_echo", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert f"Port {port} on 127.0.0.1 is in use" in done.stderr
    assert done.stdout == ""  # not even "loading"


def test_an_engine_that_fails_says_where_in_the_log_only() -> None:
    with running("fail_at=3") as process:
        body = process.open_stream(prompt="abc", max_tokens=500).read()
        assert b"The engine has stopped; the server's log says why." in body
        assert b"the device caught fire" in body
        assert b".py" not in body
        code, said = process.await_exit()
    assert code == 1
    assert re.search(r'Traceback(?s:.*)echo_runner.py", line \d+', said)


def test_a_killed_engine_ends_streams_with_the_reason_and_the_server_with_1() -> None:
    with running("delay_s=0.02") as process:
        stream = process.open_stream(prompt="abc", max_tokens=500)
        stream.read1()
        os.kill(process.engine_pids[0], signal.SIGKILL)
        body = stream.read()
        assert b'"code":"engine_dead"' in body
        code, said = process.await_exit()
        assert code == 1
        assert "SIGKILL" in said
