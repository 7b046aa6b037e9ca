"""/v1/live and the files of the page: who may read them, what they cost, what they say."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.engine.messages import Gauges
from paceline.observe.trace import LANES, TraceRing
from paceline.server.live import MAX_VIEWERS, MOST_SPANS
from paceline.server.operations import PAGE_PATHS
from paceline.server.page_files import FOLDER
from tests.engine.echo_client import echo_client
from tests.patience import PATIENCE_S, wait_for
from tests.server.fake_client import FakeClient
from tests.server.serving import Served, serving


@contextlib.contextmanager
def viewing(server: Served, **headers: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request("GET", "/v1/live", headers=headers)
    response = connection.getresponse()
    try:
        yield response
    finally:
        response.close()
        connection.close()


def next_frame(response: http.client.HTTPResponse) -> dict[str, Any]:
    line = response.readline()
    assert line.startswith(b"data: "), line
    assert response.readline() == b"\n"
    frame: dict[str, Any] = json.loads(line[6:])
    return frame


def spans(count: int) -> bytes:
    ring = TraceRing()
    for step in range(count):
        ring.add("device", step, 1.0 + step, 1.5 + step)
    return ring.take()


def test_a_frame_has_the_load_the_totals_and_the_new_spans() -> None:
    client = FakeClient()
    client.stats.newest[0] = Gauges(num_running=3, kv_usage=0.25)
    client.stats.num_running, client.stats.num_held = 3, 5
    client.stats.accepted_per_position, client.stats.num_drafts = [4, 2], 4
    client.spans = spans(2)
    with serving(client) as server, viewing(server) as response:
        assert response.getheader("content-type", "").startswith("text/event-stream")
        first = next_frame(response)
        assert (first["num_running"], first["num_waiting"], first["kv_usage"]) == (3, 2, 0.25)
        assert first["accepted_per_position"] == [4, 2]
        assert first["lanes"] == list(LANES)
        assert first["time_to_first_token"][-1] == ["+Inf", 0]
        assert first["ranks"] == [{"rank": 0, "num_running": 3, "kv_usage": 0.25, "spans": []}]
        frames = [next_frame(response) for _ in range(3)]
        (shown,) = [f["ranks"][0]["spans"] for f in frames if f["ranks"][0]["spans"]]
        device = LANES.index("device")
        assert shown == [[device, 0, 1e6, 5e5], [device, 1, 2e6, 5e5]]


def test_the_engine_records_only_while_there_is_a_viewer() -> None:
    client = FakeClient()
    with serving(client) as server:
        server.chat()
        assert client.trace_calls == []
        with viewing(server) as one, viewing(server) as two:
            next_frame(one), next_frame(two)
            assert client.trace_calls[0] == "start"
            assert client.trace_calls.count("start") == 1
        wait_for(lambda: client.trace_calls[-1] == "stop")
        with viewing(server) as again:
            next_frame(again)
        wait_for(lambda: client.trace_calls[-1] == "stop")
        assert client.trace_calls.count("start") == client.trace_calls.count("stop") == 2


def test_an_idle_engine_is_asked_for_spans_once() -> None:
    client = FakeClient()
    with serving(client) as server, viewing(server) as response:
        for _ in range(4):
            next_frame(response)
        assert client.trace_calls == ["start", "read"]
        client.stats.num_steps += 1
        wait_for(lambda: client.trace_calls == ["start", "read", "read"])


def test_a_frame_has_a_limited_number_of_spans() -> None:
    client = FakeClient()
    client.spans = spans(MOST_SPANS + 50)
    with serving(client) as server, viewing(server) as response:
        frames = [next_frame(response) for _ in range(3)]
        (shown,) = [f["ranks"][0]["spans"] for f in frames if f["ranks"][0]["spans"]]
        assert [span[1] for span in shown] == list(range(50, MOST_SPANS + 50))
        trace = server.get("/v1/live/trace").json()
        assert trace["otherData"] == {"model": "tiny"}
        assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == MOST_SPANS + 50


def test_the_number_of_viewers_is_limited() -> None:
    with serving(FakeClient()) as server, contextlib.ExitStack() as stack:
        for _ in range(MAX_VIEWERS):
            next_frame(stack.enter_context(viewing(server)))
        reply = server.get("/v1/live")
        assert reply.status == 429
        assert f"{MAX_VIEWERS} viewers" in reply.error["message"]
        assert reply.headers["retry-after"] == "5"


def test_a_stream_ends_when_the_engine_dies() -> None:
    client = FakeClient()
    with serving(client) as server, viewing(server) as response:
        next_frame(response)
        client.die("it is gone")
        assert response.read() is not None  # to its end
        assert server.get("/v1/live").status == 503


def test_a_real_engine_sends_the_stages_of_its_steps() -> None:
    with echo_client("k=2 delay_s=0.002") as client, serving(client) as server:
        with viewing(server) as response:
            next_frame(response)
            assert server.complete(max_tokens=40, ignore_eos=True).status == 200
            seen: set[str] = set()
            while "device" not in seen:
                seen |= {LANES[s[0]] for s in next_frame(response)["ranks"][0]["spans"]}
            assert seen >= {"plan", "launch", "wait", "commit", "publish", "device"}
        trace = server.get("/v1/live/trace").json()
    assert {e["cat"] for e in trace["traceEvents"] if e["ph"] == "X"} >= seen


def test_browsers_get_the_page_and_other_clients_json(server: Served) -> None:
    reply = server.get("/", Accept="text/html,application/xhtml+xml")
    assert reply.headers["content-type"].startswith("text/html")
    assert reply.body == (FOLDER / "index.html").read_bytes()
    policy = reply.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert server.get("/").json()["name"] == "Paceline"
    named = re.findall(rb'(?:src|href)="([^"]+)"', reply.body)
    assert {n.decode() for n in named} == {*PAGE_PATHS, "/", "/docs"}
    assert not re.search(rb"<script>|<style|style=|\son\w+=\"", reply.body)


@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
def test_the_files_of_the_page_need_no_key(path: str) -> None:
    with serving(FakeClient(), api_key="k") as server:
        reply = server.get(path)
        assert reply.status == 200
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert server.get("/v1/live").status == server.get("/v1/live/trace").status == 401
        with viewing(server, Authorization="Bearer k") as response:
            assert next_frame(response)["max_drafts"] == 3


@pytest.mark.parametrize("name", ["index.js", "..%2flive.py", "index.html"])
def test_no_other_file_is_served(server: Served, name: str) -> None:
    assert server.get(f"/page/{name}").status == 404


def test_without_the_page_its_routes_do_not_exist() -> None:
    with serving(FakeClient(), page=False) as server:
        for path in (*PAGE_PATHS, "/v1/live", "/v1/live/trace"):
            assert server.get(path).status == 404
        facts = server.get("/", Accept="text/html")
        for reply in (facts, server.get("/openapi.json"), server.get("/nothing")):
            assert b"/v1/responses" in reply.body
            assert b"/page/" not in reply.body
            assert b"/v1/live" not in reply.body
