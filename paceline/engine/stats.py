"""The engine's present load and its totals, from the messages that the front has received."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

import numpy as np

from paceline.engine.messages import Gauges, StepMessage, StepTimes
from paceline.observe.histogram import BUBBLE_BOUNDS_S, Histogram
from paceline.scheduler.snapshots import SnapshotStats
from paceline.step import StepResult

DIED, DRAINED = "died", "drained"  # why a group of ranks was restarted
_MOST_RECENT = 16_384  # steps whose times are kept


@dataclass(slots=True)
class RankStats:
    """One replica: totals since the start, over its restarts, and its newest restart."""

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_restarts: int = 0
    cause: str = ""
    reason: str = ""
    restarted_at_s: float = 0.0  # Unix time
    is_restarting: bool = False


@dataclass(slots=True)
class EngineStats:
    """Gauges of the newest messages, and totals since the start, over all replicas."""

    num_replicas: int = 1
    step: int = 0  # the highest number of all replicas
    num_held: int = 0  # sequences submitted that have not ended in their replica
    num_running: int = 0

    restarts: Counter[str] = field(default_factory=Counter)  # of groups of ranks, by cause
    ranks: defaultdict[int, RankStats] = field(default_factory=lambda: defaultdict(RankStats))
    num_resumed: int = 0  # sequences that went on in another engine

    num_steps: int = 0
    bubble_s: float = 0.0  # device idle time between steps
    busy_s: float = 0.0  # device time
    host_s: float = 0.0  # time of the loop, without waiting
    num_wasted_rows: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # of admitted sequences
    num_cached_tokens: int = 0  # prompt tokens that a prefix hit saved
    num_generated_tokens: int = 0  # delivered ones: without tokens after a stop string
    num_drafts: int = 0  # rows that verified at least one draft
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # drafts only, never the bonus token
    num_forced_tokens: int = 0  # accepted drafts that a grammar left no other choice for
    accepted_per_position: list[int] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)  # sequences by finish_reason
    # Device idle time before each step, and before the masks of a step came; the times of the
    # newest steps.
    bubble: Histogram = field(default_factory=lambda: Histogram(BUBBLE_BOUNDS_S), repr=False)
    mask_wait: Histogram = field(default_factory=lambda: Histogram(BUBBLE_BOUNDS_S), repr=False)
    recent: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=_MOST_RECENT), repr=False)
    newest: dict[int, Gauges] = field(default_factory=dict, repr=False)  # by replica
    _ended: list[SnapshotStats] = field(default_factory=list, repr=False)  # of ended engines

    @property
    def num_restarting(self) -> int:
        """Replicas that restart now."""
        return sum(rank.is_restarting for rank in self.ranks.values())

    @property
    def is_restarting(self) -> bool:
        """Whether no replica serves now; requests wait."""
        return self.num_restarting == self.num_replicas

    @property
    def num_waiting(self) -> int:
        """Sequences in the front, on the way to an engine or in its queue."""
        return max(0, self.num_held - self.num_running)

    @property
    def kv_usage(self) -> float:
        """The mean over replicas."""
        return sum(g.kv_usage for g in self.newest.values()) / self.num_replicas

    @property
    def snapshot_usage(self) -> float:
        """Of entries for recurrent state; the mean over replicas."""
        return sum(g.snapshots.usage for g in self.newest.values()) / self.num_replicas

    @property
    def _snapshots(self) -> list[SnapshotStats]:
        return [*self._ended, *(g.snapshots for g in self.newest.values())]

    @property
    def num_snapshot_hits(self) -> int:
        return sum(s.num_hits for s in self._snapshots)

    @property
    def num_snapshot_misses(self) -> int:
        return sum(s.num_misses for s in self._snapshots)

    @property
    def num_snapshot_evictions(self) -> int:
        return sum(s.num_evictions for s in self._snapshots)

    def take(self, message: StepMessage, replica: int = 0) -> None:
        result, gauges = message.result, message.gauges
        # Not a sum over all replicas: every step message of each of them comes through here.
        before = self.newest.get(replica)
        self.num_running += gauges.num_running - (0 if before is None else before.num_running)
        self.newest[replica] = gauges
        self.step = max(self.step, result.step)
        self.num_steps += gauges.num_steps
        for times in gauges.times:
            self._take_times(times)
        self.num_wasted_rows += gauges.num_wasted_rows
        num_preempted = len(message.events.preempted)
        num_draft_tokens = sum(result.num_drafts_B.tolist())  # few rows: faster than numpy
        if num_preempted or num_draft_tokens:
            rank = self.ranks[replica]
            self.num_preemptions += num_preempted
            rank.num_preemptions += num_preempted
            self.num_draft_tokens += num_draft_tokens
            rank.num_draft_tokens += num_draft_tokens
            rank.num_accepted_tokens += self._count_accepted(result)
        if result.num_forced_B is not None:
            self.num_forced_tokens += sum(result.num_forced_B.tolist())

    def lose(self, replica: int, cause: str, reason: str) -> None:
        """The replica's engine has ended and restarts: it has no load, and its totals stay."""
        rank = self.ranks[replica]
        rank.num_restarts += 1
        rank.cause, rank.reason, rank.restarted_at_s = cause, reason, time.time()
        rank.is_restarting = True
        gauges = self.newest.pop(replica, None)
        if gauges is not None:
            self.num_running -= gauges.num_running
            self._ended.append(gauges.snapshots)

    def _take_times(self, times: StepTimes) -> None:
        self.recent.append(times)
        self.busy_s += times.busy_s
        self.host_s += times.host_s
        if times.idle_s >= 0.0:  # else no work was waiting
            self.bubble_s += times.idle_s
            self.bubble.observe(times.idle_s)
        if times.mask_wait_s >= 0.0:
            self.mask_wait.observe(times.mask_wait_s)

    def _count_accepted(self, result: StepResult) -> int:
        """Returns how many there are."""
        accepted_B = result.num_accepted_B
        num_accepted = int(accepted_B.sum())
        self.num_drafts += int(np.count_nonzero(result.num_drafts_B))
        self.num_accepted_tokens += num_accepted
        most = int(accepted_B.max(initial=0))
        missing = most - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position in range(most):
            self.accepted_per_position[position] += int(np.count_nonzero(accepted_B > position))
        return num_accepted
