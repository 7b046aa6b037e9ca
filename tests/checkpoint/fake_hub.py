"""A small HTTP server that speaks the hub's routes, as far as huggingface_hub asks for them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """Revisions by name: a branch or tag points to a commit, a commit to its files."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    token: str | None = None  # who has none of these is answered 401
    is_gated: bool = False  # who has one is answered 403

    def files(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commit = self.refs.get(revision, revision)
        found = self.commits.get(commit)
        return None if found is None else (commit, found)


@dataclass
class FakeHub:
    """What the server holds and what it was asked. Failures are queued per file name."""

    repos: dict[str, Repo] = field(default_factory=dict)
    log: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range
    cut_once: dict[str, int] = field(default_factory=dict)  # file -> bytes before the line drops
    failing: dict[str, int] = field(default_factory=dict)  # file -> status
    stalling: str = ""  # the file whose content never comes
    has_stalled: threading.Event = field(default_factory=threading.Event)
    is_over: threading.Event = field(default_factory=threading.Event)
    is_down: bool = False
    url: str = ""

    def requests(self, name: str, method: str = "GET") -> list[str | None]:
        """The ranges that were asked of a file; None is all of it."""
        return [r for m, path, r in self.log if m == method and path.endswith("/" + name)]


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        hub.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.log.append((self.command, path, self.headers.get("Range")))
        if self.hub.is_down:
            return self._send(503, b"down")
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?/?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        if match is None:
            return self._send(404, b"no such route")
        repo = self.hub.repos.get(match[1])
        if repo is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if not self._may_read(repo):
            return None
        revision = (match[3] if api else match[2]) or "main"
        found = repo.files(revision)
        if found is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if file:
            return self._file(*found, file[3])
        return self._listing(match[1], match[2], *found)

    def _may_read(self, repo: Repo) -> bool:
        if repo.token is None:
            return True
        if self.headers.get("Authorization") != f"Bearer {repo.token}":
            # The hub does not tell strangers whether a repository exists.
            self._send(401, b"{}", {"X-Error-Message": "Invalid username or password."})
            return False
        if repo.is_gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        return not repo.is_gated

    def _listing(
        self, repo_id: str, kind: str | None, commit: str, files: dict[str, bytes]
    ) -> None:
        if kind == "tree":
            tree = [
                {"type": "file", "path": n, "size": len(c), "oid": _sha1(c)}
                for n, c in files.items()
            ]
            return self._send(200, json.dumps(tree).encode())
        siblings = [{"rfilename": name} for name in files]
        info = {"id": repo_id, "modelId": repo_id, "sha": commit, "siblings": siblings}
        return self._send(200, json.dumps(info).encode())

    def _file(self, commit: str, files: dict[str, bytes], name: str) -> None:
        if name in self.hub.failing:
            return self._send(self.hub.failing[name], b"failing")
        if name not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        if self.command == "GET" and name == self.hub.stalling:
            self.hub.has_stalled.set()
            self.hub.is_over.wait()
            self.close_connection = True
            return None
        content = files[name]
        headers = {
            "ETag": f'"{_sha1(content)}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        start = 0
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if wanted:
            start = int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self._send(206 if wanted else 200, content[start:], headers, cut=name)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: str = ""
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut in self.hub.cut_once:
            body = body[: self.hub.cut_once.pop(cut)]
            self.close_connection = True
        self.wfile.write(body)


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
