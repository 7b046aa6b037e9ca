"""Who counts as dead: beats that stay away, loops that hang; not those that are only slow."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from paceline.engine.launch import path_of, shared_file
from paceline.engine.life import Beats, LoopWatch, RankWatch, Stillness
from paceline.errors import EngineDead

TIMEOUT_S = 0.2
LONG_S = 2.5  # after which one that hangs has been found out
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


def test_time_without_a_check_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    still = Stillness(tick_s=1.0)
    assert still.look("a") == 0.0
    now_s += 1.0
    assert still.look("a") == 1.0
    now_s += 3600.0  # Ctrl-Z, a laptop that sleeps
    assert still.look("a") == 3.0
    now_s += 1.0
    assert still.look("b") == 0.0


def test_a_rank_without_a_beat_is_killed_and_named_and_the_others_are_not(beats: Beats) -> None:
    ranks = [Rank(10), Rank(11), Rank(12, is_running=False)]  # the last one has ended by itself
    watch = RankWatch(beats, dict(enumerate(ranks)), TIMEOUT_S)
    watch.start()
    give_up_s = time.monotonic() + PATIENCE_S
    while watch.is_alive() and time.monotonic() < give_up_s:
        beats.counts[0] += 1
        time.sleep(0.01)
    assert [rank.was_killed for rank in ranks] == [False, True, False]
    assert set(watch.verdicts) == {1}
    assert watch.verdicts[1].startswith("the engine process (pid 11) has sent no heartbeat for")


def test_ranks_that_freeze_together_are_named_together(beats: Beats) -> None:
    ranks = [Rank(10), Rank(11), Rank(12)]
    watch = RankWatch(beats, dict(enumerate(ranks)), TIMEOUT_S)
    watch.start()
    watch.join(PATIENCE_S)
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


class Loop:
    """A loop in a thread of its own that stays in one stage, and the watch that it made."""

    def __init__(self, stage: str, *, computes: bool) -> None:
        self.over = threading.Event()
        self._made = threading.Event()
        self._stage, self._computes = stage, computes
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._made.wait()

    def _run(self) -> None:
        self.watch = LoopWatch(lambda: (self._stage, 7, 1.0), TIMEOUT_S)
        self._made.set()
        while not self.over.wait(0.0 if self._computes else 0.05):
            pass

    def verdict(self, within_s: float) -> str | None:
        """As the pulse asks."""
        give_up_s = time.monotonic() + within_s
        try:
            while time.monotonic() < give_up_s:
                if (reason := self.watch.look()) is not None:
                    return reason
                time.sleep(TIMEOUT_S / 8)
        finally:
            self.over.set()
            self._thread.join()
        return None


def test_a_loop_that_waits_in_vain_is_stuck_though_it_asks_the_device_all_the_time() -> None:
    reason = Loop("wait", computes=True).verdict(PATIENCE_S)
    assert reason is not None
    assert "step 7 has not returned for" in reason
    assert "(stage 'wait', --stall-timeout 0.2)" in reason


def test_a_loop_that_computes_has_longer_and_not_for_ever() -> None:
    began_s = time.monotonic()
    reason = Loop("launch", computes=True).verdict(PATIENCE_S)
    assert time.monotonic() - began_s > LONG_S
    assert reason is not None
    assert "step 7 has been computing for" in reason


def test_a_loop_that_waits_while_its_device_thread_computes_is_not_stuck() -> None:
    device = Loop("wait", computes=True)
    assert Loop("wait", computes=False).verdict(LONG_S) is None
    device.over.set()


def test_a_loop_at_rest_is_never_stuck() -> None:
    assert Loop("", computes=False).verdict(LONG_S) is None


def test_a_loop_that_gets_on_is_not_stuck() -> None:
    loop = Loop("plan", computes=False)
    stages = iter(range(10**6))
    loop.watch._doing = lambda: ("wait", 7, float(next(stages)))
    assert loop.verdict(LONG_S) is None
