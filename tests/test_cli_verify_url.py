"""`verify --url` and `bench serve` on servers of other people: one line and an exit code."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from paceline.cli import main
from paceline.commands.verify_checks import CHECKS


class Foreign:
    """A server of other people: answers by path, 404 elsewhere."""

    def __init__(self, **answers: tuple[int, str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.strip("/").replace("/", "_")
                status, text = answers.get(name, (404, "<html>\n<h1>Not Found</h1></html>"))
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with suppress(OSError):  # the client has seen enough
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(text.encode())

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Foreign:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


HTML = (200, "<!doctype html>\n<p>Welcome</p>")
MODELS = (200, '{"data": [{"id": "theirs"}]}')
TOKENS = (200, '{"tokens": [1, 2, 3]}')
PLAIN = {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


@pytest.mark.parametrize(
    ("answers", "code", "said"),
    [
        ({}, 1, "HTTP 404: <html> <h1>Not Found"),
        ({"v1_models": HTML}, 1, "the reply of /v1/models is not that of an OpenAI"),
        ({"v1_models": (200, "[1]")}, 1, "the reply of /v1/models is not that of an OpenAI"),
        ({"v1_models": (200, '{"data": []}')}, 1, "the reply of /v1/models is not that"),
        ({"v1_models": (401, '{"error": {"message": "No."}}')}, 1, "HTTP 401: No. (give the key"),
        ({"v1_models": MODELS}, 2, "does not encode the prompts (/tokenize): HTTP 404"),
        ({"v1_models": MODELS, "tokenize": HTML}, 2, "does not encode the prompts (/tokenize)"),
        ({"v1_models": MODELS, "tokenize": (200, '{"count": 3}')}, 2, "KeyError: 'tokens'"),
    ],
)
def test_a_server_that_cannot_be_verified_is_one_line(
    answers: dict[str, tuple[int, str]], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Foreign(**answers) as foreign:
        assert main(["verify", "--url", foreign.url]) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("paceline: ")
    assert said in error


@pytest.mark.parametrize(
    "stream",
    [
        "data: 7\n\n",
        'data: {"choices": [7]}\n\n',
        'data: {"usage": {"total_tokens": 3}}\n\n',
        "<p>",
    ],
)
def test_a_load_on_a_foreign_server_counts_its_failures(
    stream: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Foreign(v1_models=MODELS, v1_completions=(200, stream)) as foreign:
        asked = ["bench", "serve", "--base-url", foreign.url, "--num-prompts", "2"]
        assert main([*asked, "--output-len", "4"]) == 1
    assert "2 requests failed, the first: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    [
        {"v1_completions": (200, json.dumps(PLAIN)), "v1_live": HTML},
        {"v1_completions": HTML, "v1_live": (200, "data: 7\n\n")},
        {"v1_completions": (200, "[]"), "v1_live": (200, 'data: {"step": 1}\n\n')},
        {"v1_completions": (400, '{"detail": "unknown field return_token_ids"}')},
    ],
)
def test_a_server_without_our_fields_is_not_checked(
    more: dict[str, tuple[int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not accused of wrong tokens, and without --partial it is no success."""
    with Foreign(v1_models=MODELS, tokenize=TOKENS, **more) as foreign:
        assert main(["verify", "--url", foreign.url, "--draws", "10"]) == 1
    shown = capsys.readouterr()
    assert "does not hold" not in shown.out
    assert f"{len(CHECKS)} not checked" in shown.out
    assert "--partial" in shown.err
