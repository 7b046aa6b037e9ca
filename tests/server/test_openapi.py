"""/openapi.json, /docs and `GET /`: what the server says about itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paceline.server.app import build_app
from paceline.server.openapi import openapi
from paceline.server.operations import NOT_BUILT_PATHS, OPERATIONS
from paceline.server.options import ServerOptions
from tests.server.fake_client import FakeClient
from tests.server.serving import Served, serving


def refs_in(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(refs_in, value.values()))
    return set().union(*map(refs_in, value)) if isinstance(value, list) else set()


def test_every_route_is_described_and_every_description_is_a_route(server: Served) -> None:
    document = server.get("/openapi.json").json()
    described = {(m.upper(), p) for p, ops in document["paths"].items() for m in ops}
    app = build_app(None, ServerOptions())
    routes: set[tuple[str, str]] = set()
    for route in app.routes:
        methods: set[str] = getattr(route, "methods", set()) - {"HEAD"}
        routes |= {(m, getattr(route, "path", "").replace(":path}", "}")) for m in methods}
    assert described == routes


def test_the_document_is_valid() -> None:
    document = openapi()
    assert document["openapi"].startswith("3.1")
    for name, schema in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert re.fullmatch(r"[\w.-]+", name)
    prefix = "#/components/schemas/"
    assert {r.removeprefix(prefix) for r in refs_in(document)} <= {
        *document["components"]["schemas"]
    }
    names = [op["operationId"] for ops in document["paths"].values() for op in ops.values()]
    assert len(names) == len(set(names))
    for path, ops in document["paths"].items():
        for op in ops.values():
            given = {p["name"] for p in op.get("parameters", ()) if p["in"] == "path"}
            assert given == set(re.findall(r"\{(\w+)\}", path))


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "ChatReply"),
        ("/v1/completions", {"prompt": "Hi", "echo": True, "logprobs": 1}, "TextReply"),
        ("/v1/responses", {"input": "Hi"}, "Response"),
        (
            "/v1/messages",
            {"max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]},
            "MessageReply",
        ),
        ("/tokenize", {"prompt": "Hi"}, "Tokens"),
        ("/v1/completions", {}, "ErrorReply"),
        ("/v1/messages", {}, "AnthropicError"),
    ],
)
def test_replies_are_as_described(server: Served, path: str, body: Any, kind: str) -> None:
    schema = {"$ref": f"#/components/schemas/{kind}", **openapi()}
    jsonschema.validate(server.post(path, body).json(), schema)


def test_the_docs_page_needs_nothing_from_elsewhere() -> None:
    with serving(FakeClient()) as server:
        reply = server.get("/docs", Accept="text/html,*/*")
    assert reply.headers["content-type"].startswith("text/html")
    page = reply.body.decode()
    assert not re.search(r"<script|<link|src=|@import", page)
    assert all(link.startswith(("/", "#")) for link in re.findall(r'href="([^"]*)"', page))
    for op in OPERATIONS:
        assert f"{op.method} {op.open_path}" in page


def test_the_root_names_the_model_the_routes_and_a_command(server: Served) -> None:
    facts = server.get("/").json()
    assert (facts["model"], facts["status"]) == ("tiny", "ready")
    assert facts["try"].startswith(f"curl {server.url}/v1/chat/completions")
    assert "POST /v1/messages" in facts["routes"]
    head = server.request("HEAD", "/")
    assert (head.status, head.body) == (200, b"")
    evil = server.get("/", Accept="text/html", Host="localhost")
    assert evil.status == 200


def test_a_server_with_a_key_describes_itself_without_the_model(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k")
    with serving(FakeClient(), api_key_file=str(keys)) as server:
        facts = server.get("/").json()
        assert facts["model"] is None
        assert "Authorization" in facts["try"]
    with serving(FakeClient(), api_key="k") as server:
        assert server.get("/").json()["model"] is None
        assert server.get("/docs").status == server.get("/openapi.json").status == 200
        assert server.get("/tokenizer_info").status == 401


def test_tokenizer_info_has_special_tokens_and_the_template(server: Served) -> None:
    info = server.get("/tokenizer_info").json()
    assert info["model_max_length"] == 4096
    assert info["vocab_size"] > 256
    assert "messages" in info["chat_template"]


@pytest.mark.parametrize("path", [*NOT_BUILT_PATHS, "/v1/audio/speech"])
def test_a_known_route_that_is_not_built_says_so(server: Served, path: str) -> None:
    reply = server.post(path, {})
    assert reply.status == 404
    assert "is not built" in str(reply.json())


def test_an_unknown_route_lists_those_that_exist(server: Served) -> None:
    message = server.get("/v1/nothing").error["message"]
    for op in OPERATIONS:
        assert op.open_path in message


def test_a_405_names_every_method_of_the_path(server: Served) -> None:
    reply = server.request("PUT", "/v1/responses/resp_1")
    assert reply.status == 405
    assert set(reply.headers["allow"].split(", ")) >= {"GET", "DELETE"}
