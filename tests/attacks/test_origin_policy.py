"""Web pages that call a server on the machine of their reader: directly, or by a rebound name."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator

import pytest

from paceline.server.listen import is_loopback
from paceline.server.options import ServerOptions
from tests.server.fake_client import FakeClient
from tests.server.serving import JSON, Served, serving

EVIL = "http://evil.example"
ROUTES = ["/health", "/metrics", "/v1/models", "/nowhere"]
BODY = json.dumps({"prompt": "x"})


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(FakeClient()) as served:
        yield served


def status_of(server: Served, host: str, **headers: str) -> int:
    return server.get("/v1/models", Host=host, **headers).status


# ---- Host


@pytest.mark.parametrize("path", ROUTES)
def test_a_name_that_was_rebound_to_this_machine_is_refused(server: Served, path: str) -> None:
    """The page's own name resolves to 127.0.0.1 by now: to the browser it is one origin."""
    reply = server.get(path, Host=f"evil.example:{server.port}")
    assert reply.status == 403
    assert reply.error["code"] == "host_not_allowed"
    assert "start it with --allowed-hosts evil.example." in reply.error["message"]


def test_a_post_of_a_rebound_page_is_refused(server: Served) -> None:
    name = f"evil.example:{server.port}"
    headers = {**JSON, "Host": name, "Origin": f"http://{name}"}
    reply = server.request("POST", "/v1/completions", BODY, headers)
    assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:8000", "localhost:1", "localhost.", "app.localhost:80"),
        *("127.0.0.1", "127.0.0.1:65535", "127.8.8.8", "[::1]", "[::1]:8000"),
    ],
)
def test_names_of_this_machine_are_served(server: Served, host: str) -> None:
    assert status_of(server, host) == 200


@pytest.mark.parametrize(
    "host",
    [
        *("localhost.evil.example", "127.0.0.1.evil.example", "evil.example", "evillocalhost"),
        *("localhost@evil.example", "evil.example:80@localhost", "localhost:80:evil", ""),
        *("192.168.1.5", "192.168.1.5:8000", "[fe80::1]:8000", "[::1", "localhost,evil.example"),
        *("evil.example#localhost", "evil.example/localhost", "x" * 10_000),
    ],
)
def test_all_other_names_are_refused(server: Served, host: str) -> None:
    reply = server.get("/v1/models", Host=host)
    assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")
    assert len(reply.error["message"]) < 400


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.0\r\n", 200),
        (b"GET /health HTTP/1.0\r\nHost: evil.example\r\n", 403),
        (b"GET /health HTTP/1.1\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", 400),
        (b"GET http://evil.example/health HTTP/1.1\r\nHost: evil.example\r\n", 403),
    ],
)
def test_http_1_1_asks_for_exactly_one_host(server: Served, head: bytes, status: int) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(head + b"\r\n")
        assert sock.recv(12) == b"HTTP/1.1 %d" % status


def test_allowed_hosts_are_served_besides_those_of_this_machine() -> None:
    with serving(FakeClient(), allowed_hosts=("LLM.example", "api.example")) as server:
        for host in ("llm.example", "LLM.EXAMPLE:443", "api.example", "localhost:8000"):
            assert status_of(server, host) == 200
        assert status_of(server, "evil.example") == 403
        assert status_of(server, "sub.llm.example") == 403


def test_all_hosts_can_be_allowed() -> None:
    with serving(FakeClient(), allowed_hosts=("*",)) as server:
        assert status_of(server, "anything.example") == 200


def test_a_server_for_other_machines_answers_to_every_name() -> None:
    with serving(FakeClient(), host="0.0.0.0") as server:
        assert status_of(server, "llm.example", Origin="https://ui.example") == 200


def test_a_server_for_other_machines_keeps_to_its_allowed_hosts() -> None:
    """And to the address itself, which health checks use."""
    with serving(FakeClient(), host="0.0.0.0", allowed_hosts=("llm.example",)) as server:
        assert status_of(server, "llm.example:80") == 200
        assert status_of(server, "evil.example") == 403
        assert status_of(server, "10.0.0.1") == 403
        assert status_of(server, f"127.0.0.1:{server.port}") == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(("127.0.0.1", True), ("localhost", True), ("127.1.2.3", True), ("::1", True)),
        *(("0.0.0.0", False), ("::", False), ("192.0.2.1", False)),
    ],
)
def test_loopback_is_told_by_the_address(host: str, expected: bool) -> None:
    assert is_loopback(ServerOptions(host=host)) is expected


# ---- Origin


@pytest.mark.parametrize(
    "origin",
    [
        *(EVIL, "https://evil.example", "null", "file://", "chrome-extension://abc"),
        *("http://localhost.evil.example", "http://evil.example:8000", "http://", ""),
        *("ftp://localhost", "http://localhost@evil.example", f"{EVIL} http://localhost"),
    ],
)
def test_pages_of_elsewhere_are_refused(server: Served, origin: str) -> None:
    for method, path, body in (("GET", "/health", None), ("POST", "/v1/completions", BODY)):
        reply = server.request(method, path, body, {**JSON, "Origin": origin})
        assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
        assert "start it with --allowed-origins" in reply.error["message"]
        assert "access-control-allow-origin" not in reply.headers


def test_pages_of_this_machine_may_call(server: Served) -> None:
    for origin in ("http://localhost:3000", "https://127.0.0.1", "http://[::1]:9", server.url):
        assert status_of(server, "localhost", Origin=origin) == 200


def test_pages_of_an_allowed_host_may_call_their_own_server() -> None:
    with serving(FakeClient(), allowed_hosts=("llm.example",)) as server:
        assert status_of(server, "llm.example", Origin="https://llm.example") == 200
        assert status_of(server, "llm.example:8000", Origin="http://LLM.example:8000") == 200
        assert status_of(server, "llm.example", Origin="http://llm.example:9") == 403


@pytest.mark.parametrize("allowed", ["https://ui.example", "*"])
def test_pages_of_allowed_origins_may_call(allowed: str) -> None:
    with serving(FakeClient(), allowed_origins=(allowed,)) as server:
        reply = server.get("/v1/models", Origin="https://ui.example")
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == allowed
        # The page may; its name for this machine must be right all the same.
        assert status_of(server, "evil.example", Origin="https://ui.example") == 403


def test_two_origins_are_both_asked(server: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("GET", "/health")
    connection.putheader("Origin", "http://localhost")
    connection.putheader("Origin", EVIL)
    connection.endheaders()
    assert connection.getresponse().status == 403
    connection.close()


# ---- without a preflight


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize(
    "kind", [None, "", "text/plain", "text/plain;application/json", "application/json-not"]
)
def test_a_body_that_does_not_say_it_is_json_is_refused(
    server: Served, path: str, kind: str | None
) -> None:
    """A page may send these kinds, or none, without asking first."""
    headers = {} if kind is None else {"Content-Type": kind}
    reply = server.request("POST", path, BODY, headers)
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
    assert "send JSON with the header 'Content-Type: application/json'" in reply.error["message"]


def test_a_preflight_of_a_foreign_page_gets_no_permission(server: Served) -> None:
    asked = {"Origin": EVIL, "Access-Control-Request-Method": "POST"}
    reply = server.request("OPTIONS", "/v1/completions", headers=asked)
    assert reply.status == 403
    assert not [name for name in reply.headers if name.startswith("access-control-")]
