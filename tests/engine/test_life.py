"""Who counts as dead: beats that stay away, loops that hang; not those that are only slow."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from paceline.engine.launch import path_of, shared_file
from paceline.engine.life import Beats, LoopWatch, RankWatch, Stillness
from paceline.errors import EngineDead

TIMEOUT_S = 8.0
TICK_S = 0.25  # between two looks of a watch with this timeout
PATIENCE_S = 60.0


@pytest.fixture
def beats() -> Iterator[Beats]:
    with ExitStack() as ends:
        yield Beats(shared_file("beats", ends), 3)


@dataclass
class Rank:
    pid: int
    is_running: bool = True
    was_killed: bool = False

    def kill(self) -> None:
        self.was_killed = True


class Clocks:
    """Those of the wall, of this process and of the thread that made them. A test moves them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.wall_s = self.process_s = self.loop_s = 100.0
        loop = time.pthread_getcpuclockid(threading.get_ident())
        patch.setattr(time, "monotonic", lambda: self.wall_s)
        patch.setattr(time, "process_time", lambda: self.process_s)
        patch.setattr(time, "clock_gettime", lambda clock: {loop: self.loop_s}[clock])

    def tick(self, loop: float = 0.0, others: float = 0.0) -> None:
        """The loop's thread, and all other threads, compute for these shares of the time."""
        self.wall_s += TICK_S
        self.loop_s += loop * TICK_S
        self.process_s += (loop + others) * TICK_S


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def test_what_one_process_counts_another_reads() -> None:
    with ExitStack() as ends:
        fd = shared_file("beats", ends)
        again = os.open(path_of(fd), os.O_RDWR)
        ends.callback(os.close, again)
        ours, theirs = Beats(fd, 2), Beats(again, 2)
    theirs.counts[1] += 1
    assert list(ours.counts) == [0, 1]


def test_memory_that_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        ExitStack() as ends,
        pytest.raises(EngineDead, match=r"16 bytes of shared memory .*No space left"),
    ):
        Beats(shared_file("beats", ends), 2)


def test_time_without_a_check_does_not_count(clocks: Clocks) -> None:
    still = Stillness(tick_s=1.0)
    assert still.look("a") == 0.0
    clocks.wall_s += 1.0
    assert still.look("a") == 1.0
    clocks.wall_s += 3600.0  # Ctrl-Z, a laptop that sleeps
    assert still.look("a") == 3.0
    clocks.wall_s += 1.0
    assert still.look("b") == 0.0


# ---- the front's watch


class Ticking(threading.Event):
    """Ends at once what a watch waits for between two looks, and lets these ranks beat."""

    def __init__(
        self, clocks: Clocks, beats: Beats, beating: Sequence[int], num_ticks: int
    ) -> None:
        super().__init__()
        self._clocks, self._beats, self._beating = clocks, beats, beating
        self._num_left = num_ticks

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == TICK_S
        self._clocks.tick()
        for rank in self._beating:
            self._beats.counts[rank] += 1
        self._num_left -= 1
        return self._num_left < 0


def watched(
    clocks: Clocks,
    beats: Beats,
    ranks: list[Rank],
    beating: Sequence[int] = (),
    num_ticks: int = 99,
) -> RankWatch:
    watch = RankWatch(beats, dict(enumerate(ranks)), TIMEOUT_S)
    watch._over = Ticking(clocks, beats, beating, num_ticks)
    watch.run()
    return watch


def test_a_rank_without_a_beat_is_killed_and_named_and_the_others_are_not(
    clocks: Clocks, beats: Beats
) -> None:
    ranks = [Rank(10), Rank(11), Rank(12, is_running=False)]  # the last one has ended by itself
    watch = watched(clocks, beats, ranks, beating=[0])
    assert [rank.was_killed for rank in ranks] == [False, True, False]
    assert set(watch.verdicts) == {1}
    said = "the engine process (pid 11) has sent no heartbeat for 9 s (--stall-timeout 8)"
    assert watch.verdicts[1] == said


@pytest.mark.parametrize(("num_ranks", "longest_s"), [(1, TIMEOUT_S), (3, TIMEOUT_S + 1.0)])
@pytest.mark.parametrize("num_more", [0, 1])
def test_a_rank_has_the_timeout_and_among_others_a_grace(
    num_ranks: int, longest_s: float, num_more: int, clocks: Clocks
) -> None:
    """Other ranks may report it, and say more. The first look sees a number that is new to it."""
    ranks = [Rank(10 + number) for number in range(num_ranks)]
    num_ticks = 1 + int(longest_s / TICK_S) + num_more
    with ExitStack() as ends:
        beats = Beats(shared_file("beats", ends), num_ranks)
    watched(clocks, beats, ranks, beating=range(1, num_ranks), num_ticks=num_ticks)
    assert [rank.was_killed for rank in ranks] == [bool(num_more), *[False] * (num_ranks - 1)]


@pytest.mark.parametrize("num_more", [0, 1])
def test_the_only_rank_of_a_machine_has_a_grace_too(
    num_more: int, clocks: Clocks, beats: Beats
) -> None:
    """The other ranks of its group are on other machines."""
    rank = Rank(10)
    watched(clocks, beats, [rank], num_ticks=1 + int((TIMEOUT_S + 1.0) / TICK_S) + num_more)
    assert rank.was_killed == bool(num_more)


def test_a_watch_goes_on_when_its_caller_forgets_a_rank(clocks: Clocks, beats: Beats) -> None:
    """A node forgets ranks that have ended, and a watch in its thread must find the others."""
    ranks = {0: Rank(10, is_running=False), 1: Rank(11)}
    watch = RankWatch(beats, ranks, TIMEOUT_S)
    frozen = ranks[1]
    ticking = Ticking(clocks, beats, [], 99)

    class Forgetting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            ranks.pop(0, None)
            return ticking.wait(timeout)

    watch._over = Forgetting()
    watch.run()
    assert frozen.was_killed


def test_ranks_that_freeze_together_are_named_together(clocks: Clocks, beats: Beats) -> None:
    ranks = [Rank(10), Rank(11), Rank(12)]
    watch = watched(clocks, beats, ranks)
    assert all(rank.was_killed for rank in ranks)
    assert watch.verdicts[1].endswith(", nor has rank 0, nor has rank 2")


def test_a_watch_that_was_ended_kills_no_process(beats: Beats) -> None:
    ranks = [Rank(10), Rank(11), Rank(12)]
    watch = RankWatch(beats, dict(enumerate(ranks)), TIMEOUT_S)
    watch.start()
    watch.end()
    watch.join(PATIENCE_S)
    assert not watch.is_alive()
    assert not any(rank.was_killed for rank in ranks)


# ---- a rank's watch over its own loop


def verdict(
    clocks: Clocks, stage: str, within_s: int, loop: float = 0.0, others: float = 0.0
) -> str | None:
    """Of a loop that stays in one stage, as the pulse asks."""
    watch = LoopWatch(lambda: (stage, 7, 1.0), TIMEOUT_S)
    for _ in range(int(within_s / TICK_S)):
        clocks.tick(loop, others)
        if (reason := watch.look()) is not None:
            return reason
    return None


def test_a_loop_that_waits_in_vain_is_stuck_though_it_asks_the_device_all_the_time(
    clocks: Clocks,
) -> None:
    reason = verdict(clocks, "wait", 99, loop=1.0)
    assert reason == "step 7 has not returned for 9 s (stage 'wait', --stall-timeout 8)"


@pytest.mark.parametrize("share", [0.06, 1.0])
def test_a_loop_that_computes_has_longer_and_not_for_ever(share: float, clocks: Clocks) -> None:
    reason = verdict(clocks, "launch", 999, loop=share)
    assert reason == "step 7 has been computing for 240 s (stage 'launch', --stall-timeout 8)"


def test_a_loop_that_hardly_computes_is_stuck(clocks: Clocks) -> None:
    assert "has not returned for" in (verdict(clocks, "launch", 99, loop=0.04) or "")


def test_a_moment_of_work_now_and_then_does_not_hide_a_hang(clocks: Clocks) -> None:
    """A thread reads the messages of clients that do not know of the hang."""
    watch = LoopWatch(lambda: ("wait", 7, 1.0), TIMEOUT_S)
    for tick in range(int(2 * TIMEOUT_S / TICK_S)):
        clocks.tick(others=0.2 if tick % 8 == 0 else 0.0)
        if watch.look() is not None:
            return
    raise AssertionError("it counts as computing")


def test_a_loop_that_computed_and_hangs_then_is_stuck_a_timeout_later(clocks: Clocks) -> None:
    watch = LoopWatch(lambda: ("launch", 7, 1.0), TIMEOUT_S)
    for _ in range(int(5 * TIMEOUT_S / TICK_S)):
        clocks.tick(others=1.0)
        assert watch.look() is None
    for _ in range(int((TIMEOUT_S + 1.0) / TICK_S)):
        clocks.tick()
        if (reason := watch.look()) is not None:
            break
    assert "has not returned for" in (reason or "")


def test_a_loop_that_waits_while_its_device_thread_computes_is_not_stuck(clocks: Clocks) -> None:
    assert verdict(clocks, "wait", 200, others=0.5) is None


def test_a_loop_at_rest_is_never_stuck(clocks: Clocks) -> None:
    assert verdict(clocks, "", 999) is None


def test_a_loop_that_gets_on_is_not_stuck(clocks: Clocks) -> None:
    stages = itertools.count()
    watch = LoopWatch(lambda: ("wait", 7, float(next(stages))), TIMEOUT_S)
    for _ in range(999):
        clocks.tick()
        assert watch.look() is None
