"""Starts requests that arrive together one per iteration of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from paceline.server.middleware import OPEN_PATHS

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class StartQueue:
    """Lets one request continue per iteration of the event loop, first come, first served.

    Otherwise thousands of requests could be prepared within one iteration. Until its end the loop
    would read no socket, so /health and running streams would wait.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False  # the current iteration

    async def wait_turn(self, *, has_begun: bool = False) -> None:
        """Return now if the current iteration is free, else in a later one.

        A request that has begun goes before requests that have not.
        """
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._pass_on)
            return
        future = loop.create_future()
        if has_begun:
            self._waiting.appendleft(future)
        else:
            self._waiting.append(future)
        await future

    def _pass_on(self) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():  # else its request was cancelled
                future.set_result(None)
                asyncio.get_running_loop().call_soon(self._pass_on)
                return
        self._is_taken = False


class StartQueueMiddleware:
    """Each request waits for its turn; /health, /metrics and other open paths do not."""

    def __init__(self, app: ASGIApp, start_queue: StartQueue) -> None:
        self._app = app
        self._start_queue = start_queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            await self._start_queue.wait_turn()
        await self._app(scope, receive, send)
