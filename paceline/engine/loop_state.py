"""What the engine's loop does next: turn, wait, prepare or end. All transitions are here."""

from __future__ import annotations

from enum import Enum

SPARE_AFTER_S = 1.0  # a shorter pause between two requests does not count as spare time


class Activity(Enum):
    BUSY = "busy"  # this replica or another one may have work: turn again
    IDLE = "idle"  # no work: wait for a message, and then see if the runner can prepare
    SPARE = "spare"  # no message came: turn again, and let the runner prepare in each turn
    RESTING = "resting"  # nothing to prepare: wait for a message, with a heartbeat now and then
    ENDED = "ended"  # drained: the loop ends


class LoopState:
    """The loop's activity, and whether the front has asked it to drain."""

    def __init__(self, heartbeat_s: float) -> None:
        self.activity = Activity.BUSY
        self.is_draining = False  # no more requests come; the loop ends after the last one
        self.heartbeat_s = heartbeat_s

    @property
    def is_waiting(self) -> bool:
        return self.activity in (Activity.IDLE, Activity.RESTING)

    @property
    def has_spare_time(self) -> bool:
        return self.activity is Activity.SPARE

    @property
    def wait_s(self) -> float:
        """How long to wait for a message before calling `waited`."""
        if self.activity is Activity.IDLE:
            return min(SPARE_AFTER_S, self.heartbeat_s)
        return self.heartbeat_s

    def received(self) -> None:
        """A message came."""
        self.activity = Activity.BUSY

    def waited(self, *, has_spare_work: bool) -> bool:
        """No message came in `wait_s`. True: turn now, to prepare or to show a heartbeat."""
        if self.activity is Activity.IDLE:
            self.activity = Activity.SPARE if has_spare_work else Activity.RESTING
            return has_spare_work
        return True

    def prepared(self, *, has_more: bool) -> None:
        """The runner used a turn to prepare. All replicas turn again, in lock step."""
        if not (self.has_spare_time and has_more):
            self.activity = Activity.BUSY

    def found_work(self) -> None:
        """A turn ran a step or read a result, or another replica has work."""
        self.activity = Activity.BUSY

    def found_nothing(self, *, all_drain: bool) -> None:
        """A turn found no work in any replica. `all_drain`: every replica drains."""
        if all_drain:
            self.activity = Activity.ENDED
        elif self.activity is not Activity.RESTING:
            self.activity = Activity.IDLE
