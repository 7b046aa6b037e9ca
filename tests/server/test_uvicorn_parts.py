"""What `server/http.py` uses of uvicorn's inside, which any version may change."""

from __future__ import annotations

import asyncio
import socket
import tomllib
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.server.http import HttpConnection
from tests.architecture.source_tree import ROOT


def test_uvicorn_has_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = next(x for x in project["optional-dependencies"]["server"] if x.startswith("uvicorn"))
    assert ",<" in asked


def test_every_overridden_method_is_one_of_uvicorns() -> None:
    """uvicorn would never call one that it has renamed, and the limit in it would not hold."""
    public = {name for name in vars(HttpConnection) if not name.startswith("_")}
    own = {"is_overdue", "on_chunk_header"}  # the second one is called by httptools
    missing = sorted(name for name in public - own if not hasattr(HttpToolsProtocol, name))
    assert not missing, f"uvicorn {uvicorn.__version__} has no {missing}"


def test_uvicorn_keeps_its_state_under_the_names_that_are_used() -> None:
    lacks: list[str] = []

    def check(thing: object, *names: str) -> None:
        lacks.extend(f"{type(thing).__name__}.{name}" for name in names if not hasattr(thing, name))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def main() -> None:
        config = uvicorn.Config(app, http=HttpToolsProtocol, lifespan="off")
        server = uvicorn.Server(config)
        serve = asyncio.create_task(server.serve(sockets=[]))
        while not server.started:
            await asyncio.sleep(0.01)
        state = server.server_state
        connection = HttpToolsProtocol(config, state, server.lifespan.state)
        loop = asyncio.get_running_loop()
        here, there = socket.socketpair()
        there.setblocking(False)
        with there:
            await loop.connect_accepted_socket(lambda: connection, here)
            check(connection, "cycle", "transport", "loop", "shutdown")
            assert connection in state.connections
            await loop.sock_sendall(there, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await loop.sock_recv(there, 1)
            check(connection.cycle, "keep_alive", "response_started", "response_complete")
            check(server, "started", "should_exit", "force_exit", "capture_signals")
            check(config, "timeout_graceful_shutdown")
            connection.shutdown()
        server.should_exit = True
        await serve

    asyncio.run(main())
    assert not lacks, f"uvicorn {uvicorn.__version__} has no {lacks}"
