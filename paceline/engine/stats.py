"""Where the engine stands and what it has done, as the front has been told.

Counts and adds up; never reads a clock.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from paceline.engine.messages import Gauges, StepMessage, StepTimes
from paceline.observe.histogram import BUBBLE_BOUNDS_S, Histogram

_MOST_RECENT = 16_384  # steps whose times are kept one by one


@dataclass(slots=True)
class EngineStats:
    """Gauges as of the newest messages, and totals since the start; of all replicas together."""

    num_replicas: int = 1
    step: int = 0  # of the replica that is furthest
    num_held: int = 0  # sequences that were submitted, and that no replica has let go of
    num_running: int = 0
    kv_usage: float = 0.0  # the mean over replicas

    num_steps: int = 0
    bubble_s: float = 0.0  # device idle time between steps
    busy_s: float = 0.0  # of the device
    host_s: float = 0.0  # of the loop, without waiting
    num_wasted_rows: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # of admitted sequences
    num_cached_tokens: int = 0  # prompt tokens that a prefix hit saved
    num_generated_tokens: int = 0  # as delivered: without what a stop string cut off
    num_drafts: int = 0  # rows that verified at least one draft
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # drafts only, never the bonus token
    accepted_per_position: list[int] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)  # sequences by finish_reason
    # Step by step: device idle time before each, and the times of the newest.
    bubble: Histogram = field(default_factory=lambda: Histogram(BUBBLE_BOUNDS_S), repr=False)
    recent: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=_MOST_RECENT), repr=False)
    _newest: dict[int, Gauges] = field(default_factory=dict, repr=False)  # by replica

    @property
    def num_waiting(self) -> int:
        """In the front, on the way to an engine or in its queue."""
        return max(0, self.num_held - self.num_running)

    def take(self, message: StepMessage, replica: int = 0) -> None:
        gauges = message.gauges
        self._newest[replica] = gauges
        newest = self._newest.values()
        self.step = max(g.step for g in newest)
        self.num_running = sum(g.num_running for g in newest)
        self.kv_usage = sum(g.kv_usage for g in newest) / self.num_replicas
        self.num_steps += gauges.num_steps
        for times in gauges.times:
            self._take_times(times)
        self.num_wasted_rows += gauges.num_wasted_rows
        self.num_preemptions += len(message.events.preempted)
        num_draft_tokens = int(message.num_drafts_B.sum())
        if num_draft_tokens:
            self.num_draft_tokens += num_draft_tokens
            self._count_accepted(message)

    def _take_times(self, times: StepTimes) -> None:
        self.recent.append(times)
        self.busy_s += times.busy_s
        self.host_s += times.host_s
        if times.idle_s >= 0.0:  # else the device had been free to rest
            self.bubble_s += times.idle_s
            self.bubble.observe(times.idle_s)

    def _count_accepted(self, message: StepMessage) -> None:
        accepted_B = message.num_accepted_B
        self.num_drafts += int(np.count_nonzero(message.num_drafts_B))
        self.num_accepted_tokens += int(accepted_B.sum())
        most = int(accepted_B.max())
        missing = most - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position in range(most):
            self.accepted_per_position[position] += int(np.count_nonzero(accepted_B > position))
