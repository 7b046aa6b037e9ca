"""Heartbeats: every rank counts up a number in shared memory, and watches its own loop.

The front reads these numbers and kills a rank whose number stays the same. A watcher counts time
only while it runs itself: if its process is stopped, no time passes.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from paceline.errors import EngineDead

# Order of detection: a wait between ranks times out, and its report says where each rank was; a
# rank reports its own stuck loop; the front kills a rank without heartbeats. A check is up to two
# ticks late, so all are within the timeout and 1.5 s.
_LOOP_GRACE_S = 0.5
_FRONT_GRACE_S = 1.0
_LONGEST_TICK_S = 0.25
_TICKS = 8  # checks per timeout
# A loop that computes (a long prompt on a CPU, compilation of a kernel) gets this many timeouts.
# It computes if its process had more than this share of a core over the whole timeout: other
# threads, such as the one that reads messages, compute for a moment now and then.
_WORKING_TIMEOUTS = 30
_WORKING = 0.05


class Beats:
    """One number for each rank, counted up by its process."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        try:
            os.posix_fallocate(fd, 0, 8 * num_ranks)
        except OSError as error:
            raise EngineDead(
                f"{8 * num_ranks} bytes of shared memory could not be allocated: {error.strerror}."
            ) from error
        self.counts = memoryview(mmap.mmap(fd, 8 * num_ranks)).cast("q")


class Stillness:
    """How long a value has been the same. `look` is called every `tick_s` seconds."""

    def __init__(self, tick_s: float) -> None:
        self._longest_s = 2 * tick_s
        self._value: object = None
        self._looked_s = time.monotonic()
        self.lasted_s = 0.0

    def look(self, value: object) -> float:
        now_s = time.monotonic()
        # If much more time has passed, this process was stopped: count two ticks at most.
        passed_s = min(now_s - self._looked_s, self._longest_s)
        self._looked_s = now_s
        self.lasted_s = self.lasted_s + passed_s if value == self._value else 0.0
        self._value = value
        return self.lasted_s


def _tick_s(timeout_s: float) -> float:
    return min(timeout_s / _TICKS, _LONGEST_TICK_S)


# ---- in a rank


class LoopWatch:
    """Whether the loop of this rank is stuck. The loop's thread creates it; another calls `look`.

    `doing`: the loop's stage, its step, and when the stage began. An empty stage means that the
    loop waits for messages.
    """

    def __init__(self, doing: Callable[[], tuple[str, int, float]], timeout_s: float) -> None:
        self._doing = doing
        self._timeout_s = timeout_s
        self._limit_s = timeout_s + _LOOP_GRACE_S
        self._loop_clock = time.pthread_getcpuclockid(threading.get_ident())
        tick_s = _tick_s(timeout_s)
        # CPU time at the last looks that found the same stage.
        self._worked_s: deque[float] = deque(maxlen=int(self._limit_s / tick_s) + 1)
        self._busy = Stillness(tick_s)

    def look(self) -> str | None:
        """Why the loop counts as stuck; None if it waits for messages, advances or computes."""
        stage, step, since_s = self._doing()
        worked_s = time.process_time()
        if stage == "wait":  # the loop may poll the device, which is no work
            worked_s -= time.clock_gettime(self._loop_clock)
        busy_s = self._busy.look((stage, since_s))
        if not busy_s:
            self._worked_s.clear()
        self._worked_s.append(worked_s)
        if not stage or busy_s <= self._limit_s:
            return None
        what = f"step {step}" if step else "the loop"
        where = f"(stage {stage!r}, --stall-timeout {self._timeout_s:g})"
        if worked_s - self._worked_s[0] <= _WORKING * self._limit_s:
            return f"{what} has not returned for {busy_s:.0f} s {where}"
        if busy_s > _WORKING_TIMEOUTS * self._timeout_s:
            return f"{what} has been computing for {busy_s:.0f} s {where}"
        return None


def keep_beating(
    beats: Beats, rank: int, timeout_s: float, check: Callable[[], None] | None
) -> None:
    """Count up a rank's number as long as its process runs, and call `check` each time."""
    while True:
        beats.counts[rank] += 1
        if check is not None:
            check()
        time.sleep(_tick_s(timeout_s))


# ---- in the front


class Watched(Protocol):
    """A rank's process."""

    @property
    def pid(self) -> int: ...
    @property
    def is_running(self) -> bool: ...
    def kill(self) -> None: ...


class GroupWatch(Protocol):
    """Watches the ranks of a group from when they serve."""

    @property
    def verdicts(self) -> dict[int, str]:
        """By rank: why it was killed."""

    def start(self) -> None: ...
    def end(self) -> None: ...


class RankWatch(threading.Thread):
    """Kills a rank of this machine without heartbeats. Its socket closes, and the front notices."""

    def __init__(
        self, beats: Beats, ranks: Mapping[int, Watched], timeout_s: float, first_rank: int = 0
    ) -> None:
        super().__init__(name="paceline-watch", daemon=True)
        self._beats = beats
        self._ranks = dict(ranks)  # the caller may forget ranks that have ended
        self._timeout_s = timeout_s
        # In a group, on this machine or others, another rank reports it first.
        self._grace_s = _FRONT_GRACE_S if len(beats.counts) > 1 else 0.0
        self._first_rank = first_rank  # the engine's number of the first one
        self._over = threading.Event()
        self._verdicts: dict[int, str] = {}

    @property
    def verdicts(self) -> dict[int, str]:
        return self._verdicts

    def end(self) -> None:
        self._over.set()

    def run(self) -> None:
        tick_s = _tick_s(self._timeout_s)
        still = {rank: Stillness(tick_s) for rank in self._ranks}
        while not self._over.wait(tick_s):
            silent_s = {r: s.look(self._beats.counts[r]) for r, s in still.items()}
            if max(silent_s.values()) > self._timeout_s + self._grace_s and self._judge(silent_s):
                return

    def _judge(self, silent_s: dict[int, float]) -> bool:
        """Kill the silent ranks. Those that have been silent for the timeout without the grace are
        included, because ranks often freeze together. False: none is silent and running."""
        silent = [
            r for r, s in silent_s.items() if s > self._timeout_s and self._ranks[r].is_running
        ]
        for rank in silent:
            numbers = [self._first_rank + r for r in silent if r != rank]
            others = "".join(f", nor has rank {number}" for number in numbers)
            self._verdicts[rank] = (
                f"the engine process (pid {self._ranks[rank].pid}) has sent no heartbeat for "
                f"{silent_s[rank]:.0f} s (--stall-timeout {self._timeout_s:g}){others}"
            )
        for rank in silent:
            self._ranks[rank].kill()
        return bool(silent)
