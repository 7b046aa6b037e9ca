"""The HTTP server: its routes (`build_app`), and its run from bind to exit (`run_server`).

A run listens first, loads the model while it answers /health, serves, and drains on a signal.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route

from paceline.errors import StoppedWhileLoading
from paceline.server.admin import AdminEndpoints
from paceline.server.chat import ChatEndpoint
from paceline.server.completions import CompletionEndpoint
from paceline.server.failures import NotReady
from paceline.server.http import HttpServer
from paceline.server.info import InfoEndpoints
from paceline.server.listen import bind, connection_limit, curl_line, request_limit, url_of
from paceline.server.live import LiveEndpoints
from paceline.server.messages import MessagesEndpoint
from paceline.server.middleware import RequestMiddleware, RouteErrors
from paceline.server.openapi import DescriptionEndpoints
from paceline.server.operations import OPERATIONS, served_operations
from paceline.server.options import ServerOptions
from paceline.server.page_files import serve_page_file
from paceline.server.responses import ResponsesEndpoint, StoredResponseEndpoints
from paceline.server.service import DRAINING_RETRY_S, Client, Service
from paceline.server.start_queue import StartQueueMiddleware
from paceline.server.tokens import TokenEndpoints

logger = logging.getLogger(__name__)

ClientFactory = Callable[[], Client]
Handler = Callable[[Request], Awaitable[Any]]
OnReady = Callable[[str, str], None]
# Classes whose methods have the names of operations.
_ENDPOINTS: tuple[Callable[[Service], object], ...] = (
    *(InfoEndpoints, TokenEndpoints, DescriptionEndpoints),
    *(StoredResponseEndpoints, AdminEndpoints, LiveEndpoints),
)
# After the drain timeout: time to send the last error events.
_FLUSH_S = 1.0
_ENGINE_GRACE_S = 5.0


def build_app(client: Client | None, options: ServerOptions) -> Starlette:
    """The ASGI application. Without a client it answers 503 until one is attached."""
    service = Service(options)
    if client is not None:
        service.attach(client)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start_pump()
        yield
        service.close()

    routes = _routes(service)
    middleware = [
        Middleware(StartQueueMiddleware, start_queue=service.start_queue),
        Middleware(RequestMiddleware, options=options),
    ]
    if options.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
        middleware.insert(0, cors)  # outermost, so that a browser can read refusals too
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: RouteErrors(options)},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _routes(service: Service) -> list[Route]:
    messages, responses = MessagesEndpoint(service), ResponsesEndpoint(service)
    handlers: dict[str, Handler] = {
        "chat": ChatEndpoint(service).post,
        "completions": CompletionEndpoint(service).post,
        "responses": responses.post,
        "messages": messages.post,
        "file": serve_page_file,
    }
    others = [make(service) for make in _ENDPOINTS]
    for endpoints in (messages, responses, *others):
        handlers |= {op.name: h for op in OPERATIONS if (h := getattr(endpoints, op.name, None))}
    by_path: dict[str, dict[str, Handler]] = {}
    for op in served_operations(page=service.options.page):
        by_path.setdefault(op.path, {})[op.method] = handlers[op.name]
    return [
        Route(path, _dispatch(by_method), methods=[*by_method])
        for path, by_method in by_path.items()
    ]


def _dispatch(by_method: dict[str, Handler]) -> Handler:
    """One route per path, so that a 405 names every method."""
    if len(by_method) == 1:
        return next(iter(by_method.values()))

    async def handle(request: Request) -> Any:
        method = "GET" if request.method == "HEAD" else request.method
        return await by_method[method](request)

    return handle


def run_server(
    client_factory: ClientFactory,
    options: ServerOptions,
    *,
    on_ready: OnReady | None = None,
) -> int:
    """Serve until a signal; returns the exit code. Must run in the main thread.

    `client_factory` loads the model in a thread while the server already answers /health; its
    errors are raised here. When the model is loaded, `on_ready` gets the URL and a command to try.
    A port in use raises PacelineError before anything is loaded. SIGTERM, SIGINT and SIGHUP drain
    the server; during loading they raise StoppedWhileLoading.
    """
    sock = bind(options)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_ServerRun(client_factory, options, on_ready).run(sock))
    finally:
        sock.close()


class _ServerRun:
    """One run of the server, from loading to exit."""

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
            logger.info("max_waiting is lowered to %d: `ulimit -n` allows no more", limit)
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
            # After a second signal, or after one during loading, open connections are cut.
            at_once = client is None or len(self._signals) > 1
            await server.stop(grace_s=0.0 if at_once else _FLUSH_S)
            service.close()
            if client is not None:
                client.close(0.0 if at_once else _ENGINE_GRACE_S)

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        self._wake.set()

    def _load(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Client]:
        """Run the factory in a daemon thread, which does not delay the exit of the process."""
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
            except RuntimeError:  # the loop is closed: a signal ended the run
                if client is not None:
                    client.close()

        threading.Thread(target=work, name="paceline-load", daemon=True).start()
        return future

    async def _await_client(self, loaded: asyncio.Future[Client]) -> Client:
        loaded.add_done_callback(lambda _: self._wake.set())
        while not loaded.done():
            await self._wake.wait()
            self._wake.clear()
            if self._signals:
                loaded.cancel()
                raise StoppedWhileLoading(self._signals[0])
        return loaded.result()

    async def _serve(self, service: Service) -> int:
        """Serve until a signal, then drain. Returns 1 if the engine dies."""
        while not self._signals and service.engine_error is None:
            await self._wake.wait()
            self._wake.clear()
        if service.engine_error is None:
            await self._drain(service)
        if service.engine_error is not None:
            await asyncio.sleep(0)  # the tasks of open requests send the error
            return 1
        return 130 if len(self._signals) > 1 else 0

    async def _drain(self, service: Service) -> None:
        limit_s = self._options.drain_timeout
        logger.info(
            "shutting down: %d open requests have %g s to finish; a second signal ends them now",
            len(service.jobs),
            limit_s,
        )
        service.drain()
        try:
            async with asyncio.timeout(limit_s):
                while service.jobs and len(self._signals) < 2 and service.engine_error is None:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            logger.warning("%d requests did not finish in time", len(service.jobs))
        if service.jobs and service.engine_error is None:
            service.fail_all(
                NotReady("The server is shutting down.", retry_after_s=DRAINING_RETRY_S)
            )
