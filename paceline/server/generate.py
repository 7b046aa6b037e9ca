"""The path that every generating endpoint shares: parsed body, checked request, job, reply.

A new API adds a `GenerationEndpoint` (checks a body) and a `ReplyFormat` (writes replies, events).
When the client disconnects, its job ends. Output that a slow socket does not take waits in the job.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from uuid import uuid4

from starlette.responses import Response

from paceline.errors import InvalidRequest, shown
from paceline.request import SamplingParams
from paceline.server.body import read_request
from paceline.server.failures import CLIENT_CLOSED_REQUEST, Failure, failure_of
from paceline.server.fields import parse
from paceline.server.job import ChoiceDelta, Job, JobSpec
from paceline.server.params import client_names
from paceline.server.replies import to_json
from paceline.server.requests import GenerationBody
from paceline.server.service import Client, Service, TokenizedPrompt
from paceline.text.output_parts import OutputParser, PlainParser

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

Body = TypeVar("Body", bound=GenerationBody)

# A silent stream sends a ping this often.
PING_INTERVAL_S = 15.0
STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would hold events back
    ],
}
_EARLY_ENDS = ("abort", "error")


class ReplyFormat(Protocol):
    """How one API writes its answers."""

    def reply(self, job: Job, deltas: list[ChoiceDelta]) -> Any:
        """The whole reply, as an object to encode. Each choice has exactly one delta."""

    def events(self, job: Job, delta: ChoiceDelta) -> Iterable[bytes]:
        """Server-sent events for new output of one choice."""

    def ping_events(self, job: Job) -> bytes:
        """Sent while there is no new output, because proxies close silent connections."""

    def last_events(self, job: Job) -> bytes:
        """The end of a stream whose choices have all finished."""

    def error_events(self, failure: Failure) -> bytes:
        """The end of a stream that fails after its status line was sent."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that can be submitted, and how its reply is written."""

    prompts: Sequence[TokenizedPrompt]
    params: SamplingParams
    reply_format: ReplyFormat
    priority: int = 0
    prompt_only: bool = False  # see JobSpec
    make_parser: Callable[[], OutputParser] = PlainParser  # one for each choice
    field_names: Mapping[str, str] | None = None  # of a request that was translated


class GenerationEndpoint(ABC, Generic[Body]):
    """One route that generates text."""

    body_type: type[Body]
    id_prefix: str

    def __init__(self, service: Service) -> None:
        self._service = service

    @abstractmethod
    async def check(self, client: Client, body: Body, size: int, owner: bytes) -> CheckedRequest:
        """Check and tokenise a parsed body of `size` bytes, and release its prompt.

        `owner` is whose stored responses it may use.
        """

    def field_names(self, body: Body) -> Mapping[str, str]:
        """Fields of SamplingParams that have another name in this API -> that name."""
        has_format = getattr(body, "response_format", None) is not None
        return {"structured_outputs": "response_format"} if has_format else {}

    async def post(self, request: Request) -> Response | EventStream:
        service = self._service
        client = service.client  # raises before the body is read if the server cannot answer
        parsed = partial(parse, kind=self.body_type)
        async with read_request(request, service, parsed, num_sequences=1) as (body, size):
            arrival_s = time.monotonic()
            model = service.resolve_model(body.model)
            with client_names(self.field_names(body)):
                checked = await self.check(client, body, size, owner_of(request))
            spec = JobSpec(
                id=f"{self.id_prefix}{uuid4().hex}",
                model=model,
                created=int(time.time()),
                arrival_s=arrival_s,
                num_prompts=len(checked.prompts),
                n=checked.params.n,
                stream=bool(body.stream),
                needs_prompt_logprobs=checked.params.prompt_logprobs is not None,
                prompt_only=checked.prompt_only,
                wants_sources=bool(getattr(body, "return_token_sources", None)),
                replica=_asked_replica(request.headers.get("x-data-parallel-rank")),
                field_names=checked.field_names or self.field_names(body),
            )
            with client_names(spec.field_names):
                job = service.submit(spec, checked.prompts, checked.params, checked.priority)
        if spec.stream:
            return EventStream(service, job, checked.reply_format)
        return await _whole_reply(request, service, job, checked.reply_format)


def owner_of(request: Request) -> bytes:
    """Identifies the API key of a request. See response_store."""
    owner: bytes = request.scope["state"]["owner"]
    return owner


def _asked_replica(value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 8):
        raise InvalidRequest(
            f"X-data-parallel-rank is {shown(value)}; it must be the number of a replica.",
            param="X-data-parallel-rank",
        )
    return int(value)


async def _whole_reply(
    request: Request, service: Service, job: Job, reply_format: ReplyFormat
) -> Response:
    request.scope["state"]["job"] = job
    try:
        async with disconnect_watched(job.disconnect, request.receive):
            while not job.is_over:
                await job.wait()
        if job.is_disconnected:
            request.scope["state"]["log"].info("the client disconnected from %s", job.spec.id)
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if job.error is not None:
            raise job.error
        return json_response(reply_format.reply(job, job.take()))
    finally:
        service.end(job)


def json_response(reply: Any, status: int = 200) -> Response:
    return Response(to_json(reply), status, media_type="application/json")


class EventStream:
    """An ASGI response that sends output as it comes."""

    def __init__(self, service: Service, job: Job, reply_format: ReplyFormat) -> None:
        self._service = service
        self._job = job
        self._format = reply_format
        self._started = False
        self._silent = False  # nothing was sent since the last tick
        self._is_ping_due = False
        self._ticker: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["job"] = self._job
        self._tick()
        try:
            async with disconnect_watched(self._job.disconnect, receive):
                await self._run(send)
        finally:
            if self._ticker is not None:
                self._ticker.cancel()
            self._service.end(self._job)
        if self._job.is_disconnected:
            scope["state"]["log"].info("the client disconnected from %s", self._job.spec.id)

    def _tick(self) -> None:
        if self._silent:
            self._is_ping_due = True
            self._job.wake()
        self._silent = True
        self._ticker = asyncio.get_running_loop().call_later(PING_INTERVAL_S, self._tick)

    async def _run(self, send: Send) -> None:
        job = self._job
        while True:
            await job.wait()
            if job.is_disconnected:
                return
            if job.error is not None and not self._started:
                raise job.error  # the status line can still carry it
            body = b"".join(self._events(job.take()))
            if job.error is not None:
                body += self._format.error_events(failure_of(job.error))
                await self._send(send, body, last=True)
                return
            if job.finished:
                await self._send(send, body + self._format.last_events(job), last=True)
                return
            if body or self._is_ping_due:
                await self._send(send, body or self._format.ping_events(job))

    def _events(self, deltas: list[ChoiceDelta]) -> Iterable[bytes]:
        for delta in deltas:
            if delta.finish_reason in _EARLY_ENDS:
                delta.finish_reason = None  # the error event replaces it
            yield from self._format.events(self._job, delta)

    async def _send(self, send: Send, body: bytes, *, last: bool = False) -> None:
        if not self._started:
            self._started = True
            await send(dict(STREAM_START))
        self._silent = self._is_ping_due = False
        await send({"type": "http.response.body", "body": body, "more_body": not last})


@asynccontextmanager
async def disconnect_watched(
    on_disconnect: Callable[[], None], receive: Receive
) -> AsyncIterator[None]:
    """Within the block, `on_disconnect` is called when the client disconnects."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_disconnect()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
