"""Spreads requests that arrive together over turns of the event loop. Never looks into them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from paceline.server.gate import OPEN_PATHS

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class Turns:
    """Lets one request go on per turn of the event loop, in the order in which they came.

    Thousands that arrive at once would otherwise all be prepared within one turn, and until then
    the loop would read no socket: no /health, and no token of a running stream.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False  # this turn

    async def next(self, *, has_begun: bool = False) -> None:
        """Return at once when this turn is free, else in a later one.

        A request that has begun comes before those that have not.
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


class TakesTurns:
    """Middleware: each request waits for its turn, but /health and the like never do."""

    def __init__(self, app: ASGIApp, turns: Turns) -> None:
        self._app = app
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            await self._turns.next()
        await self._app(scope, receive, send)
