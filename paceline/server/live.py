"""GET /v1/live: what the engine does now, a few times per second, for the page.

The engine records its steps while there is a viewer. All viewers get the same frames. Without one
nothing is recorded and no timer runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from paceline.engine.stats import EngineStats
from paceline.errors import Overloaded, PacelineError
from paceline.observe.trace import LANES, chrome_trace, newest_spans, unpack_spans
from paceline.server.generate import STREAM_START, disconnect_watched, json_response
from paceline.server.replies import to_event
from paceline.server.service import Client, Service, State

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

MAX_VIEWERS = 8
INTERVAL_S = 0.25
# Spans of one replica in one frame, and bytes of packed spans that are kept for /v1/live/trace.
MOST_SPANS = 600
MOST_BYTES = 4 << 20
_RETRY_S = 5


class LiveRank(msgspec.Struct, kw_only=True):
    """One data-parallel rank. A span is [lane, step, start in µs, length in µs]."""

    rank: int
    num_running: int = 0
    kv_usage: float = 0.0
    spans: list[tuple[int, int, float, float]] = []


class LiveFrame(msgspec.Struct, kw_only=True):
    """The load now, totals since the start, and the spans since the frame before.

    A histogram is a list of [upper bound in seconds, number of values up to it].
    """

    time_s: float
    lanes: tuple[str, ...]
    max_drafts: int  # the most drafts of a step; 0: the server has no drafter
    num_running: int
    num_waiting: int
    kv_usage: float
    num_steps: int
    bubble_s: float
    busy_s: float
    num_generated_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_forced_tokens: int
    accepted_per_position: list[int]
    time_to_first_token: list[tuple[str, int]]
    inter_token_latency: list[tuple[str, int]]
    ranks: list[LiveRank]


_STATS = [
    name
    for name in LiveFrame.__struct_fields__
    if hasattr(EngineStats(), name) and name != "ranks"  # which are made from the newest steps
]


class LiveFeed:
    """Makes a frame every INTERVAL_S while there are viewers, and records for them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._viewers: set[_Viewer] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._fresh: dict[int, bytes] = {}  # packed spans since the last frame, by replica
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_kept_bytes = 0
        self._num_steps = -1  # of the engine, when it was last asked for spans

    def add(self, viewer: _Viewer) -> None:
        client = self._service.client  # raises if the server is not ready
        if len(self._viewers) >= MAX_VIEWERS:
            raise Overloaded(
                f"{MAX_VIEWERS} viewers read /v1/live, which is the limit. Close one of them.",
                retry_after_s=_RETRY_S,
            )
        if not self._viewers:
            client.on_trace = self.take_spans
            client.start_trace()
            self._kept.clear()
            self._num_kept_bytes, self._num_steps = 0, -1
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._tick)
        self._viewers.add(viewer)
        viewer.show(to_event(self.frame(client)))

    def remove(self, viewer: _Viewer) -> None:
        self._viewers.discard(viewer)
        if self._viewers or self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        with contextlib.suppress(PacelineError):  # the server stops, or the engine has died
            self._service.client.read_trace(stop=True)

    def recorded(self) -> list[tuple[int, bytes]]:
        return list(self._kept)

    def _tick(self) -> None:
        service = self._service
        if service.state is not State.READY:
            for viewer in self._viewers:
                viewer.end()
            self._timer = None
            return
        client = service.client
        event = to_event(self.frame(client))
        for viewer in self._viewers:
            viewer.show(event)
        if client.stats.num_steps != self._num_steps:  # an idle engine is not woken
            self._num_steps = client.stats.num_steps
            with contextlib.suppress(PacelineError):  # `pump` reports it
                client.read_trace()
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._tick)

    def take_spans(self, replica: int, spans: bytes) -> None:
        if not spans:
            return
        self._fresh[replica] = spans
        self._kept.append((replica, spans))
        self._num_kept_bytes += len(spans)
        while self._num_kept_bytes > MOST_BYTES and len(self._kept) > 1:
            self._num_kept_bytes -= len(self._kept.popleft()[1])

    def frame(self, client: Client) -> LiveFrame:
        stats, latencies = client.stats, self._service.metrics.latencies
        fresh, self._fresh = self._fresh, {}
        ranks = []
        for rank in range(stats.num_replicas):
            shown = LiveRank(rank=rank, spans=_packed_to_us(fresh.get(rank, b"")))
            if (newest := stats.newest.get(rank)) is not None:
                shown.num_running, shown.kv_usage = newest.num_running, newest.kv_usage
            ranks.append(shown)
        return LiveFrame(
            time_s=time.monotonic(),
            lanes=LANES,
            max_drafts=client.info.max_k,
            **{name: getattr(stats, name) for name in _STATS},
            time_to_first_token=list(latencies.time_to_first_token.buckets()),
            inter_token_latency=list(latencies.inter_token_latency.buckets()),
            ranks=ranks,
        )


def _packed_to_us(packed: bytes) -> list[tuple[int, int, float, float]]:
    return [
        (
            LANES.index(span.lane),
            span.step,
            round(span.start_s * 1e6, 1),
            round((span.end_s - span.start_s) * 1e6, 1),
        )
        for span in unpack_spans(newest_spans(packed, MOST_SPANS))
    ]


class _Viewer:
    """One connection. It holds the newest frame only, so a slow reader misses frames."""

    def __init__(self) -> None:
        self._event: bytes | None = None
        self._is_over = False
        self._wake = asyncio.Event()

    def show(self, event: bytes) -> None:
        self._event = event
        self._wake.set()

    def end(self) -> None:
        self._is_over = True
        self._wake.set()

    async def next(self) -> bytes | None:
        """None: the stream ends."""
        await self._wake.wait()
        self._wake.clear()
        return None if self._is_over else self._event


class _LiveStream:
    """An ASGI response."""

    def __init__(self, feed: LiveFeed, viewer: _Viewer) -> None:
        self._feed = feed
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        viewer = self._viewer
        try:
            async with disconnect_watched(viewer.end, receive):
                await send(dict(STREAM_START))
                while (event := await viewer.next()) is not None:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._feed.remove(viewer)


class LiveEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._feed = LiveFeed(service)

    async def live(self, request: Request) -> _LiveStream | Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        viewer = _Viewer()
        self._feed.add(viewer)
        return _LiveStream(self._feed, viewer)

    async def trace(self, request: Request) -> Response:
        recorded, model = self._feed.recorded(), {"model": self._service.model_names[0]}

        def build() -> Response:
            spans = [span for replica, packed in recorded for span in unpack_spans(packed, replica)]
            return json_response(chrome_trace(spans, model))

        return await self._service.off_loop(sum(len(packed) for _, packed in recorded), build)
