"""Where a step's time goes: the loop's stages by its own clock, the device's as results say.

Decides nothing. Host and device times are of one clock, time.perf_counter of this process.
"""

from __future__ import annotations

from time import perf_counter

from paceline.engine.messages import RESTED, StepTimes
from paceline.observe.trace import TraceRing
from paceline.step import StepResult


class Stopwatch:
    """Called by the loop thread at the border of two stages; a handful of times per step."""

    def __init__(self) -> None:
        self.idle_s = self.busy_s = self.host_s = 0.0  # totals
        self.step = 0  # the step that the present stage is about; 0: none, and it is not traced
        self.trace: TraceRing | None = None
        self._stage = ""
        self._since_s = 0.0
        self._stages_s = 0.0  # host time that no step has been charged with yet
        self._newest: StepResult | None = None  # committed, and not measured yet
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
        """The stage, its step and when it began."""
        return self._stage, self.step, self._since_s

    def leave(self) -> None:
        """The turn is over; what follows is nobody's time."""
        self.enter("")

    # ---- the device

    def took(self, result: StepResult) -> None:
        """A result is there, so the step before it is over.

        That one is measured only now: drafting goes on after a result has left, and the runner
        knows when the step ended once the next one has begun.
        """
        previous = self._newest
        idle_s = RESTED
        if previous is not None:
            self._measure(previous)
            if not self._rested:
                idle_s = max(0.0, result.device_start_s - previous.device_end_s)
        self._newest, self._idle_before_s, self._rested = result, idle_s, False

    def rest(self) -> None:
        """Nothing runs and nothing waits: until the next step the device may rest."""
        self._rested = True

    def settle(self) -> None:
        """The loop is about to block: no later result will close the newest step.

        A runner that learns the end of a step from the next one does not know it: left out then.
        """
        newest, self._newest = self._newest, None
        if newest is not None and newest.device_end_s > newest.device_start_s:
            self._measure(newest)
        self._rested = True

    def take_times(self) -> list[StepTimes]:
        """Of the steps that were measured since the last call."""
        times, self._times = self._times, []
        return times

    def _measure(self, result: StepResult) -> None:
        idle_s = self._idle_before_s
        busy_s = result.device_end_s - result.device_start_s
        host_s, self._stages_s = self._stages_s, 0.0
        self._times.append(StepTimes(idle_s, busy_s, host_s))
        if idle_s > 0.0:
            self.idle_s += idle_s
        self.busy_s += busy_s
        self.host_s += host_s
        if self.trace is not None:
            self.trace.add("device", result.step, result.device_start_s, result.device_end_s)
