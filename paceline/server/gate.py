"""The middleware that every request passes: id, key, errors to replies, one log line. Pure ASGI.

Never reads a body. Whatever an endpoint raises ends here as OpenAI's error body.
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

from paceline.errors import PacelineError, nearest
from paceline.observe.log import RequestLogger
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

logger = logging.getLogger(__name__)

# Orchestrators and scrapers have no key.
OPEN_PATHS = frozenset({"/health", "/readyz", "/metrics", "/version"})
# Asked every few seconds by machines; their lines would bury the others.
_QUIET_PATHS = OPEN_PATHS
_FIT_FOR_LOGS = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._key = options.api_key.encode() if options.api_key is not None else None
        self._logs = options.enable_request_logging

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        log = RequestLogger(logger, request_id)
        scope.setdefault("state", {})["log"] = log
        started_s = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._check_key(scope)
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if not isinstance(error, PacelineError):
                log.exception("a request failed")
            if status:
                raise  # the reply has begun; closing the connection is all that is left
            await respond(failure_of(error), scope, receive, send_with_id)
        finally:
            if self._logs and scope["path"] not in _QUIET_PATHS:
                took_ms = (time.monotonic() - started_s) * 1000
                # Without a status nobody was left to send one to.
                shown = status or CLIENT_CLOSED_REQUEST
                job = scope["state"].get("job_id", "")
                log.info("%s %s %d %.1f ms %s", scope["method"], scope["path"], shown, took_ms, job)

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
            headers=(("WWW-Authenticate", "Bearer"),),
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
            message = f"There is no {path!r}.{nearest(path, self._paths, cutoff=0.8)}"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            message = f"{path} does not take {method}; use {allowed}."
        else:
            message = str(error.detail)
        code = "not_found" if error.status_code == 404 else None
        detail = ErrorDetail(message=message, type=INVALID, code=code)
        headers = tuple((error.headers or {}).items())
        failure = Failure(error.status_code, detail, headers)
        response = Response(failure.body(), failure.status, media_type="application/json")
        response.headers.update(dict(failure.headers))
        return response


def _request_id(scope: Scope) -> str:
    """The client's X-Request-Id when it is fit for a log line, else a new one."""
    given = (_header(scope, b"x-request-id") or b"").decode("latin-1")
    return given if _FIT_FOR_LOGS.fullmatch(given) else f"req_{uuid4().hex}"


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
