"""Estimates when a refused client may try again, from the rate at which sequences end."""

from __future__ import annotations

import math
from collections import deque

LEAST_RETRY_S, MOST_RETRY_S = 1, 600
_MOST_ENDS = 256  # the newest; older ones do not show the present rate


class RetryEstimate:
    """Counts ended sequences since `restart`."""

    def __init__(self) -> None:
        self._begin_s: float | None = None
        self._ends: deque[tuple[float, int]] = deque(maxlen=_MOST_ENDS)  # when, how many

    def restart(self, now_s: float) -> None:
        """No sequence waits. Earlier ends show the arrival rate, not the service rate."""
        self._begin_s = now_s
        self._ends.clear()

    def end(self, num_sequences: int, now_s: float) -> None:
        """Sequences have finished (not aborted)."""
        if len(self._ends) == _MOST_ENDS:
            self._begin_s = self._ends[0][0]  # the ends that stay came after this one
        self._ends.append((now_s, num_sequences))

    def seconds_for(self, num_sequences: int, now_s: float) -> float:
        """Seconds until this many sequences end at this rate.

        Before the first end, it is the time that they have taken so far.
        """
        seconds = 0.0 if self._begin_s is None else now_s - self._begin_s
        num_ended = sum(count for _, count in self._ends)
        return seconds * num_sequences / num_ended if num_ended else seconds

    def retry_after_s(self, num_open: int, now_s: float) -> int:
        """The same in whole seconds, for a header."""
        seconds = math.ceil(self.seconds_for(num_open, now_s))
        return min(max(seconds, LEAST_RETRY_S), MOST_RETRY_S)
