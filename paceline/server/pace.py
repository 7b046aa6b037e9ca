"""How fast sequences end while others wait, and from that when a refused client may try again."""

from __future__ import annotations

import math
from collections import deque

LEAST_RETRY_S, MOST_RETRY_S = 1, 600
_MOST_ENDS = 256  # the newest; older ones say little of the present


class Pace:
    """Ends of sequences since `restart`."""

    def __init__(self) -> None:
        self._begin_s: float | None = None
        self._ends: deque[tuple[float, int]] = deque(maxlen=_MOST_ENDS)  # when, how many

    def restart(self, now_s: float) -> None:
        """No sequence waits: what ended before says how many came, not how fast they are done."""
        self._begin_s = now_s
        self._ends.clear()

    def end(self, num_sequences: int, now_s: float) -> None:
        """Sequences have ended by themselves."""
        if len(self._ends) == _MOST_ENDS:
            self._begin_s = self._ends[0][0]  # the ends that stay came after this one
        self._ends.append((now_s, num_sequences))

    def retry_after_s(self, num_open: int, now_s: float) -> int:
        """How long `num_open` sequences take at this pace; before the first end: as long again as
        they have taken so far."""
        seconds = 0.0 if self._begin_s is None else now_s - self._begin_s
        num_ended = sum(count for _, count in self._ends)
        if num_ended:
            seconds *= num_open / num_ended
        return min(max(math.ceil(seconds), LEAST_RETRY_S), MOST_RETRY_S)
