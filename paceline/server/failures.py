"""Errors to HTTP: which status, which of OpenAI's error bodies. The one place that decides.

Never logs and never sends; what is not a Paceline error becomes a 500 that hides its insides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import EngineDead, InvalidRequest, NotFound, Overloaded, PacelineError
from paceline.server.replies import ErrorDetail, ErrorReply, to_event, to_json

INVALID = "invalid_request_error"
CLIENT_CLOSED_REQUEST = 499  # for logs: nobody reads it
_MAX_REASON = 200
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/'\"]+/)+")  # of an absolute path


class HttpFailure(PacelineError):
    """An error of HTTP itself; the tree of paceline.errors has no place for these."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.headers = headers


class NotReady(PacelineError):
    """Loading, draining or shutting down: nothing is wrong with the request."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GenerationFailed(PacelineError):
    """The engine gave up on one request and lives on."""


@dataclass(frozen=True)
class Failure:
    """What a client is told."""

    status: int
    detail: ErrorDetail
    headers: tuple[tuple[str, str], ...] = ()

    def body(self) -> bytes:
        return to_json(ErrorReply(self.detail))

    def event(self) -> bytes:
        """For a stream whose status line has gone out."""
        return to_event(ErrorReply(self.detail))


def failure_of(error: Exception) -> Failure:
    detail = ErrorDetail(message=str(error), type=INVALID)
    if isinstance(error, HttpFailure):
        detail.type, detail.code = error.kind, error.code
        return Failure(error.status, detail, error.headers)
    if isinstance(error, InvalidRequest):
        detail.param, detail.code = error.param, error.code
        return Failure(400, detail)
    if isinstance(error, NotFound):
        detail.param, detail.code = error.param, error.code
        return Failure(404, detail)
    if isinstance(error, Overloaded):
        detail.type, detail.code = "rate_limit_error", "rate_limit_exceeded"
        return Failure(429, detail, _retry(error.retry_after_s))
    if isinstance(error, NotReady):
        detail.type, detail.code = "service_unavailable_error", "not_ready"
        return Failure(503, detail, _retry(error.retry_after_s))
    if isinstance(error, EngineDead):
        detail.type, detail.code = "service_unavailable_error", "engine_dead"
        detail.message = f"The engine has stopped; the server's log says why. {_short(error)}"
        return Failure(503, detail)
    detail.type = "server_error"
    if not isinstance(error, PacelineError):
        detail.message = "The server failed on this request; its log says why."
    return Failure(500, detail)


def _short(error: EngineDead) -> str:
    """The first line of the reason. What follows are places in files, which are for the log."""
    line = _FOLDERS.sub("", str(error).partition("\n")[0])
    return line if len(line) <= _MAX_REASON else f"{line[:_MAX_REASON]}..."


def _retry(seconds: int) -> tuple[tuple[str, str], ...]:
    return (("Retry-After", str(seconds)),)
