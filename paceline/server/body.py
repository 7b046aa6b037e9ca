"""Reads request bodies, within limits: per request, all together, and in time. Never interprets.

Refuses what does not call itself JSON: a web page may send a form or plain text anywhere without
asking first, and a server on this machine must not work for whatever page is open in its browser.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from paceline.errors import Overloaded
from paceline.server.failures import CLIENT_CLOSED_REQUEST, HttpFailure
from paceline.server.fields import parse
from paceline.server.service import Service

T = TypeVar("T", bound=msgspec.Struct)

BODY_TIMEOUT_S = 60.0
# All bodies in memory at once, in multiples of the largest one.
_MAX_BODIES = 16
_MAX_SHOWN = 80


@asynccontextmanager
async def read_request(
    request: Request, service: Service, kind: type[T], *, num_sequences: int = 0
) -> AsyncIterator[tuple[T, int]]:
    """The typed request and the size of its body, which bounds the work that it can cause.

    Inside, its bytes count against what the server holds at once.
    """
    async with read_body(request, service, num_sequences=num_sequences) as body:
        yield await service.off_loop(len(body), lambda: parse(body, kind)), len(body)


@asynccontextmanager
async def read_body(
    request: Request, service: Service, *, num_sequences: int = 0
) -> AsyncIterator[bytes]:
    """The body, once it is this request's turn. Raises Overloaded where `num_sequences` more, the
    least that it will ask for, are too many: nothing is parsed then.
    """
    _check_kind(request.headers.get("content-type"), request.headers.get("content-encoding"))
    if num_sequences:
        service.check_room(num_sequences)
    limit = service.options.max_request_bytes
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and len(announced) < 20 and int(announced) > limit:
        raise _too_large(int(announced), limit)
    chunks: list[bytes] = []
    size = 0
    try:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    size += len(chunk)
                    service.body_bytes += len(chunk)
                    _check_sizes(size, limit, service.body_bytes)
                    chunks.append(chunk)
        except TimeoutError:
            message = f"The request body did not arrive within {BODY_TIMEOUT_S:.0f} s."
            raise HttpFailure(408, message) from None
        except ClientDisconnect:
            raise HttpFailure(CLIENT_CLOSED_REQUEST, "The client went away.") from None
        await service.turns.next(has_begun=True)
        if num_sequences:  # others have begun meanwhile
            service.check_room(num_sequences)
        yield b"".join(chunks)
    finally:
        service.forget_body(size)


def _check_kind(kind: str | None, encoding: str | None) -> None:
    media = (kind or "").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        said = f"request body is {media[:_MAX_SHOWN]!r}" if media else "request has no Content-Type"
        raise HttpFailure(
            415,
            f"The {said}; send JSON with the header 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )
    if encoding is not None and encoding.strip().lower() != "identity":
        raise HttpFailure(
            415,
            f"The request body is encoded as {encoding[:_MAX_SHOWN]!r}; send it as it is, without "
            "Content-Encoding.",
            code="unsupported_media_type",
        )


def _check_sizes(size: int, limit: int, of_all: int) -> None:
    if size > limit:
        raise _too_large(size, limit)
    if of_all > _MAX_BODIES * limit:
        raise Overloaded("Too many large requests arrive at once; try again later.")


def _too_large(size: int, limit: int) -> HttpFailure:
    return HttpFailure(
        413,
        f"The request body has {size} bytes or more; this server takes {limit} "
        "(--max-request-bytes).",
        code="request_too_large",
    )
