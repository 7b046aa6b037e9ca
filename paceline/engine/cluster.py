"""The ranks of one engine as the front sees them: begun together, heard together, ended together.

Owns who is gone, why, and that nobody stays behind. Knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from paceline.config import EngineConfig
from paceline.engine.boot import Failed, Post, Start, is_boot_frame
from paceline.engine.launch import DEFAULT_FACTORY, EngineHandle, EngineThread, start_ranks
from paceline.engine.life import RankWatch
from paceline.engine.messages import Died, Message, Progress, Ready, Stopped, decode
from paceline.engine.transport import ChannelClosed, Channels
from paceline.errors import ConfigError, EngineDead, PacelineError
from paceline.parallel.placement import Layout, RankPlace, layout_of
from paceline.step import RunnerInfo

logger = logging.getLogger(__name__)

# How long a rank that was left alone is asked who left it, before it is taken for the first.
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class _Words:
    """Why a rank has ended, as it said itself."""

    reason: str
    after_another: bool
    failed: Failed | None = None  # it could not start


class _StartClock:
    """Seconds from the launch to ready, by the stages that the first rank tells of."""

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


class Cluster:
    """One process for each rank, or a single rank in a thread. Build it with `launch`."""

    def __init__(
        self, layout: Layout, ranks: Sequence[EngineHandle], watch: RankWatch | None = None
    ) -> None:
        self.layout = layout
        self._ranks = list(ranks)
        self._watch = watch  # None: the rank is a thread, which no signal stops alone
        self._channels = Channels([rank.channel for rank in ranks])
        self._early: list[tuple[int, Message]] = []  # read while sending, for `receive`
        self._words: dict[int, _Words] = {}  # in the order they came
        self._stopped: set[int] = set()  # ranks that have said that they end as asked
        self._start_clock = _StartClock()
        self._stall_s: float | None = None  # who takes no message for so long stands still

    @classmethod
    def launch(
        cls, config: EngineConfig, factory: str = DEFAULT_FACTORY, *, in_process: bool = False
    ) -> Self:
        """Start every rank; each imports `factory` and waits for `begin`."""
        layout = layout_of(config)
        if in_process and layout.num_ranks > 1:
            raise ConfigError(
                "engine_in_process runs one rank in a thread; tensor_parallel_size "
                f"{layout.tensor_parallel} x data_parallel_size {layout.data_parallel} are "
                f"{layout.num_ranks} ranks, which need processes of their own."
            )
        if in_process:
            return cls(layout, [EngineThread(factory, Post(RankPlace(0, layout)))])
        may_use_gpu = config.device.device != "cpu"
        ranks, beats = start_ranks(factory, layout, may_use_gpu=may_use_gpu)
        watch = RankWatch(beats, ranks, config.device.stall_timeout)
        return cls(layout, ranks, watch)

    # ---- the beginning

    def begin(self, config: EngineConfig, log_level: str) -> None:
        """Tell every rank what to build."""
        frame = Start(config, log_level).encode()
        for rank in range(len(self._ranks)):
            with contextlib.suppress(ChannelClosed):  # then it has said why
                self._channels.send(rank, frame)
        self._stall_s = config.device.stall_timeout

    def await_ready(self, progress: Callable[[str, float], None] | None) -> RunnerInfo:
        """Return when every rank serves. The sizes are those of the smallest replica."""
        infos: dict[int, RunnerInfo] = {}
        while len(infos) < len(self._ranks):
            for rank, message in self._take(None):
                match message:
                    case Ready(info=info):
                        infos[rank] = info
                    case Progress(stage=stage, fraction=fraction):
                        self._start_clock.enter(stage)
                        if progress is not None:
                            progress(stage, fraction)
            if self._words or self.is_over:
                raise self._start_error()
        if self._watch is not None:  # loading has no deadline
            self._watch.start()
        startup_s = self._start_clock.stop()
        leaders = [infos[rank] for rank in self.layout.leaders()]
        return replace(
            leaders[0],
            num_pages=min(info.num_pages for info in leaders),
            num_slots=min(info.num_slots for info in leaders),
            max_model_len=min(info.max_model_len for info in leaders),
            startup_s=startup_s,
        )

    def _start_error(self) -> PacelineError:
        rank, reason = self._first_to_go()
        words = self._words.get(rank)
        if words is not None and words.failed is not None:
            return words.failed.to_error(self._label(rank))
        return EngineDead(f"The engine could not start: {self._label(rank)}{reason}")

    # ---- messages

    @property
    def num_replicas(self) -> int:
        return self.layout.data_parallel

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    @property
    def pids(self) -> list[int]:
        """Of every rank that is a process of its own."""
        return [rank.pid for rank in self._ranks if rank.pid is not None]

    def fileno(self) -> int:
        """Readable when `receive` has something."""
        return self._channels.fileno()

    def num_unsent_bytes(self, replica: int) -> int:
        """Of messages that the leader of a replica was sent and has not taken."""
        return self._ranks[self.layout.leaders()[replica]].channel.num_unsent_bytes

    def send(self, replica: int, frame: bytes) -> None:
        """To a replica's leader; returns at once. Raises EngineDead with the reason when the leader
        is gone, or has taken nothing for the stall timeout."""
        leader = self.layout.leaders()[replica]
        try:
            self._channels.send(leader, frame)
            if self._gives_up(leader):
                raise ChannelClosed
        except ChannelClosed:
            self._early += self._take(0.0)  # it said why before it closed its end
            if leader in self._stopped and not self.is_over:
                raise EngineDead("The engine is shutting down.") from None
            notice = self.death_notice()
            self._channels.show_end(leader)  # the caller may not tell anybody; `receive` will
            raise EngineDead(notice) from None

    def send_all(self, frame: bytes) -> None:
        """To the leaders of all replicas."""
        for replica in range(self.num_replicas):
            self.send(replica, frame)

    def receive(self, timeout_s: float | None = 0.0) -> list[tuple[int, Message]]:
        """(replica, message) of all that has come; waits up to `timeout_s` (None: for ever)."""
        early, self._early = self._early, []
        found = [*early, *self._take(0.0 if early else timeout_s)]
        return [(self._replica(rank), message) for rank, message in found]

    def _take(self, timeout_s: float | None) -> list[tuple[int, Message]]:
        """(rank, message); what ranks say about their own end stays here."""
        found: list[tuple[int, Message]] = []
        blocked = [r for r, rank in enumerate(self._ranks) if rank.channel.num_unsent_bytes]
        if blocked and self._stall_s is not None:
            timeout_s = self._stall_s if timeout_s is None else min(timeout_s, self._stall_s)
        frames = self._channels.receive(timeout_s)
        if any(self._gives_up(rank) for rank in blocked):  # one is enough to end all
            frames += self._channels.receive()
        for rank, frame in frames:
            if is_boot_frame(frame):
                failed = Failed.decode(frame)
                self._words[rank] = _Words(failed.message, failed.after_another, failed)
                continue
            match decode(frame):
                case Died(reason=reason, after_another=after_another):
                    self._words[rank] = _Words(reason, after_another)
                case Stopped():
                    self._stopped.add(rank)
                case message:
                    found.append((rank, message))
        return found

    def _gives_up(self, rank: int) -> bool:
        """Cut off a rank that has taken nothing for the stall timeout while messages wait."""
        channel = self._ranks[rank].channel
        if self._stall_s is None or channel.at_end or channel.blocked_s < self._stall_s:
            return False
        reason = f"the engine process has taken no message for {self._stall_s:g} s"
        self._words[rank] = _Words(reason, after_another=False)
        channel.cut()
        return True

    # ---- the end

    @property
    def has_stopped(self) -> bool:
        """Every replica has ended as it was asked to."""
        return self._stopped.issuperset(self.layout.leaders())

    @property
    def is_over(self) -> bool:
        """Somebody is gone who was not asked to, or all are gone: nothing runs from here on."""
        gone = self._gone()
        return bool(gone - self._stopped) or gone.issuperset(self.layout.leaders())

    def death_notice(self) -> str:
        """Who went first, and why; who is late, when all that the others did was to wait."""
        rank, reason = self._first_to_go()
        return f"The engine is gone: {self._late(rank)}{self._label(rank)}{reason}"

    def _late(self, first: int) -> str:
        """In the collective log a frozen rank looks like those that wait. They give up; it says
        nothing."""
        words = self._words.get(first)
        silent = sorted(set(range(len(self._ranks))) - set(self._words) - self._gone())
        if words is None or not words.after_another or not silent:
            return ""
        names = " and ".join(f"rank {rank} (replica {self._replica(rank)})" for rank in silent)
        return f"{names} did not answer; "

    def kill(self) -> None:
        """End everybody now. What they have said can still be received."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.end(0.0)

    def stop(self, grace_s: float) -> None:
        """End everybody: by asking, and after `grace_s` without. Returns when all are gone."""
        if self._watch is not None:
            self._watch.end()
        give_up_s = time.monotonic() + grace_s
        if grace_s > 0:
            for rank in self._ranks:
                rank.ask_to_stop()
        else:
            for rank in self._ranks:
                rank.kill()
        for rank in self._ranks:
            rank.end(max(0.0, give_up_s - time.monotonic()))
        self._channels.close()

    def _gone(self) -> set[int]:
        return {i for i, rank in enumerate(self._ranks) if rank.channel.at_end}

    def _first_to_go(self) -> tuple[int, str]:
        """The rank that ended first, as far as can be told, and why.

        A rank that is left alone fails as well, and may be heard first: its peers are gone, or did
        not come to a collective. So those who blame nobody else come before those who do.
        """
        for rank, reason in self._watch.verdicts.items() if self._watch is not None else ():
            self._words.setdefault(rank, _Words(reason, after_another=False))
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
        if len(self._ranks) == 1:
            return ""
        return f"rank {rank} (replica {self._replica(rank)}): "

    def _replica(self, rank: int) -> int:
        return rank // self.layout.tensor_parallel
