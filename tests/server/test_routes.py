"""Everything around generation: routes, keys, limits, ids, models, tokens."""

from __future__ import annotations

import http.client
import json
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import get_type_hints

import pytest

from paceline import __version__
from paceline.errors import ConfigError, PacelineError
from paceline.server import body as body_module
from paceline.server.listen import bind
from paceline.server.operations import OPERATIONS
from paceline.server.options import ServerOptions
from tests.architecture.source_tree import ROOT
from tests.patience import PATIENCE_S, wait_for
from tests.server.fake_client import FakeClient, ids_of
from tests.server.serving import JSON, Served, serving


@pytest.mark.parametrize("path", ["/v1", "/v1/embeddings", "/v1/models/", "/health/", "/x%00"])
def test_an_unknown_route_is_a_404_in_openais_form(server: Served, path: str) -> None:
    reply = server.get(path)
    assert reply.status == 404
    assert reply.error["type"] == "invalid_request_error"


def test_a_route_nearly_right_is_named(server: Served) -> None:
    reply = server.post("/v1/chat/completion", {})
    assert "Did you mean '/v1/chat/completions'?" in reply.error["message"]


@pytest.mark.parametrize("path", ["/v1/embedding", "/v1/quest"])
def test_a_route_that_only_begins_alike_is_no_suggestion(server: Served, path: str) -> None:
    assert "Did you mean" not in server.post(path, {}).error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/completions", "POST"),
        ("DELETE", "/v1/models", "GET"),
        ("POST", "/health", "GET"),
        ("GET", "/tokenize", "POST"),
    ],
)
def test_a_wrong_method_is_a_405_that_names_the_right_one(
    server: Served, method: str, path: str, allow: str
) -> None:
    reply = server.request(method, path)
    assert reply.status == 405
    assert allow in reply.error["message"]
    assert allow in reply.headers["allow"]


def test_a_model_answers_to_each_of_its_names_and_replies_carry_the_first() -> None:
    names = ("org/first", "second")
    with serving(FakeClient(), served_model_name=names) as server:
        body = server.get("/v1/models").json()
        assert body["object"] == "list"
        assert [m["id"] for m in body["data"]] == list(names)
        for name, card in zip(names, body["data"], strict=True):
            assert server.get(f"/v1/models/{name}").json() == card
        assert (card["max_model_len"], card["root"], card["owned_by"]) == (4096, "tiny", "paceline")
        assert server.get("/v1/models/third").error["code"] == "model_not_found"
        for asked in ({}, {"model": "org/first"}, {"model": "second"}):
            assert server.chat(**asked).json()["model"] == "org/first"
            assert server.complete(**asked).json()["model"] == "org/first"
        assert b'model_name="org/first"' in server.get("/metrics").body
        assert b'model_name="second"' not in server.get("/metrics").body
        reply = server.chat(model="secnd")
        assert reply.status == 404
        assert reply.error["code"] == "model_not_found"
        assert reply.error["param"] == "model"
        assert "Did you mean 'second'?" in reply.error["message"]


def test_health_readiness_and_version(server: Served) -> None:
    assert server.get("/health").status == 200
    assert server.get("/readyz").json() == {"status": "ready"}
    assert server.get("/version").json() == {"version": __version__}
    assert server.request("HEAD", "/health").body == b""


def test_a_server_without_its_model_answers_what_it_can() -> None:
    with serving(None) as server:
        assert server.get("/health").status == 200
        assert server.get("/metrics").status == 200
        ready = server.get("/readyz")
        assert (ready.status, ready.json()) == (503, {"status": "loading"})
        for reply in (server.chat(), server.complete(), server.get("/v1/models")):
            assert reply.status == 503
            assert int(reply.headers["retry-after"]) > 0
            assert reply.error["code"] == "not_ready"


# ---- tokens


def test_tokenize_and_detokenize_have_vllms_shapes(server: Served) -> None:
    body = server.post("/tokenize", {"prompt": "aé", "return_token_strs": True}).json()
    assert body == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": ids_of("aé"),
        "token_strs": ["a", "\ufffd", "\ufffd"],
    }
    assert server.post("/tokenize", {"prompt": "a"}).json()["token_strs"] is None
    assert server.post("/detokenize", {"tokens": ids_of("aé")}).json() == {"prompt": "aé"}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert server.post("/detokenize", {"tokens": [256]}).json() == {"prompt": "<end>"}


def test_messages_are_tokenized_through_the_template(server: Served) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert tokens == ids_of("<user>Hi<assistant>")
    asked = {
        "messages": messages,
        "add_generation_prompt": False,
        "chat_template_kwargs": {"extra": 1},
    }
    assert server.post("/tokenize", asked).json()["tokens"] == ids_of("<user>Hi[1]")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"promt": "x"}, "promt"),
        ("/tokenize", {"messages": "x"}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}, "prompt"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_bad_token_requests_name_their_field(
    server: Served, path: str, body: object, param: str
) -> None:
    reply = server.post(path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


# ---- keys, origins, ids


def test_a_key_is_asked_for_where_it_matters() -> None:
    with serving(FakeClient(), api_key="sesame") as server:
        for path in ("/health", "/readyz", "/metrics", "/version"):
            assert server.get(path).status == 200
        refused = [
            server.get("/v1/models"),
            server.chat(),
            server.get("/v1/models", Authorization="Bearer wrong"),
            server.get("/v1/models", Authorization="sesame"),
            server.get("/v1/models", Authorization="Basic sesame"),
            server.get("/v1/models", Authorization="Bearer sésame".encode().decode("latin-1")),
            server.get("/no-such-route"),
        ]
        for reply in refused:
            assert reply.status == 401
            assert reply.error["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
            assert "sesame" not in reply.error["message"]
        assert server.get("/v1/models", Authorization="Bearer sesame").status == 200
        assert server.get("/v1/models", Authorization="bearer  sesame").status == 200


def test_browsers_of_allowed_origins_may_call() -> None:
    with serving(FakeClient(), allowed_origins=("https://a.example",), api_key="k") as server:
        asked = {
            "Origin": "https://a.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        reply = server.request("OPTIONS", "/v1/chat/completions", headers=asked)
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in reply.headers["access-control-allow-headers"].lower()
        # The browser must be able to read a refusal as well.
        reply = server.get("/v1/models", Origin="https://a.example")
        assert reply.status == 401
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        reply = server.get("/health", Origin="https://b.example")
        assert "access-control-allow-origin" not in reply.headers


def test_without_allowed_origins_no_browser_is_let_in(server: Served) -> None:
    assert "access-control-allow-origin" not in server.get("/health", Origin="https://a.x").headers


def test_a_preflight_without_allowed_origins_names_the_flag(server: Served) -> None:
    asked = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    reply = server.request("OPTIONS", "/v1/chat/completions", headers=asked)
    assert reply.status == 405
    assert "--allowed-origins" in reply.error["message"]


def test_a_request_id_is_taken_or_made(
    server: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("paceline"), "propagate", True)
    with caplog.at_level(logging.INFO, "paceline.server"):
        headers = {**JSON, "X-Request-Id": "abc-123"}
        reply = server.request("POST", "/v1/completions", json.dumps({"prompt": "x"}), headers)
    assert reply.headers["x-request-id"] == "abc-123"
    wait_for(lambda: any(getattr(r, "request_id", "") == "abc-123" for r in caplog.records))
    made = {server.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    for bad in ("x" * 129, "a b", "é"):
        raw = {"X-Request-Id": bad.encode().decode("latin-1")}
        assert (
            server.request("GET", "/nope", headers=raw).headers["x-request-id"].startswith("req_")
        )


def test_the_same_request_id_twice_is_two_requests() -> None:
    client = FakeClient(by_hand=True)
    with serving(client) as server, ThreadPoolExecutor(2) as pool:
        server.headers["X-Request-Id"] = "same"
        replies = [pool.submit(server.chat) for _ in range(2)]
        client.await_asked(2)
        client.allow(2)
        assert [r.result().status for r in replies] == [200, 200]
    assert len({a.request_id for a in client.asked}) == 2


# ---- limits


def test_a_body_over_the_limit_is_a_413(client: FakeClient) -> None:
    with serving(client, max_request_bytes=1000) as server:
        assert server.complete(prompt="x" * 900).status == 200
        reply = server.complete(prompt="x" * 1000)
        assert reply.status == 413
        assert reply.error["code"] == "request_too_large"
        assert "1000" in reply.error["message"]


def test_a_chunked_body_over_the_limit_is_a_413_although_more_of_it_comes(
    client: FakeClient,
) -> None:
    with serving(client, max_request_bytes=1000) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        chunks = iter([b'{"prompt": "', b"x" * 600, b"x" * 600, b"x" * 100_000, b'"}'])
        connection.request("POST", "/v1/completions", chunks, JSON, encode_chunked=True)
        response = connection.getresponse()
        assert response.status == 413
        response.read()
        connection.close()
        wait_for(lambda: server.service.body_bytes == 0)


def test_bodies_are_limited_together_too(client: FakeClient) -> None:
    with serving(client, max_request_bytes=1000) as server:
        server.service.body_bytes = 16_000
        reply = server.complete(prompt="x")
        assert reply.status == 429
        server.service.body_bytes = 0
        assert server.complete(prompt="x").status == 200


def test_a_body_that_does_not_come_is_a_408(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "BODY_TIMEOUT_S", 0.05)
    with serving(client) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b'{"prompt"')
        assert connection.getresponse().status == 408
        connection.close()


def test_more_sequences_than_the_queue_holds_are_429_and_room_comes_back() -> None:
    client = FakeClient(by_hand=True)
    with serving(client, max_waiting=3) as server, ThreadPoolExecutor(3) as pool:
        first = pool.submit(server.chat, n=2)
        client.await_asked(1)
        reply = server.chat(n=2)
        assert reply.status == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.error["type"] == "rate_limit_error"
        assert reply.error["code"] == "rate_limit_exceeded"
        second = pool.submit(server.chat)
        client.await_asked(2)
        assert server.chat(stream=True).status == 429
        client.allow(4)
        assert (first.result().status, second.result().status) == (200, 200)
        client.allow(1 << 30)
        assert server.chat(n=3).status == 200


def test_a_request_that_can_never_fit_the_queue_is_a_400(client: FakeClient) -> None:
    with serving(client, max_waiting=3) as server:
        assert server.complete(prompt=["a", "b"], n=2).status == 400


def test_long_texts_are_tokenized_beside_the_loop(server: Served) -> None:
    tokens = server.post("/tokenize", {"prompt": "x" * 20_000}).json()["tokens"]
    assert tokens == ids_of("x") * 20_000


def test_a_broken_request_line_is_a_400_and_the_server_lives(server: Served) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        sock.sendall(b"\x00\x01\x02 nonsense\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 400")
    assert server.get("/health").status == 200


def test_a_bug_is_a_500_that_hides_its_insides(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("secret detail")

    with serving(client) as server:
        monkeypatch.setattr(server.service, "resolve_model", broken)
        reply = server.chat()
        assert reply.status == 500
        assert reply.error["type"] == "server_error"
        assert "secret" not in reply.body.decode()
        assert reply.headers["x-request-id"]


# ---- options and the socket


def test_a_port_in_use_is_said_at_once(server: Served) -> None:
    with pytest.raises(PacelineError, match=rf"Port {server.port} on 127.0.0.1 is in use"):
        bind(ServerOptions(port=server.port))


def test_a_host_that_is_not_here_is_said_at_once() -> None:
    with pytest.raises(PacelineError, match="--host"):
        bind(ServerOptions(host="192.0.2.1", port=0))
    with pytest.raises(PacelineError, match="--host"):
        bind(ServerOptions(host="no such host", port=0))


@pytest.mark.parametrize(
    "bad",
    [
        {"port": -1},
        {"port": 70000},
        {"max_waiting": 0},
        {"max_request_bytes": 0},
        {"drain_timeout": -1.0},
        {"api_key": ""},
    ],
    ids=str,
)
def test_bad_options_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServerOptions(**bad)  # type: ignore[arg-type]


def test_every_route_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    for op in OPERATIONS:
        assert f"`{op.method} {op.open_path}`" in text


def test_every_option_has_a_type_and_a_word_of_help() -> None:
    hints = get_type_hints(ServerOptions)
    for field in fields(ServerOptions):
        assert field.metadata["help"], field.name
        assert field.name in hints
