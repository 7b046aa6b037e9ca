"""The order in which requests wait for a slot.

A heap of uids; it never looks at slots or pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from paceline.scheduler.live_request import Key, LiveRequest


class WaitingQueue:
    """Waiting requests by key.

    The entry of a request that ended while it waited stays in the heap and is dropped when it
    reaches the top.
    """

    def __init__(self, requests: Mapping[int, LiveRequest]) -> None:
        self._requests = requests  # every unfinished request by uid, running ones too
        self._heap: list[tuple[Key, int]] = []
        self.count = 0  # requests that wait, without stale entries

    def push(self, live: LiveRequest) -> None:
        if len(self._heap) > 64 + 2 * self.count:
            self._heap = [entry for entry in self._heap if self._waiting(entry[1])]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (live.key, live.uid))
        self.count += 1

    def head(self) -> LiveRequest | None:
        while self._heap:
            live = self._waiting(self._heap[0][1])
            if live is not None:
                return live
            heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        """Remove the head."""
        heapq.heappop(self._heap)
        self.count -= 1

    def discard(self) -> None:
        """A waiting request ended; its entry is dropped later."""
        self.count -= 1

    def _waiting(self, uid: int) -> LiveRequest | None:
        live = self._requests.get(uid)
        return live if live is not None and live.slot < 0 else None
