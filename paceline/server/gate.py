"""The middleware that every request passes: doors, key, errors to replies, one log line.

Pure ASGI. Never reads a body. Whatever an endpoint raises ends here as OpenAI's error body.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING
from uuid import uuid4

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import cut, nearest, shown
from paceline.observe.log import RequestLogger
from paceline.server.doors import Doors
from paceline.server.failures import (
    CLIENT_CLOSED_REQUEST,
    INVALID,
    Failure,
    HttpFailure,
    failure_of,
)
from paceline.server.options import ServerOptions
from paceline.server.replies import ErrorDetail

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from paceline.server.job import Job

logger = logging.getLogger(__name__)

# Orchestrators and scrapers have no key.
OPEN_PATHS = frozenset({"/health", "/readyz", "/metrics", "/version"})
# Asked every few seconds by machines; their lines would bury the others.
_QUIET_PATHS = OPEN_PATHS
_FIT_FOR_LOGS = re.compile(r"[\x21-\x7e]{1,128}")
_MAX_LOGGED = 200


class Gate:
    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._key = options.api_key.encode() if options.api_key is not None else None
        self._doors = Doors(options)
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

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._doors.check(scope)
            self._check_key(scope)
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            failure = state["failure"] = failure_of(error)
            if failure.status == 500:
                log.exception("a request failed")
            if status:
                raise  # the reply has begun; closing the connection is all that is left
            await respond(failure, scope, receive, send_with_id)
        finally:
            if self._logs:
                self._log(scope, status, time.monotonic() - started_s)

    def _log(self, scope: Scope, status: int, took_s: float) -> None:
        """One line: why a request failed, and what one that generated has cost."""
        state = scope["state"]
        failure: Failure | None = state.get("failure")
        job: Job | None = state.get("job")
        if failure is None and job is not None and job.error is not None:
            failure = failure_of(job.error)  # a stream that ended with an error event
        status = status or CLIENT_CLOSED_REQUEST  # nothing was sent: the client had gone
        if scope["path"] in _QUIET_PATHS and (failure is None or failure.status == 503):
            return
        path = scope["raw_path"].decode("ascii", "backslashreplace")
        line = f"{scope['method']} {_cut(path)} {status} {took_s * 1000:.1f} ms"
        if job is not None:
            line += f" {job.account()}"
        if failure is None or failure.status == CLIENT_CLOSED_REQUEST:
            state["log"].info("%s", line)
        else:
            state["log"].warning("%s: %s", line, _cut(failure.detail.message))

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or scope["path"] in OPEN_PATHS:
            return
        given = _header(scope, b"authorization") or b""
        scheme, _, token = given.partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._key):
            return
        said = "is wrong" if given else "is missing"
        raise HttpFailure(
            401,
            f"The API key {said}; send it as 'Authorization: Bearer KEY'.",
            kind="authentication_error",
            code="invalid_api_key",
            headers=(("WWW-Authenticate", "Bearer"), ("Connection", "close")),
        )


async def respond(failure: Failure, scope: Scope, receive: Receive, send: Send) -> None:
    response = Response(failure.body(), failure.status, media_type="application/json")
    for name, value in failure.headers:
        response.headers[name] = value
    await response(scope, receive, send)


class RouteErrors:
    """404 and 405 of the router, in OpenAI's form and with the nearest route."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = list(paths)

    async def __call__(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        method, path = request.method, request.url.path
        if error.status_code == 404:
            # Routes begin alike, so that those of other servers look near.
            message = f"There is no {shown(path)}.{nearest(path, self._paths, cutoff=0.8)}"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            message = f"{cut(path)} does not take {cut(method)}; use {allowed}."
        else:
            message = str(error.detail)
        code = "not_found" if error.status_code == 404 else None
        detail = ErrorDetail(message=message, type=INVALID, code=code)
        headers = tuple((error.headers or {}).items())
        failure = request.scope["state"]["failure"] = Failure(error.status_code, detail, headers)
        response = Response(failure.body(), failure.status, media_type="application/json")
        response.headers.update(dict(failure.headers))
        return response


def _request_id(scope: Scope) -> str:
    """The client's X-Request-Id when it is fit for a log line, else a new one."""
    given = (_header(scope, b"x-request-id") or b"").decode("latin-1")
    return given if _FIT_FOR_LOGS.fullmatch(given) else f"req_{uuid4().hex}"


def _cut(text: str) -> str:
    """A client's text for a log line: short, and without control characters."""
    shown = text if len(text) <= _MAX_LOGGED else f"{text[:_MAX_LOGGED]}..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
