"""A group of ranks, as the front sees them. They start and end together.

An engine is one group, or one for each replica if replicas share nothing (`supervisor.py`).

Owns which rank has ended and why. When one ends, all are ended. Knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Self

from paceline.config import GIB, EngineConfig
from paceline.engine.boot import RankSpawn, Start
from paceline.engine.launch import (
    DEFAULT_FACTORY,
    EngineHandle,
    EngineProcess,
    EngineThread,
    start_ranks,
)
from paceline.engine.life import GroupWatch, RankWatch
from paceline.engine.messages import (
    Control,
    Died,
    EngineMessage,
    Ready,
    StartupProgress,
    Wake,
    decode,
)
from paceline.engine.nodes import Nodes
from paceline.engine.transport import ChannelClosed, Channels
from paceline.errors import EngineDead, PacelineError, error_class
from paceline.parallel.placement import RankPlace
from paceline.step import RunnerInfo

logger = logging.getLogger(__name__)

# If every rank that ended blames another one: how long to wait for a rank that blames none.
_LAST_WORDS_S = 1.0


class _StartClock:
    """Seconds from the launch to ready, by the stages that the first rank reports."""

    def __init__(self) -> None:
        self._taken_s: dict[str, float] = {}
        self._stage, self._since_s = "process and imports", time.monotonic()

    def enter(self, stage: str) -> None:
        now_s = time.monotonic()
        self._taken_s[self._stage] = self._taken_s.get(self._stage, 0.0) + now_s - self._since_s
        self._stage, self._since_s = stage, now_s

    def stop(self) -> dict[str, float]:
        self.enter("")
        taken_s = {stage: round(seconds, 3) for stage, seconds in self._taken_s.items()}
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in taken_s.items())
        logger.info("ready after %.1f s: %s", sum(taken_s.values()), stages)
        return taken_s


def smallest_of(infos: Sequence[RunnerInfo]) -> RunnerInfo:
    """The first, with the sizes of the smallest replica."""
    return replace(
        infos[0],
        num_pages=min(info.num_pages for info in infos),
        num_slots=min(info.num_slots for info in infos),
        max_model_len=min(info.max_model_len for info in infos),
    )


class Cluster:
    """One process for each rank, or a single rank in a thread. Build it with `launch`."""

    def __init__(
        self, where: RankPlace, ranks: Sequence[EngineHandle], watch: GroupWatch | None = None
    ) -> None:
        self.where = where  # of the first rank
        self.layout = where.layout
        self._ranks = list(ranks)
        self._watch = watch  # None: the rank is a thread
        self._channels = Channels([rank.channel for rank in ranks])
        self._early: list[tuple[int, EngineMessage]] = []  # read by `send`, for `receive`
        self._words: dict[int, Died] = {}  # in the order they came
        self._stopped: set[int] = set()  # ranks that reported a stop or drain as asked
        self._infos: dict[int, RunnerInfo] = {}  # of ranks that serve
        self._start_clock = _StartClock()
        self._startup_s: dict[str, float] = {}
        self._stall_s: float | None = None  # a rank that does not read for this long counts as hung

    @classmethod
    def launch(
        cls,
        config: EngineConfig,
        where: RankPlace,
        factory: str = DEFAULT_FACTORY,
        *,
        in_process: bool = False,
        nodes: Nodes | None = None,
    ) -> Self:
        """Start every rank; each imports `factory` and waits for `begin`. `where` is the place of
        the first one. `nodes`: of several machines."""
        if in_process:
            return cls(where, [EngineThread(factory, RankSpawn(where))])
        if nodes is not None:
            return cls(where, *nodes.start_group(config, where, factory))
        may_use_gpu = config.device.device != "cpu"
        start = partial(EngineProcess, factory)
        ranks, beats = start_ranks(start, where, may_use_gpu=may_use_gpu)
        watch = RankWatch(beats, ranks, config.device.stall_timeout, where.first_rank)
        return cls(where, list(ranks.values()), watch)

    # ---- the beginning

    def begin(self, config: EngineConfig, log_level: str) -> None:
        """Tell every rank what to build."""
        frame = Start(config, log_level).encode()
        for rank in range(len(self._ranks)):
            with contextlib.suppress(ChannelClosed):  # it has reported why
                self._channels.send(rank, frame)
        self._stall_s = config.device.stall_timeout

    def look_ready(
        self, progress: Callable[[str, float], None] | None, timeout_s: float | None
    ) -> bool:
        """Whether every rank serves; waits up to `timeout_s` (None: for ever) for news of it.
        Raises why a rank could not start."""
        is_starting = len(self._infos) < len(self._ranks)
        for rank, message in self._take(timeout_s):
            match message:
                case Ready(info=info):
                    self._infos[rank] = info
                case StartupProgress(stage=stage, fraction=fraction):
                    self._start_clock.enter(stage)
                    if progress is not None:
                        progress(stage, fraction)
        if self._words or self.is_over:
            raise self._start_error()
        if is_starting and len(self._infos) == len(self._ranks):
            self._startup_s, info = self._start_clock.stop(), self.info()
            num_tokens, size = info.num_pages * info.page_size, info.kv_cache_bytes / GIB
            kind = info.kv_cache_dtype
            logger.info("KV cache of a rank: %d tokens in %s, %.2f GiB", num_tokens, kind, size)
            if self._watch is not None:  # loading has no deadline
                self._watch.start()
        return len(self._infos) == len(self._ranks)

    def info(self) -> RunnerInfo:
        """The sizes are those of the smallest replica."""
        smallest = smallest_of([self._infos[rank] for rank in self.layout.leaders()])
        return replace(smallest, startup_s=self._startup_s)

    def _start_error(self) -> PacelineError:
        rank, reason = self._first_to_go()
        words, who = self._words.get(rank), self._label(rank)
        kind = error_class(words.kind) if words is not None else None
        if kind is not None:
            return kind(f"{who}{reason}")
        return EngineDead(f"The engine could not start: {who}{reason}")

    # ---- messages

    @property
    def pids(self) -> list[int]:
        """One for each rank that is a process."""
        return [rank.pid for rank in self._ranks if rank.pid is not None]

    def fileno(self) -> int:
        """Readable when `receive` has something."""
        return self._channels.fileno()

    def num_unsent_bytes(self, replica: int) -> int:
        """Messages to the leader of a replica that it has not read."""
        return self._ranks[self.layout.leaders()[replica]].channel.num_unsent_bytes

    def send(self, replica: int, frame: bytes) -> None:
        """Send to a replica's leader; returns at once. Raises EngineDead with the reason if the
        leader has ended, or has read nothing for the stall timeout."""
        leader = self.layout.leaders()[replica]
        try:
            self._channels.send(leader, frame)
            if self._gives_up(leader):
                raise ChannelClosed
        except ChannelClosed:
            self._early += self._take(0.0)  # it reported why before it closed its end
            if leader in self._stopped and not self.is_over:
                raise EngineDead("The engine is shutting down.") from None
            notice = self.death_notice()
            self._channels.show_end(leader)  # so that `receive` reports it too
            raise EngineDead(notice) from None

    def receive(self, timeout_s: float | None = 0.0) -> list[tuple[int, EngineMessage]]:
        """All (replica, message) that have come; waits up to `timeout_s` (None: for ever)."""
        early, self._early = self._early, []
        found = [*early, *self._take(0.0 if early else timeout_s)]
        return [(rank // self.layout.tensor_parallel, message) for rank, message in found]

    def _take(self, timeout_s: float | None) -> list[tuple[int, EngineMessage]]:
        """(rank, message); messages about the end of a rank are kept here."""
        found: list[tuple[int, EngineMessage]] = []
        blocked = [r for r, rank in enumerate(self._ranks) if rank.channel.num_unsent_bytes]
        if blocked and self._stall_s is not None:
            timeout_s = self._stall_s if timeout_s is None else min(timeout_s, self._stall_s)
        frames = self._channels.receive(timeout_s)
        if any(self._gives_up(rank) for rank in blocked):  # then all are ended
            frames += self._channels.receive()
        for rank, frame in frames:
            match decode(frame):
                case Died() as words:
                    self._words[rank] = words
                case Control.STOPPED:
                    self._stopped.add(rank)
                case Wake():  # for the leaders on other machines
                    self._pass_on(rank, frame)
                case message:
                    found.append((rank, message))
        return found

    def _pass_on(self, sender: int, frame: bytes) -> None:
        for leader in self.layout.leaders():
            if leader != sender:
                with contextlib.suppress(ChannelClosed):
                    self._channels.send(leader, frame)

    def _gives_up(self, rank: int) -> bool:
        """Close the channel if its rank has read nothing for the stall timeout. True: done."""
        channel = self._ranks[rank].channel
        if self._stall_s is None or channel.at_end or channel.blocked_s < self._stall_s:
            return False
        reason = f"the engine process has read no message for {self._stall_s:g} s"
        self._words[rank] = Died(reason)
        channel.cut()
        return True

    # ---- the end

    @property
    def has_stopped(self) -> bool:
        """True if every replica has ended because it was asked to."""
        return self._stopped.issuperset(self.layout.leaders())

    @property
    def is_over(self) -> bool:
        """True if a rank has ended without being asked to, or if all leaders have ended."""
        gone = self._gone()
        return bool(gone - self._stopped) or gone.issuperset(self.layout.leaders())

    def death_notice(self) -> str:
        """The rank that ended first, and why. If it only waited: the ranks that did not answer."""
        rank, reason = self._first_to_go()
        return f"The engine is gone: {self._late(rank)}{self._label(rank)}{reason}"

    def _late(self, first: int) -> str:
        """The ranks that did not answer. A frozen rank reports nothing, and in the collective log
        it looks like the ranks that wait for it."""
        words = self._words.get(first)
        silent = sorted(set(range(len(self._ranks))) - set(self._words) - self._gone())
        if words is None or not words.after_another or not silent:
            return ""
        names = " and ".join(map(self._name, silent))
        return f"{names} did not answer; "

    def kill(self) -> None:
        """End all ranks now, without waiting. Any thread may call it."""
        for rank in self._ranks:
            rank.kill()

    def stop(self, grace_s: float) -> None:
        """Ask all ranks to end, and kill them after `grace_s`. Returns when all have ended."""
        self.ask_to_stop(grace_s)
        self.end(grace_s)

    def ask_to_stop(self, grace_s: float) -> None:
        """Ask all ranks to end, or without a grace kill them. Returns at once."""
        if self._watch is not None:
            self._watch.end()
        for rank in self._ranks:
            if grace_s > 0:
                rank.ask_to_stop()
            else:
                rank.kill()

    def end(self, grace_s: float) -> None:
        """Wait for the end of all ranks, and kill them after `grace_s`."""
        give_up_s = time.monotonic() + grace_s
        for rank in self._ranks:
            rank.end(max(0.0, give_up_s - time.monotonic()))
        self._channels.close()

    def _gone(self) -> set[int]:
        return {i for i, rank in enumerate(self._ranks) if rank.channel.at_end}

    def _first_to_go(self) -> tuple[int, str]:
        """The rank that ended first, as far as is known, and why.

        Ranks that lose a peer fail as well, and their reports may come first. So a rank that was
        killed comes first, then ranks whose reports do not blame another rank.
        """
        for rank, reason in self._watch.verdicts.items() if self._watch is not None else ():
            self._words.setdefault(rank, Died(reason))
        if len(self._ranks) == 1:
            words = self._words.get(0)
            return 0, words.reason if words is not None else self._ranks[0].exit_reason()
        give_up_s = time.monotonic() + _LAST_WORDS_S
        while True:
            self._early += self._take(0.0)
            silent = sorted(self._gone() - self._stopped - set(self._words))
            first = next((r for r in silent if self._ranks[r].was_killed()), None)
            if first is None:
                blameless = (r for r, words in self._words.items() if not words.after_another)
                first = next(blameless, next(iter(silent), None))
            left_s = give_up_s - time.monotonic()
            if first is not None or left_s <= 0 or len(self._gone()) == len(self._ranks):
                break
            self._early += self._take(left_s)
        if first is None:
            first = next(iter(self._words), 0)
        words = self._words.get(first)
        return first, words.reason if words is not None else self._ranks[first].exit_reason()

    def _label(self, rank: int) -> str:
        return "" if self.where.num_engine_ranks == 1 else f"{self._name(rank)}: "

    def _name(self, rank: int) -> str:
        number = self.where.first_rank + rank
        host = self._ranks[rank].host
        where = f", {host}" if host else ""
        return f"rank {number} (replica {number // self.layout.tensor_parallel}{where})"
