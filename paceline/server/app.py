"""The HTTP server: routes put together (`build_app`) and run from bind to exit (`run_server`).

Owns the life of the process: listen first, load meanwhile, serve, drain on a signal, leave.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from paceline.errors import StoppedWhileLoading
from paceline.server.chat import ChatEndpoint
from paceline.server.completions import CompletionEndpoint
from paceline.server.failures import NotReady
from paceline.server.gate import Gate, RouteErrors
from paceline.server.http import HttpServer
from paceline.server.info import InfoEndpoints
from paceline.server.listen import bind, connection_limit, request_limit, url_of
from paceline.server.options import ServerOptions
from paceline.server.service import DRAINING_RETRY_S, Client, Service
from paceline.server.tokens import TokenEndpoints
from paceline.server.turns import TakesTurns

logger = logging.getLogger(__name__)

ClientFactory = Callable[[], Client]
OnReady = Callable[[str, str], None]
# After the drain's limit: time for the last error events to reach their readers.
_FLUSH_S = 1.0
_ENGINE_GRACE_S = 5.0


def build_app(client: Client | None, options: ServerOptions) -> Starlette:
    """The ASGI application. Without a client it answers 503 until `app.state.service` has one."""
    service = Service(options)
    if client is not None:
        service.attach(client)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start_pump()
        yield
        service.close()

    routes = _routes(service)
    middleware = [Middleware(TakesTurns, turns=service.turns), Middleware(Gate, options=options)]
    if options.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
        middleware.insert(0, cors)  # outside: a refused request must be readable in a browser too
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: RouteErrors(r.path for r in routes)},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _routes(service: Service) -> list[Route]:
    info, tokens = InfoEndpoints(service), TokenEndpoints(service)
    return [
        Route("/v1/chat/completions", ChatEndpoint(service).post, methods=["POST"]),
        Route("/v1/completions", CompletionEndpoint(service).post, methods=["POST"]),
        Route("/v1/models", info.models),
        Route("/v1/models/{id:path}", info.model),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/health", info.health),
        Route("/readyz", info.ready),
        Route("/metrics", info.metrics),
        Route("/version", info.version),
    ]


def run_server(
    client_factory: ClientFactory,
    options: ServerOptions,
    *,
    on_ready: OnReady | None = None,
) -> int:
    """Serve until a signal; returns the exit code. Runs in the main thread.

    `client_factory` loads the model in a thread of its own while the server already answers
    /health. `on_ready` gets the URL and a command to try once requests are served. What the
    factory raises is raised here; a port in use is a PacelineError before anything is loaded.
    SIGTERM, SIGINT and SIGHUP let open requests end; while loading they are StoppedWhileLoading.
    """
    sock = bind(options)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Life(client_factory, options, on_ready).run(sock))
    finally:
        sock.close()


def curl_line(url: str, options: ServerOptions) -> str:
    """A command that asks the server something."""
    key = "" if options.api_key is None else ' -H "Authorization: Bearer $PACELINE_API_KEY"'
    message = '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{message}'"


class _Life:
    """One run of the server."""

    def __init__(
        self,
        client_factory: ClientFactory,
        options: ServerOptions,
        on_ready: OnReady | None,
    ) -> None:
        self._factory = client_factory
        self._on_ready = on_ready
        self._max_connections = connection_limit(options)
        limit = request_limit(options, self._max_connections)
        if limit < options.max_waiting:
            logger.info("max_waiting is %d, so that `ulimit -n` suffices", limit)
        self._options = replace(options, max_waiting=limit)
        self._signals: list[signal.Signals] = []
        self._wake = asyncio.Event()

    async def run(self, sock: socket.socket) -> int:
        app = build_app(None, self._options)
        service: Service = app.state.service
        service.on_change = self._wake.set
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._on_signal, number)
        loaded = self._load(loop)
        server = HttpServer(app, self._options, sock, self._max_connections)
        await server.start()
        client: Client | None = None
        try:
            client = await self._await_client(loaded)
            service.attach(client)
            service.start_pump()
            url = url_of(sock)
            logger.info("serving %s on %s", service.model_names[0], url)
            if self._on_ready is not None:
                self._on_ready(url, curl_line(url, self._options))
            return await self._serve(service)
        finally:
            # A second signal means now, and while loading so does the first: open connections
            # are cut off.
            at_once = client is None or len(self._signals) > 1
            await server.stop(grace_s=0.0 if at_once else _FLUSH_S)
            service.close()
            if client is not None:
                client.close(0.0 if at_once else _ENGINE_GRACE_S)

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        self._wake.set()

    def _load(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Client]:
        """Run the factory in a thread that never keeps the process from leaving."""
        future: asyncio.Future[Client] = loop.create_future()

        def settle(client: Client | None, error: BaseException | None) -> None:
            if future.cancelled():
                if client is not None:
                    client.close()
            elif error is not None:
                future.set_exception(error)
            elif client is not None:
                future.set_result(client)

        def work() -> None:
            client, failure = None, None
            try:
                client = self._factory()
            except BaseException as error:
                failure = error
            try:
                loop.call_soon_threadsafe(settle, client, failure)
            except RuntimeError:  # the loop is gone: we were told to stop
                if client is not None:
                    client.close()

        threading.Thread(target=work, name="paceline-load", daemon=True).start()
        return future

    async def _await_client(self, loaded: asyncio.Future[Client]) -> Client:
        while not loaded.done():
            stopped = asyncio.ensure_future(self._wake.wait())
            either: set[asyncio.Future[Any]] = {loaded, stopped}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if self._signals:
                loaded.cancel()
                raise StoppedWhileLoading(self._signals[0])
            self._wake.clear()
        return loaded.result()

    async def _serve(self, service: Service) -> int:
        """Until a signal and the end of what runs then; 1 when the engine dies."""
        while not self._signals and service.death is None:
            await self._wake.wait()
            self._wake.clear()
        if service.death is None:
            await self._drain(service)
        if service.death is not None:
            await asyncio.sleep(0)  # its readers are told in their own tasks
            return 1
        return 130 if len(self._signals) > 1 else 0

    async def _drain(self, service: Service) -> None:
        limit_s = self._options.drain_timeout_s
        logger.info(
            "shutting down: open requests (%d) have %g s to end; a second signal ends them at once",
            len(service.jobs),
            limit_s,
        )
        service.drain()
        try:
            async with asyncio.timeout(limit_s):
                while service.jobs and len(self._signals) < 2 and service.death is None:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            logger.warning("%d requests did not finish in time", len(service.jobs))
        if service.jobs and service.death is None:
            service.fail_all(
                NotReady("The server is shutting down.", retry_after_s=DRAINING_RETRY_S)
            )
