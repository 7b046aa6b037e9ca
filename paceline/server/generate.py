"""From a running job to HTTP: one whole reply, or a stream of events. Owns nobody's shapes.

Notices when the client goes away, and then stops the job. Never buffers: what a slow socket does
not take waits in the job, joined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import Response

from paceline.server.failures import CLIENT_CLOSED_REQUEST, failure_of
from paceline.server.job import Job, Piece
from paceline.server.replies import DONE_EVENT, PING_EVENT, Usage, to_event, to_json
from paceline.server.requests import GenerateFields
from paceline.server.service import Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

# A stream that has nothing to say says so, for proxies that give up on silent connections.
PING_INTERVAL_S = 15.0
_EARLY_ENDS = ("abort", "error")


class Shape(Protocol):
    """How one endpoint writes its answers."""

    def reply(self, job: Job, pieces: list[Piece]) -> Any:
        """The whole reply; every choice has exactly one piece."""

    def chunks(self, job: Job, piece: Piece, usage: Usage | None) -> Iterable[Any]:
        """Chunks for one piece of one choice; `usage` so far when each chunk shows it."""

    def usage_chunk(self, job: Job, usage: Usage) -> Any:
        """The last chunk, without choices."""


async def answer(request: Request, service: Service, job: Job, shape: Shape) -> Response:
    """Wait for all of it."""
    request.scope["state"]["job"] = job
    try:
        async with _watched(job, request.receive):
            await job.news()
        if job.gone:
            request.scope["state"]["log"].info("the client went away from %s", job.spec.id)
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if job.error is not None:
            raise job.error
        return json_response(shape.reply(job, job.take()))
    finally:
        service.end(job)


def json_response(reply: Any, status: int = 200) -> Response:
    return Response(to_json(reply), status, media_type="application/json")


class EventStream:
    """An ASGI response that writes pieces as they come."""

    def __init__(self, service: Service, job: Job, shape: Shape, request: GenerateFields) -> None:
        self._service = service
        self._job = job
        self._shape = shape
        options = request.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._every_usage = self._include_usage and bool(options and options.continuous_usage_stats)
        self._started = False
        self._silent = False  # nothing was sent since the last tick
        self._ticker: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["job"] = self._job
        self._tick()
        try:
            async with _watched(self._job, receive):
                await self._run(send)
        finally:
            if self._ticker is not None:
                self._ticker.cancel()
            self._service.end(self._job)
        if self._job.gone:
            scope["state"]["log"].info("the client went away from %s", self._job.spec.id)

    def _tick(self) -> None:
        if self._silent:
            self._job.poke()
        self._silent = True
        self._ticker = asyncio.get_running_loop().call_later(PING_INTERVAL_S, self._tick)

    async def _run(self, send: Send) -> None:
        job = self._job
        while True:
            await job.news()
            if job.gone:
                return
            if job.error is not None and not self._started:
                raise job.error  # there is still a status line to say it with
            body = b"".join(self._events(job.take()))
            if job.error is not None:
                await self._send(send, body + failure_of(job.error).event() + DONE_EVENT, last=True)
                return
            if job.finished:
                await self._send(send, body + self._ending(), last=True)
                return
            if body or job.take_poke():
                await self._send(send, body or PING_EVENT)

    def _events(self, pieces: list[Piece]) -> Iterable[bytes]:
        for piece in pieces:
            if piece.finish_reason in _EARLY_ENDS:
                piece.finish_reason = None  # an error event says it instead
            usage = self._job.usage() if self._every_usage else None
            for chunk in self._shape.chunks(self._job, piece, usage):
                yield to_event(chunk)

    def _ending(self) -> bytes:
        if not self._include_usage:
            return DONE_EVENT
        return to_event(self._shape.usage_chunk(self._job, self._job.usage())) + DONE_EVENT

    async def _send(self, send: Send, body: bytes, *, last: bool = False) -> None:
        if not self._started:
            self._started = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # nginx would hold events back
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._silent = False
        await send({"type": "http.response.body", "body": body, "more_body": not last})


@asynccontextmanager
async def _watched(job: Job, receive: Receive) -> AsyncIterator[None]:
    """Within it, `job.leave` is called when the client disconnects."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        job.leave()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
