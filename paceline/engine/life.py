"""Signs of life: every rank counts its beats where the front reads them, and watches its own loop.

The numbers lie in shared memory, so a front that is busy elsewhere loses none of them. Time is
counted in looks: while the one who looks is stopped itself, no time passes.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.errors import EngineDead

# Waits between ranks end after the timeout, and say more: where each rank was last seen. A rank
# ends its own loop after that, and can still say where it hangs. The front comes last.
_LOOP_GRACE_S = 1.0
_FRONT_GRACE_S = 2.0
_LONGEST_TICK_S = 1.0
_TICKS = 8  # looks per timeout
# A loop that computes (a long prompt on a CPU, a kernel that is compiled) gets this many timeouts.
_WORKING_TIMEOUTS = 30
_WORKING = 0.05  # of a core


class Beats:
    """One number for each rank, which its process counts up while it runs."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        try:
            os.posix_fallocate(fd, 0, 8 * num_ranks)
        except OSError as error:
            raise EngineDead(
                f"{8 * num_ranks} bytes of shared memory cannot be had: {error.strerror}."
            ) from error
        self.counts = memoryview(mmap.mmap(fd, 8 * num_ranks)).cast("q")


class Stillness:
    """How long a value has been the same, by one who looks every `tick_s` seconds."""

    def __init__(self, tick_s: float) -> None:
        self._longest_s = 2 * tick_s
        self._value: object = None
        self._looked_s = time.monotonic()
        self.lasted_s = 0.0

    def look(self, value: object) -> float:
        now_s = time.monotonic()
        # A look that comes much later was not made by choice: this process was stopped.
        passed_s = min(now_s - self._looked_s, self._longest_s)
        self._looked_s = now_s
        self.lasted_s = self.lasted_s + passed_s if value == self._value else 0.0
        self._value = value
        return self.lasted_s


def _tick_s(timeout_s: float) -> float:
    return min(timeout_s / _TICKS, _LONGEST_TICK_S)


# ---- in a rank


class LoopWatch:
    """Whether the loop of this rank gets on. Made by the loop's thread, asked by another.

    `doing`: the stage that the loop is in, the step it is about, and when the stage began; no
    stage: it rests.
    """

    def __init__(self, doing: Callable[[], tuple[str, int, float]], timeout_s: float) -> None:
        self._doing = doing
        self._timeout_s = timeout_s
        self._tick_s = _tick_s(timeout_s)
        self._loop_clock = time.pthread_getcpuclockid(threading.get_ident())
        self._worked_s = 0.0
        self._num_working = 0  # looks that found it at work
        self._idle, self._busy = Stillness(self._tick_s), Stillness(self._tick_s)

    def look(self) -> str | None:
        """Why the loop is taken for stuck; None: it rests, gets on or computes."""
        stage, step, since_s = self._doing()
        worked_s = time.process_time()
        if stage == "wait":  # its own turns are no work: it may ask the device all the time
            worked_s -= time.clock_gettime(self._loop_clock)
        self._num_working += worked_s - self._worked_s > _WORKING * self._tick_s
        self._worked_s = worked_s
        idle_s = self._idle.look((stage, since_s, self._num_working))
        busy_s = self._busy.look((stage, since_s))
        what = f"step {step}" if step else "the loop"
        where = f"(stage {stage!r}, --stall-timeout {self._timeout_s:g})"
        if not stage or busy_s <= self._timeout_s + _LOOP_GRACE_S:
            return None
        if idle_s > self._timeout_s + _LOOP_GRACE_S:
            return f"{what} has not come back for {busy_s:.0f} s {where}"
        if busy_s > _WORKING_TIMEOUTS * self._timeout_s:
            return f"{what} has been computing for {busy_s:.0f} s {where}"
        return None


def keep_beating(
    beats: Beats, rank: int, timeout_s: float, check: Callable[[], None] | None
) -> None:
    """Count a rank's beats for as long as its process runs, and call `check` at each."""
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


class RankWatch(threading.Thread):
    """Kills a rank whose beats stay away; that its socket ends then is what the front notices."""

    def __init__(self, beats: Beats, ranks: Sequence[Watched], timeout_s: float) -> None:
        super().__init__(name="paceline-watch", daemon=True)
        self._beats = beats
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._over = threading.Event()
        self.verdicts: dict[int, str] = {}  # by rank, from before it was killed

    def end(self) -> None:
        self._over.set()

    def run(self) -> None:
        tick_s = _tick_s(self._timeout_s)
        still = [Stillness(tick_s) for _ in self._ranks]
        while not self._over.wait(tick_s):
            silent_s = [s.look(self._beats.counts[r]) for r, s in enumerate(still)]
            if max(silent_s) > self._timeout_s + _FRONT_GRACE_S and self._judge(silent_s):
                return

    def _judge(self, silent_s: list[float]) -> bool:
        """End those that stay silent, also where the time is not quite over: they froze together.
        False: there are none. Of one that has ended, the socket tells how."""
        silent = [
            r for r, s in enumerate(silent_s) if s > self._timeout_s and self._ranks[r].is_running
        ]
        for rank in silent:
            others = "".join(f", nor has rank {r}" for r in silent if r != rank)
            self.verdicts[rank] = (
                f"the engine process (pid {self._ranks[rank].pid}) has shown no sign of life for "
                f"{silent_s[rank]:.0f} s (--stall-timeout {self._timeout_s:g}){others}"
            )
        for rank in silent:
            self._ranks[rank].kill()
        return bool(silent)
