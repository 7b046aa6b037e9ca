"""The requests the scheduler looks after, and the order in which they wait.

Never plans: it keeps the record of a request from add to its end, and a heap of who waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from paceline.request import EngineRequest
from paceline.scheduler.events import TokenConstraint
from paceline.step import Ints

Key = tuple[int, int]  # smaller runs first


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request from add to its end. `slot` is -1 while it waits."""

    request: EngineRequest
    key: Key
    tokens: Ints  # prompt, and after a preemption the output so far; a running one's are by slot
    prompt_len: int
    max_len: int
    constraint: TokenConstraint | None = None
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    most_pages: int = 0  # that it may ever need
    num_freed: int = 0  # first pages that it gave back: behind the window
    num_launched: int = 0  # prefill progress: positions computed by launched steps, or cached
    num_hashed: int = 0  # first pages known to the prefix cache, and their chain value
    chain: int = 0
    # After a preemption: rows launched before it whose results are still to come, and what
    # they brought. The request is not resumed before they are all there.
    num_draining: int = 0
    drained: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)  # on the device now; known for constraints only
    # prompt_logprobs: first position of each chunk in flight by step, and positions delivered.
    chunk_starts: dict[int, int] = field(default_factory=dict)
    num_prompt_logprobs: int = 0

    @property
    def uid(self) -> int:
        return self.request.uid

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.params.prompt_logprobs is not None

    def absorb_drained(self) -> None:
        """Append what arrived after the preemption; the request may run again."""
        assert self.num_draining == 0
        if self.drained:
            self.tokens = np.concatenate([self.tokens, np.asarray(self.drained, np.int32)])
            self.drained.clear()


class WaitingQueue:
    """Requests by key. Ended ones are dropped when they surface."""

    def __init__(self, is_waiting: Callable[[int], LiveRequest | None]) -> None:
        self._is_waiting = is_waiting
        self._heap: list[tuple[Key, int]] = []
        self.count = 0  # of those that still wait

    def push(self, live: LiveRequest) -> None:
        if len(self._heap) > 64 + 2 * self.count:
            self._heap = [entry for entry in self._heap if self._is_waiting(entry[1])]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (live.key, live.uid))
        self.count += 1

    def head(self) -> LiveRequest | None:
        while self._heap:
            live = self._is_waiting(self._heap[0][1])
            if live is not None:
                return live
            heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        heapq.heappop(self._heap)
        self.count -= 1

    def left(self) -> None:
        """A waiting request ended; its entry surfaces later."""
        self.count -= 1
