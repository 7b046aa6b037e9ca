"""Reads request bodies, with limits on the size of one, the size of all, and the time.

Only JSON content types are accepted: a web page may send forms or plain text to any address
without a CORS preflight, and an open page must not use a server on the same machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from paceline.errors import Overloaded, shown
from paceline.server.failures import CLIENT_CLOSED_REQUEST, HttpFailure
from paceline.server.service import Service

T = TypeVar("T")

BODY_TIMEOUT_S = 60.0
# Limit of all bodies in memory, in multiples of the limit of one.
_MAX_BODIES = 16


@asynccontextmanager
async def read_request(
    request: Request, service: Service, parse: Callable[[bytes], T], *, num_sequences: int = 0
) -> AsyncIterator[tuple[T, int]]:
    """The typed request and the size of its body, which bounds the work that it can cause.

    Within the block its bytes count against the limit of all bodies. Raises Overloaded if the
    server has no room for `num_sequences` more, before anything is parsed.
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
                    if size > limit:
                        raise _too_large(size, limit)
                    if service.body_bytes > _MAX_BODIES * limit:
                        raise Overloaded("Too many large requests are being read; try again later.")
                    chunks.append(chunk)
        except TimeoutError:
            message = f"The request body did not arrive within {BODY_TIMEOUT_S:.0f} s."
            raise HttpFailure(408, message) from None
        except ClientDisconnect:
            raise HttpFailure(CLIENT_CLOSED_REQUEST, "The client disconnected.") from None
        await service.start_queue.wait_turn(has_begun=True)
        if num_sequences:  # other requests may have taken the room since
            service.check_room(num_sequences)
        body = b"".join(chunks)
        yield await service.off_loop(size, lambda: parse(body)), size
    finally:
        service.release_body(size)


def _check_kind(kind: str | None, encoding: str | None) -> None:
    media = (kind or "").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        said = f"request body is {shown(media)}" if media else "request has no Content-Type"
        raise HttpFailure(
            415,
            f"The {said}; send JSON with the header 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )
    if encoding is not None and encoding.strip().lower() != "identity":
        raise HttpFailure(
            415,
            f"The request body is encoded as {shown(encoding)}; send it without Content-Encoding.",
            code="unsupported_media_type",
        )


def _too_large(size: int, limit: int) -> HttpFailure:
    return HttpFailure(
        413,
        f"The request body has at least {size} bytes; the limit is {limit} (--max-request-bytes).",
        code="request_too_large",
    )
