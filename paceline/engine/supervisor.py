"""The groups of ranks of one engine: starts them, and starts a group again that has ended.

A group ends and starts alone; the others serve meanwhile. Knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.config import EngineConfig
from paceline.engine.cluster import Cluster, smallest_of
from paceline.engine.messages import EngineMessage
from paceline.engine.nodes import Nodes
from paceline.engine.stats import DIED, DRAINED
from paceline.errors import ConfigError, EngineDead, PacelineError
from paceline.parallel.placement import RankPlace, layout_of
from paceline.step import RunnerInfo

logger = logging.getLogger(__name__)

# The first restart is immediate; then one second, two, four, ...
_MOST_DELAY_S = 60.0
# A restart that takes this many times the first start, and a minute, hangs.
_SLOWEST_START = 5.0
# A group that has served for this long has recovered: its next death is a first one again.
_RECOVERED_S = 300.0
# All groups are looked at this often. One whose sockets are quiet may have stopped reading.
_SWEEP_S = 1.0


@dataclass(slots=True)
class Lost:
    """A group has ended and starts again. Its replicas have forgotten every request."""

    replicas: range
    reason: str
    cause: str  # DIED or DRAINED


@dataclass(slots=True)
class Stopped:
    """A group has ended because it was asked to, and does not start again."""

    replicas: range


@dataclass(slots=True)
class Back:
    """A group serves again, without any request."""

    replicas: range


Change = Lost | Stopped | Back


@dataclass(slots=True, eq=False)
class _Group:
    where: RankPlace  # of its first rank
    cluster: Cluster
    is_serving: bool = True
    has_ended: bool = False  # as it was asked to
    served_since_s: float = field(default_factory=time.monotonic)
    num_restarts: int = 0  # in a row
    restart: _Restart | None = None

    @property
    def replicas(self) -> range:
        first = self.where.first_rank // self.where.layout.tensor_parallel
        return range(first, first + self.where.layout.data_parallel)

    @property
    def ranks(self) -> range:
        return range(self.where.first_rank, self.where.first_rank + self.where.layout.num_ranks)


class _Restart(threading.Thread):
    """Ends a group and starts it again, in a thread: both may take long, and the front serves other
    groups. Nothing else touches the two clusters meanwhile."""

    def __init__(
        self,
        old: Cluster,
        launch: Callable[[], Cluster],
        delay_s: float,
        limit_s: float,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(name="paceline-restart", daemon=True)
        self._old = old
        self._launch = launch
        self._delay_s = delay_s
        self._limit_s = limit_s
        self._on_end = on_end
        self._is_cancelled = threading.Event()
        self._new: Cluster | None = None
        self.cluster: Cluster | None = None  # when it serves
        self.error: Exception | None = None  # why it could not start
        self.is_over = False

    def run(self) -> None:
        try:
            self._old.stop(0.0)
            if not self._is_cancelled.wait(self._delay_s):
                self._start_again()
        except Exception as error:
            self.error = error
            if not isinstance(error, PacelineError):
                logger.exception("a restart failed")
        self.is_over = True
        self._on_end()

    def _start_again(self) -> None:
        new = self._new = self._launch()
        try:
            if self._is_cancelled.is_set():
                raise EngineDead("The engine was closed.")
            give_up_s = time.monotonic() + self._limit_s
            while not new.look_ready(None, max(0.0, give_up_s - time.monotonic())):
                if time.monotonic() >= give_up_s:
                    raise EngineDead(f"it has not started within {self._limit_s:.0f} s.")
        except BaseException:
            new.stop(0.0)
            raise
        self.cluster = new

    def cancel(self) -> None:
        """Return when nothing is left of it."""
        self._is_cancelled.set()
        if self._new is not None:
            self._new.kill()
        self.join()
        if self.cluster is not None:
            self.cluster.stop(0.0)


class Supervisor:
    """Replicas and ranks have the numbers of the whole engine."""

    def __init__(self, config: EngineConfig, factory: str, *, in_process: bool = False) -> None:
        """Start every rank; each imports `factory` and waits for `begin`."""
        layout = layout_of(config)
        if in_process and layout.num_ranks > 1:
            raise ConfigError(
                "engine_in_process runs one rank in a thread; tensor_parallel_size "
                f"{layout.tensor_parallel} x data_parallel_size {layout.data_parallel} are "
                f"{layout.num_ranks} ranks, and each needs a process."
            )
        if config.nodes.headless:
            raise ConfigError("A headless node has no front: use `paceline serve --headless`.")
        self.layout = layout
        self._config = config
        self._factory = factory
        self._log_level = "warning"
        self.can_restart = not in_process  # a thread cannot be ended
        self._max_restarts = config.device.max_restarts or 0 if self.can_restart else 0
        self._early_changes: list[Change] = []
        self._touched: set[int] = set()  # groups that may have ended or returned
        self._unread: set[int] = set()  # groups with messages that `send` has read
        self._launched_s = self._swept_s = time.monotonic()
        self._start_s = 0.0  # how long the first start took
        self.death: str | None = None  # the engine has ended, and is not started again
        self._groups: list[_Group] = []
        self._epoll = select.epoll()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._epoll.register(self._wake_read, select.EPOLLIN)
        self._by_fd: dict[int, int] = {}
        self._nodes: Nodes | None = None
        first = 0
        try:
            if config.is_on_several_machines:
                self._nodes = _open_nodes(config)
                self._nodes.await_all()
            for part in layout.groups():
                num_others = layout.num_ranks - part.num_ranks
                where = RankPlace(0, part, first_rank=first, num_others=num_others)
                cluster = self._launch(where, in_process=in_process)
                self._groups.append(_Group(where, cluster))
                self._watch(len(self._groups) - 1)
                first += part.num_ranks
        except BaseException:
            self.stop(0.0)
            raise
        self._group_of = [i for i, group in enumerate(self._groups) for _ in group.replicas]

    # ---- the beginning

    def _launch(self, where: RankPlace, *, in_process: bool = False) -> Cluster:
        return Cluster.launch(
            self._config, where, self._factory, in_process=in_process, nodes=self._nodes
        )

    def begin(self, config: EngineConfig, log_level: str) -> None:
        """Tell every rank what to build."""
        self._config, self._log_level = config, log_level
        for group in self._groups:
            group.cluster.begin(config, log_level)

    def await_ready(self, progress: Callable[[str, float], None] | None) -> RunnerInfo:
        """Return when every rank serves. The sizes are those of the smallest replica."""
        clusters = [group.cluster for group in self._groups]
        are_ready = [False]
        while not all(are_ready):
            self._epoll.poll()
            are_ready = [cluster.look_ready(progress, 0.0) for cluster in clusters]
        self._start_s = time.monotonic() - self._launched_s
        for group in self._groups:
            group.served_since_s = time.monotonic()
        return smallest_of([cluster.info() for cluster in clusters])

    # ---- messages

    @property
    def num_replicas(self) -> int:
        return self.layout.data_parallel

    @property
    def pids(self) -> list[int]:
        """One for each rank that is a process; none of groups that restart."""
        return [pid for group in self._groups if group.is_serving for pid in group.cluster.pids]

    @property
    def serving(self) -> list[int]:
        """The replicas of groups that do not restart."""
        return [r for group in self._groups if group.is_serving for r in group.replicas]

    def fileno(self) -> int:
        """Readable when `receive` or `take_changes` has something. The same over all restarts."""
        return self._epoll.fileno()

    def num_unsent_bytes(self, replica: int) -> int:
        """Messages to a replica that it has not read."""
        group = self._groups[self._group_of[replica]]
        local = replica - group.replicas.start
        return group.cluster.num_unsent_bytes(local) if group.is_serving else 0

    def send(self, replica: int, frame: bytes) -> None:
        """Send to a replica; returns at once. If the replica has ended: raises EngineDead, or does
        nothing if it will be restarted, which `take_changes` reports."""
        index = self._group_of[replica]
        group = self._groups[index]
        if not group.is_serving:
            return
        try:
            group.cluster.send(replica - group.replicas.start, frame)
        except EngineDead:
            self._unread.add(index)
            self._wake()
            if not self._may_restart(group) or not group.cluster.is_over:
                raise

    def send_all(self, frame: bytes) -> None:
        """Send to all replicas that do not restart."""
        for replica in self.serving:
            self.send(replica, frame)

    def receive(self, timeout_s: float | None = 0.0) -> list[tuple[int, EngineMessage]]:
        """All (replica, message) that have come; waits up to `timeout_s` (None: for ever) for one
        or for a change."""
        give_up_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            found = self._receive_once(give_up_s)
            if found or self._touched or time.monotonic() >= give_up_s:
                return found

    def _receive_once(self, give_up_s: float) -> list[tuple[int, EngineMessage]]:
        ready, self._unread = self._unread, set()
        left_s = 0.0 if ready else min(give_up_s - time.monotonic(), _SWEEP_S)
        for descriptor, _ in self._epoll.poll(max(left_s, 0.0)):
            if descriptor == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                self._touched |= {i for i, g in enumerate(self._groups) if not g.is_serving}
            else:
                ready.add(self._by_fd[descriptor])
        now_s = time.monotonic()
        if now_s - self._swept_s > _SWEEP_S:
            self._swept_s = now_s
            ready = {i for i, group in enumerate(self._groups) if group.is_serving}
        found: list[tuple[int, EngineMessage]] = []
        for index in sorted(ready):
            group = self._groups[index]
            if not group.is_serving:
                continue
            first = group.replicas.start
            found += [(first + r, message) for r, message in group.cluster.receive(0.0)]
            if group.cluster.is_over and not group.has_ended:
                self._touched.add(index)
        return found

    # ---- the end of a group, and its return

    @property
    def has_stopped(self) -> bool:
        """True if every replica has ended because it was asked to."""
        return all(group.is_serving and group.cluster.has_stopped for group in self._groups)

    def take_changes(self) -> list[Change]:
        """Groups that have ended or returned since the last call. Starts those that have ended
        again; if that is not allowed, `death` says why the engine has ended."""
        changes, self._early_changes = self._early_changes, []
        touched, self._touched = self._touched, set()
        for index in sorted(touched):
            group = self._groups[index]
            if self.death is not None:
                break
            if group.restart is not None and group.restart.is_over:
                changes += self._end_restart(index, group, group.restart)
            elif group.is_serving and group.cluster.is_over:
                changes += self._lose(index, group)
        return changes

    def restart_rank(self, rank: int, reason: str) -> None:
        """Restart the group of a rank now, although nothing is wrong with it."""
        index = next(i for i, group in enumerate(self._groups) if rank in group.ranks)
        group = self._groups[index]
        if group.is_serving:
            self._early_changes += self._restart(index, group, reason, DRAINED, 0.0)
            self._wake()

    def group_of_rank(self, rank: int) -> tuple[range, range]:
        """(ranks, replicas) that restart together with a rank."""
        group = next(group for group in self._groups if rank in group.ranks)
        return group.ranks, group.replicas

    def _lose(self, index: int, group: _Group) -> list[Change]:
        if group.cluster.has_stopped:
            group.has_ended = True
            if all(g.has_ended for g in self._groups):
                self.death = "The engine has stopped, as it was asked to."
            return [Stopped(group.replicas)]
        reason = group.cluster.death_notice()
        if time.monotonic() - group.served_since_s > _RECOVERED_S:
            group.num_restarts = 0
        if not self._may_restart(group):
            self._die(reason)
            return []
        delay_s = _delay_s(group.num_restarts)
        group.num_restarts += 1
        return self._restart(index, group, reason, DIED, delay_s)

    def _may_restart(self, group: _Group) -> bool:
        has_recovered = time.monotonic() - group.served_since_s > _RECOVERED_S
        return (0 if has_recovered else group.num_restarts) < self._max_restarts

    def _restart(
        self, index: int, group: _Group, reason: str, cause: str, delay_s: float
    ) -> list[Change]:
        ranks = group.ranks
        logger.error(
            "%s\nrestarting rank %s%s (restart %d of %d in a row)",
            reason,
            ranks[0] if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}",
            f" in {delay_s:g} s" if delay_s else "",
            group.num_restarts,
            self._max_restarts,
        )
        self._epoll.unregister(group.cluster.fileno())
        group.is_serving = False
        self._begin_restart(group, group.cluster, delay_s)
        return [Lost(group.replicas, reason, cause)]

    def _begin_restart(self, group: _Group, old: Cluster, delay_s: float) -> None:
        def launch() -> Cluster:
            cluster = self._launch(group.where)
            cluster.begin(self._config, self._log_level)
            return cluster

        limit_s = _SLOWEST_START * self._start_s + _MOST_DELAY_S
        group.restart = _Restart(old, launch, delay_s, limit_s, self._wake)
        group.restart.start()

    def _end_restart(self, index: int, group: _Group, restart: _Restart) -> list[Change]:
        group.restart = None
        if restart.cluster is None:
            reason = f"The engine could not be restarted: {restart.error}"
            if not self._may_restart(group):
                self._die(reason)
                return []
            delay_s = _delay_s(group.num_restarts)
            group.num_restarts += 1
            logger.error("%s\ntrying again in %g s", reason, delay_s)
            self._begin_restart(group, group.cluster, delay_s)
            return []
        group.cluster, group.is_serving = restart.cluster, True
        group.served_since_s = time.monotonic()
        self._watch(index)
        logger.warning("ranks %s serve again", ", ".join(map(str, group.ranks)))
        return [Back(group.replicas)]

    def _watch(self, index: int) -> None:
        descriptor = self._groups[index].cluster.fileno()
        self._by_fd[descriptor] = index
        self._epoll.register(descriptor, select.EPOLLIN)

    def _die(self, reason: str) -> None:
        self.death = reason
        if self.layout.num_ranks > 1:
            for group in self._groups:
                if group.is_serving:
                    group.cluster.kill()

    def _wake(self) -> None:
        """Make `fileno` readable. Any thread may call it."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"w")

    def stop(self, grace_s: float) -> None:
        """Ask all ranks to end, and kill them after `grace_s`. Returns when all have ended."""
        give_up_s = time.monotonic() + grace_s
        if self._nodes is not None:
            self._nodes.cancel_waits()
        for group in self._groups:
            if group.restart is not None:
                group.restart.cancel()
        serving = [group.cluster for group in self._groups if group.is_serving]
        for cluster in serving:
            cluster.ask_to_stop(grace_s)
        for cluster in serving:
            cluster.end(max(0.0, give_up_s - time.monotonic()))
        if self._nodes is not None:
            self._nodes.close()
        self._epoll.close()
        for descriptor in (self._wake_read, self._wake_write):
            os.close(descriptor)


def _open_nodes(config: EngineConfig) -> Nodes:
    if config.device.distributed_executor_backend == "ray":
        from paceline.engine.ray_launch import RayNodes  # only with the extra [ray]

        return RayNodes(config)
    return Nodes(config)


def _delay_s(num_before: int) -> float:
    """How long to wait before a restart, after this many in a row."""
    return min(2.0 ** (num_before - 1), _MOST_DELAY_S) if num_before else 0.0
