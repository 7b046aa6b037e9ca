"""Measures steps: the loop's stages on the host, and the device's times from the results.

Host and device times use one clock: time.perf_counter of this process.
"""

from __future__ import annotations

from time import perf_counter

from paceline.engine.messages import RESTED, StepTimes
from paceline.observe.trace import TraceRing
from paceline.step import StepResult


class Stopwatch:
    """The loop thread calls it between two stages, a few times per step."""

    def __init__(self) -> None:
        self.idle_s = self.busy_s = self.host_s = 0.0  # totals
        self.step = 0  # the step of the present stage; 0: none, and the stage is not traced
        self.trace: TraceRing | None = None
        self._stage = ""
        self._since_s = 0.0
        self._stages_s = 0.0  # host time that is not counted for a step yet
        self._newest: StepResult | None = None  # committed and not measured
        self._idle_before_s = RESTED
        self._rested = True
        self._times: list[StepTimes] = []

    # ---- the host

    def enter(self, stage: str, step: int = 0) -> None:
        """One stage ends and another begins."""
        now_s = perf_counter()
        if self._stage and self._stage != "wait":
            self._stages_s += now_s - self._since_s
        if self.trace is not None and self.step:
            self.trace.add(self._stage, self.step, self._since_s, now_s)
        self._stage, self.step, self._since_s = stage, step, now_s

    @property
    def present(self) -> tuple[str, int, float]:
        """The stage, its step and when it began; an empty stage: the loop waits for messages."""
        return self._stage, self.step, self._since_s

    def leave(self) -> None:
        """The turn is over; time until the next one is not counted."""
        self.enter("")

    # ---- the device

    def took(self, result: StepResult) -> None:
        """A result has come, so the step before it has ended and is measured now.

        A result comes before its step ends: drafting follows. The runner knows the end of a step
        when the next one has begun.
        """
        previous = self._newest
        idle_s = RESTED
        if previous is not None:
            self._measure(previous)
            if not self._rested:
                idle_s = max(0.0, result.device_start_s - previous.device_end_s)
        self._newest, self._idle_before_s, self._rested = result, idle_s, False

    def ran_out_of_work(self) -> None:
        """No work is left: idle time up to the next step is no bubble."""
        self._rested = True

    def settle(self) -> None:
        """The loop goes idle, so no later result ends the newest step: measure it now.

        It is left out if the runner does not know its end.
        """
        newest, self._newest = self._newest, None
        if newest is not None and newest.device_end_s > newest.device_start_s:
            self._measure(newest)
        self._rested = True

    def take_times(self) -> list[StepTimes]:
        """Times of the steps measured since the last call."""
        times, self._times = self._times, []
        return times

    def _measure(self, result: StepResult) -> None:
        idle_s = self._idle_before_s
        busy_s = result.device_end_s - result.device_start_s
        host_s, self._stages_s = self._stages_s, 0.0
        self._times.append(StepTimes(idle_s, busy_s, host_s, result.mask_wait_s))
        if idle_s > 0.0:
            self.idle_s += idle_s
        self.busy_s += busy_s
        self.host_s += host_s
        if self.trace is not None:
            self.trace.add("device", result.step, result.device_start_s, result.device_end_s)
