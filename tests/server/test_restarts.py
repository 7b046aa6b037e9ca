"""What clients and operators of a server see while its engine restarts."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request

from paceline.server.admin import AdminEndpoints
from paceline.server.failures import HttpFailure
from paceline.server.options import ServerOptions
from paceline.server.service import Service
from tests.patience import wait_for
from tests.server.fake_client import FakeClient
from tests.server.processes import Process, running
from tests.server.serving import serving
from tests.server.test_life import text_of

RESTARTS: dict[str, Any] = {"max_restarts": 3, "stall_timeout": 2.0}


def kill_engine(process: Process) -> None:
    process.find_engine()
    os.kill(process.engine_pids[0], signal.SIGKILL)


def test_a_stream_and_a_whole_reply_go_on_after_the_death_of_their_engine() -> None:
    with (
        running("delay_s=0.02 load_s=1.0", engine=RESTARTS) as process,
        ThreadPoolExecutor(2) as pool,
    ):
        stream = process.open_stream(prompt="abc", max_tokens=120)
        first = stream.read1()
        fields = {"prompt": "xy", "max_tokens": 120}
        whole = pool.submit(process.request, "POST", "/v1/completions", **fields)
        kill_engine(process)
        wait_for(lambda: b"restarting" in process.request("GET", "/health")[2])
        status, headers, body = process.request("GET", "/readyz")
        assert (status, body) == (503, b'{"status":"restarting"}')
        assert "retry-after" in headers
        status, _, body = process.request("GET", "/health")
        assert status == 200
        assert "SIGKILL" in json.loads(body)["reason"]
        late = pool.submit(process.request, "POST", "/v1/completions", prompt="q", max_tokens=3)
        assert text_of(first + stream.read()) == "abc" * 40
        assert json.loads(whole.result()[2])["choices"][0]["text"] == "xy" * 60
        assert json.loads(late.result()[2])["choices"][0]["text"] == "qqq"
        metrics = process.request("GET", "/metrics")[2].decode()
        assert 'paceline:engine_restarts_total{cause="died",model_name="echo"} 1.0' in metrics
        told = re.search(r"^paceline:rank_last_restart_timestamp_seconds\{(.*)\}", metrics, re.M)
        assert told is not None
        assert 'cause="died"' in told[1]
        assert "SIGKILL" in told[1]
        assert process.request("GET", "/health")[2] == b'{"status":"ok"}'
        process.find_engine()
        process.popen.terminate()
        assert process.await_exit()[0] == 0


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "abc"}]
# By path: a request, and the events that end a stream which fails: name, `type`, the error in it.
APIS: dict[str, tuple[dict[str, Any], list[tuple[str, str | None]]]] = {
    "/v1/completions": ({"prompt": "abc", "max_tokens": 300}, [("", None)]),
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": 300}, [("", None)]),
    "/v1/responses": (
        {"input": "abc", "max_output_tokens": 300},
        [("error", "error"), ("response.failed", "response.failed")],
    ),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 300}, [("error", "error")]),
}


def events_of(stream: bytes) -> list[tuple[str, Any]]:
    """(name, data) of server-sent events, each of which must be whole."""
    assert stream.endswith(b"\n\n")
    found = []
    for event in stream.decode().strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.split("\n"))
        data = lines["data"]
        found.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


def test_without_retry_every_api_says_so_in_its_own_form() -> None:
    """A stream ends with an error event, a whole reply is a 503 with JSON: none is cut."""
    engine = {**RESTARTS, "retry": False}
    with (
        running("delay_s=0.02", engine=engine, chat_template=TEMPLATE) as process,
        ThreadPoolExecutor(len(APIS)) as pool,
    ):
        streams = {path: process.open_stream(path=path, **APIS[path][0]) for path in APIS}
        begun = {path: stream.read1() for path, stream in streams.items()}
        whole = {path: pool.submit(process.request, "POST", path, **APIS[path][0]) for path in APIS}
        running_all = f'num_requests_running{{model_name="echo"}} {2 * len(APIS)}.0'.encode()
        wait_for(lambda: running_all in process.request("GET", "/metrics")[2])
        kill_engine(process)
        for path, (_, last) in APIS.items():
            events = events_of(begun[path] + streams[path].read())
            if events[-1][1] == "[DONE]":
                assert not last[0][0], path
                events.pop()
            ends = events[-len(last) :]
            assert [(name, data.get("type")) for name, data in ends] == last, path
            assert not any("error" in data for _, data in events[: -len(last)]), path
            error = ends[0][1].get("error", ends[0][1])
            assert "The engine has stopped" in error["message"], path
        assert {stream.status for stream in streams.values()} == {200}
        for path in APIS:
            status, headers, body = whole[path].result()
            assert status == 503, path
            assert headers["content-type"] == "application/json"
            error = json.loads(body)["error"]
            expected = "overloaded_error" if "messages" in path else "service_unavailable_error"
            assert error["type"] == expected, path
            assert "The engine has stopped" in error["message"], path
        wait_for(lambda: process.request("GET", "/readyz")[0] == 200)
        status, _, body = process.request("POST", "/v1/completions", prompt="q", max_tokens=3)
        assert json.loads(body)["choices"][0]["text"] == "qqq"


def test_a_rank_is_drained_and_restarted_by_request() -> None:
    with running("delay_s=0.02", engine=RESTARTS) as process, ThreadPoolExecutor(1) as pool:
        before = process.engine_pids
        stream = process.open_stream(prompt="abc", max_tokens=90)
        first = stream.read1()
        drained = pool.submit(process.request, "POST", "/admin/drain?rank=0")
        assert text_of(first + stream.read()) == "abc" * 30
        status, _, body = drained.result()
        assert (status, json.loads(body)["status"]) == (200, "restarted")
        process.find_engine()
        assert process.engine_pids != before


@pytest.mark.more
def test_rolling_restarts_of_all_ranks_refuse_no_request() -> None:
    engine = {**RESTARTS, "data_parallel_size": 2}
    with running("delay_s=0.01", engine=engine, num_ranks=2) as process:
        before, is_over = process.engine_pids, threading.Event()

        def keep_asking(prompt: str) -> set[tuple[int, str]]:
            found = set()
            while not is_over.is_set():
                fields = {"prompt": prompt, "max_tokens": 30}
                status, _, body = process.request("POST", "/v1/completions", **fields)
                found.add((status, str(json.loads(body)["choices"][0]["text"])))
            return found

        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(keep_asking, prompt) for prompt in ("a", "b", "c", "d")]
            try:
                for rank in (0, 1):
                    status, _, body = process.request("POST", f"/admin/drain?rank={rank}")
                    assert (status, json.loads(body)["rank"]) == (200, rank)
            finally:
                is_over.set()
            assert [f.result() for f in asking] == [{(200, p * 30)} for p in "abcd"]
        process.find_engine(2)
        assert not {*before} & {*process.engine_pids}


def test_a_signal_during_a_restart_lets_the_streams_finish() -> None:
    with running("delay_s=0.02 load_s=0.5", engine=RESTARTS) as process:
        stream = process.open_stream(prompt="abc", max_tokens=60)
        first = stream.read1()
        kill_engine(process)
        wait_for(lambda: b"restarting" in process.request("GET", "/health")[2])
        process.popen.terminate()
        assert text_of(first + stream.read()) == "abc" * 20
        assert process.await_exit()[0] == 0


def test_some_replicas_that_restart_leave_the_server_ready(client: FakeClient) -> None:
    client.stats.num_replicas = 3
    client.stats.lose(2, "died", "rank 2: an older one")
    client.stats.lose(1, "died", "rank 1: /usr/lib/thing.py failed\ntraceback")
    with serving(client) as server:
        assert server.get("/readyz").status == 200
        told = server.get("/health").json()
        assert told == {
            "status": "degraded",
            "replicas_serving": "1 of 3",
            "reason": "rank 1: thing.py failed",
            "restarting": [
                {"rank": 1, "reason": "rank 1: thing.py failed"},
                {"rank": 2, "reason": "rank 2: an older one"},
            ],
        }


def test_admin_checks_its_parameter_and_who_asks(client: FakeClient) -> None:
    with serving(client, drain_timeout=7.0) as server:
        assert server.request("POST", "/admin/drain?rank=0").status == 200
        assert client.drained == [(0, 7.0)]
        for bad in ("", "?rank=", "?rank=x", "?rank=-1", "?rank=9"):
            reply = server.request("POST", f"/admin/drain{bad}")
            assert (reply.status, reply.error["param"]) == (400, "rank")
    with serving(client, api_key="key") as server:
        assert server.request("POST", "/admin/drain?rank=0").status == 401


@pytest.mark.parametrize("host", ["10.1.2.3", "", "::2", "testclient"])
def test_without_a_key_admin_is_for_this_machine_only(host: str) -> None:
    admin = AdminEndpoints(Service(ServerOptions()))
    request = Request({"type": "http", "client": (host, 1), "headers": []})
    with pytest.raises(HttpFailure) as caught:
        admin._check_allowed(request)
    assert caught.value.status == 403
    for local in ("127.0.0.1", "127.8.8.8", "::1"):
        admin._check_allowed(Request({"type": "http", "client": (local, 1), "headers": []}))


def test_a_request_that_has_waited_too_long_is_a_429_and_one_that_runs_is_not() -> None:
    client = FakeClient(by_hand=True)
    with serving(client) as server, ThreadPoolExecutor(2) as pool:
        waiting, running_one = (pool.submit(server.chat) for _ in range(2))
        client.await_asked(2)
        wait_for(lambda: sum(len(job.generations) for job in server.service.jobs) == 2)
        first, second = server.service.jobs
        first.generations[0].was_admitted = True
        server.service.options = replace(server.service.options, max_queue_wait=1.0)
        wait_for(lambda: second.error is not None)
        assert first.error is None
        client.allow(1 << 30)
        replies = sorted((waiting.result(), running_one.result()), key=lambda r: r.status)
        assert [r.status for r in replies] == [200, 429]
        assert int(replies[1].headers["retry-after"]) >= 1
        assert "--max-queue-wait" in replies[1].error["message"]


def test_a_request_that_would_wait_too_long_is_refused_at_once(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(client, max_queue_wait=5.0) as server:
        assert server.chat().status == 200
        client.stats.num_held = 50  # and none runs
        estimate = server.service._retry_estimate
        estimate.restart(0.0)
        estimate._begin_s = None
        assert server.chat().status == 200  # no rate is known yet
        monkeypatch.setattr(estimate, "seconds_for", lambda count, now_s: count * 0.2)
        reply = server.chat()
        assert reply.status == 429
        assert "would wait about 10 s" in reply.error["message"]
        client.stats.num_held = 20
        assert server.chat().status == 200
