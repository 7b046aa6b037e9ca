"""Middleware around every request: origin check, API key, errors to replies, one log line.

Pure ASGI; never reads a body. What an endpoint raises becomes the API's error body here.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request

from paceline.errors import cut, nearest, shown
from paceline.observe.log import RequestLogger
from paceline.server.api_keys import Account, ApiKeys
from paceline.server.failures import CLIENT_CLOSED_REQUEST, Failure, HttpFailure, failure_of
from paceline.server.operations import PAGE_PATHS, is_not_built, served_operations
from paceline.server.options import ServerOptions
from paceline.server.origin_policy import OriginPolicy
from paceline.server.response_store import NO_KEY

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from paceline.server.job import Job

logger = logging.getLogger(__name__)

# Polled every few seconds, so successful requests to them are not logged.
_QUIET_PATHS = frozenset({"/health", "/readyz", "/metrics", "/version"})
# These need no key: orchestrators, scrapers and browsers have none.
OPEN_PATHS = _QUIET_PATHS | {"/", "/docs", "/openapi.json", *PAGE_PATHS}
_LOGGABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestMiddleware:
    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._keys = ApiKeys(options.api_key, options.api_key_file)
        self._origin_policy = OriginPolicy(options)
        self._logs = options.enable_request_logging

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        log = RequestLogger(logger, request_id)
        state = scope.setdefault("state", {})
        state["log"] = log
        started_s = time.monotonic()
        status = 0
        account: Account | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (b"x-request-id", request_id.encode())
                # Anthropic's clients read the second name.
                message["headers"] = [*message["headers"], own, (b"request-id", own[1])]
            await send(message)

        try:
            self._origin_policy.check(scope)
            account = self._account(scope)
            state["owner"] = NO_KEY if account is None else account.digest
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            failure = state["failure"] = failure_of(error)
            if failure.status == 500:
                log.exception("a request failed")
            if status:
                raise  # the status line was sent; the server closes the connection
            error.__traceback__ = None  # its frames refer to the job, which refers to the error
            await failure.response(scope["path"])(scope, receive, send_with_id)
        finally:
            if account is not None:
                job: Job | None = state.get("job")
                account.end(0 if job is None else job.usage().total_tokens)
            if self._logs:
                self._log(scope, status, time.monotonic() - started_s)

    def _log(self, scope: Scope, status: int, took_s: float) -> None:
        """One line: status, time, tokens of a generating request, and why a request failed."""
        state = scope["state"]
        failure: Failure | None = state.get("failure")
        job: Job | None = state.get("job")
        if failure is None and job is not None and job.error is not None:
            failure = failure_of(job.error)  # a stream that ended with an error event
        status = status or CLIENT_CLOSED_REQUEST  # nothing was sent: the client disconnected
        if scope["path"] in _QUIET_PATHS and (failure is None or failure.status == 503):
            return
        path = scope["raw_path"].decode("ascii", "backslashreplace")
        line = f"{scope['method']} {_printable(path)} {status} {took_s * 1000:.1f} ms"
        if job is not None:
            line += f" {job.log_summary()}"
        if "key_name" in state:
            line += f" key {state['key_name']}"
        if failure is None or failure.status == CLIENT_CLOSED_REQUEST:
            state["log"].info("%s", line)
        else:
            state["log"].warning("%s: %s", line, _printable(failure.detail.message))

    def _account(self, scope: Scope) -> Account | None:
        """Whose request it is; None if no key is needed. Raises a 401 or a 429."""
        if not self._keys.are_needed or scope["path"] in OPEN_PATHS:
            return None
        given = _given_key(Headers(scope=scope))
        scheme, _, token = given.partition(" ")
        account = self._keys.find(token.strip().encode("latin-1"))
        if account is not None and scheme.lower() == "bearer":
            scope["state"]["key_name"] = account.name
            account.begin(time.monotonic())
            return account
        client = scope.get("client")
        address = "a local socket" if client is None else client[0]
        said = "is wrong" if given else "is missing"
        # The audit line: who was refused, and never what was sent as a key.
        scope["state"]["log"].warning("refused %s: the API key %s", address, said)
        raise HttpFailure(
            401,
            f"The API key {said}; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
            kind="authentication_error",
            code="invalid_api_key",
            headers=(("WWW-Authenticate", "Bearer"), ("Connection", "close")),
        )


class RouteErrors:
    """Raises the router's 404 and 405 as HttpFailure; a 404 names the routes that exist."""

    def __init__(self, options: ServerOptions) -> None:
        served = served_operations(page=options.page)
        self._paths = list(dict.fromkeys(op.open_path for op in served))

    async def __call__(self, request: Request, error: Exception) -> NoReturn:
        assert isinstance(error, HTTPException)
        method, path = request.method, request.url.path
        status = 404 if is_not_built(path) else error.status_code
        if status == 404:
            message = _no_route(path, self._paths)
        elif status == 405:
            allowed = (error.headers or {}).get("Allow", "")
            message = f"{cut(path)} does not take {cut(method)}; use {allowed}."
            if method == "OPTIONS":  # a browser asks whether a web page may call
                message += " Start the server with --allowed-origins to let web pages call it."
        else:
            message = str(error.detail)
        code = "not_found" if status == 404 else None
        headers = tuple((error.headers or {}).items())
        raise HttpFailure(status, message, code=code, headers=headers)


def _given_key(headers: Headers) -> str:
    """The Authorization header. Anthropic's clients send the key alone, in x-api-key."""
    own = headers.get("x-api-key")
    return headers.get("authorization", f"Bearer {own}" if own else "")


def _no_route(path: str, paths: Sequence[str]) -> str:
    if is_not_built(path):
        return f"{shown(path)} is not built; this server only generates text. See /docs."
    # Routes have common prefixes, so the default cutoff would match unrelated ones.
    hint = nearest(path, paths, cutoff=0.8)
    return f"There is no {shown(path)}.{hint} The routes are: {', '.join(paths)}."


def _request_id(scope: Scope) -> str:
    """The client's X-Request-Id if it can be logged, else a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _LOGGABLE_ID.fullmatch(given) else f"req_{uuid4().hex}"


def _printable(text: str) -> str:
    """A client's text for a log line: short, and without control characters."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut(text))
