"""A real server in a thread, and raw HTTP to talk to it. Never mocks a transport."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvloop

from paceline.server.app import build_app
from paceline.server.http import HttpServer
from paceline.server.listen import bind, url_of
from paceline.server.options import ServerOptions
from paceline.server.service import Client, Service
from tests.patience import PATIENCE_S

JSON = {"Content-Type": "application/json"}


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        body: dict[str, Any] = self.json()
        assert list(body) == ["error"]
        assert list(body["error"]) == ["message", "type", "param", "code"]
        error: dict[str, Any] = body["error"]
        return error


@dataclass
class Served:
    """A running server."""

    url: str
    port: int
    service: Service
    loop: asyncio.AbstractEventLoop
    headers: dict[str, str] = field(default_factory=dict)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {**self.headers, **(headers or {})})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any) -> Reply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, raw, JSON)

    def post_and_leave(self, path: str, body: Any, on_sent: Callable[[], None]) -> bytes:
        """Ask, read the first line of the reply, and go away."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, json.dumps(body).encode(), JSON)
        on_sent()
        response = connection.getresponse()
        line = response.readline() + response.readline()
        response.close()
        connection.close()
        return line

    def chat(self, **fields: Any) -> Reply:
        fields.setdefault("messages", [{"role": "user", "content": "Hi"}])
        return self.post("/v1/chat/completions", fields)

    def complete(self, **fields: Any) -> Reply:
        fields.setdefault("prompt", "Hi")
        return self.post("/v1/completions", fields)


@contextlib.contextmanager
def serving(
    client: Client | None, *, max_connections: int = 64, **options: Any
) -> Iterator[Served]:
    """`build_app` on a free port, in a thread of its own."""
    chosen = ServerOptions(port=0, **options)
    started = threading.Event()
    made: list[Served] = []
    stops: list[asyncio.Event] = []

    async def main() -> None:
        sock = bind(chosen)
        app = build_app(client, chosen)
        server = HttpServer(app, chosen, sock, max_connections)
        await server.start()
        stop = asyncio.Event()
        port = sock.getsockname()[1]
        loop = asyncio.get_running_loop()
        made.append(Served(url_of(sock), port, app.state.service, loop))
        stops.append(stop)
        started.set()
        await stop.wait()
        await server.stop(grace_s=1.0)

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, name="test-server")
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield made[0]
    finally:
        made[0].loop.call_soon_threadsafe(stops[0].set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
