"""Maps errors to an HTTP status and an error body, OpenAI's or Anthropic's. No other module does.

An error that is not a PacelineError becomes a 500 without details; the log has them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.responses import Response

from paceline.errors import EngineDead, InvalidRequest, NotFound, Overloaded, PacelineError, cut
from paceline.server.replies import (
    AnthropicError,
    AnthropicErrorDetail,
    ErrorDetail,
    ErrorReply,
    to_json,
)

INVALID = "invalid_request_error"
CLIENT_CLOSED_REQUEST = 499  # only for logs: the client has disconnected
# Routes below this one are Anthropic's.
MESSAGES_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/'\"]+/)+")  # of an absolute path


class HttpFailure(PacelineError):
    """An error of the HTTP layer itself, such as a wrong Content-Type."""

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
    """The server is loading or draining. The request may be valid."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GenerationFailed(PacelineError):
    """The engine ended this request early; other requests go on."""


@dataclass(frozen=True)
class Failure:
    """The error reply to a client."""

    status: int
    detail: ErrorDetail
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def reply(self) -> ErrorReply:
        return ErrorReply(self.detail)

    @property
    def anthropic_reply(self) -> AnthropicError:
        """Anthropic's error has no field for `param`, so the message names it."""
        message, param = self.detail.message, self.detail.param
        if param is not None and param not in message:
            message = f"{param}: {message}"
        usual = "api_error" if self.status >= 500 else INVALID
        return AnthropicError(
            error=AnthropicErrorDetail(_ANTHROPIC_TYPES.get(self.status, usual), message)
        )

    def response(self, path: str) -> Response:
        """In the form of the API that `path` belongs to."""
        is_anthropic = path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
        body = to_json(self.anthropic_reply if is_anthropic else self.reply)
        return Response(body, self.status, dict(self.headers), "application/json")


def failure_of(error: Exception) -> Failure:
    detail = ErrorDetail(message=str(error), type=INVALID)
    if isinstance(error, HttpFailure):
        detail.type, detail.code = error.kind, error.code
        return Failure(error.status, detail, error.headers)
    if isinstance(error, InvalidRequest | NotFound):
        detail.param, detail.code = error.param, error.code
        return Failure(404 if isinstance(error, NotFound) else 400, detail)
    if isinstance(error, Overloaded):
        detail.type, detail.code = "rate_limit_error", "rate_limit_exceeded"
        return Failure(429, detail, _retry(error.retry_after_s))
    if isinstance(error, NotReady):
        detail.type, detail.code = "service_unavailable_error", "not_ready"
        return Failure(503, detail, _retry(error.retry_after_s))
    if isinstance(error, EngineDead):
        detail.type, detail.code = "service_unavailable_error", "engine_dead"
        detail.message = (
            f"The engine has stopped; the server's log says why. {short_reason(str(error))}"
        )
        return Failure(503, detail)
    detail.type = "server_error"
    if not isinstance(error, PacelineError):
        detail.message = "The server failed on this request; its log says why."
    return Failure(500, detail)


def short_reason(reason: str) -> str:
    """The first line of why an engine ended, without folders. The log has the traceback."""
    return cut(_FOLDERS.sub("", reason.partition("\n")[0]))


def _retry(seconds: int) -> tuple[tuple[str, str], ...]:
    return (("Retry-After", str(seconds)),)
