"""Benchmarks measure engines only when these are idle, and say so when they never are."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from bench import resting

# Works for a while, says so, then rests.
PROGRAM = """
import time
while time.process_time() < 0.3:
    pass
print(flush=True)
time.sleep(600)
"""


def test_the_cpu_time_of_a_process_is_what_it_worked() -> None:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as started:
        try:
            assert started.stdout is not None
            started.stdout.readline()
            assert resting.cpu_s(started.pid) >= 0.2  # counted in ticks
            assert max(resting.busy_shares([started.pid], 0.2)) < resting.AT_REST
        finally:
            started.kill()


@pytest.fixture
def ends_s(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """By process: until when it works. Time passes when it is slept through."""
    clock = SimpleNamespace(now_s=0.0)
    ends_s: dict[int, float] = {}

    def sleep(seconds: float) -> None:
        clock.now_s += seconds

    fake = SimpleNamespace(sleep=sleep, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(resting, "time", fake)
    monkeypatch.setattr(resting, "cpu_s", lambda pid: min(clock.now_s, ends_s[pid]))
    return ends_s


def test_it_takes_until_the_last_of_them_rests(ends_s: dict[int, float]) -> None:
    ends_s.update({1: 0.0, 2: 3.0})
    # The window from 2.6 s has some work of the second, the one from 3.1 s has none.
    assert resting.wait_for_rest([1, 2], pause_s=0.1) == pytest.approx(3.6)
    assert resting.wait_for_rest([1, 2], pause_s=0.0) == pytest.approx(0.5)


def test_one_that_never_rests_is_an_error(ends_s: dict[int, float]) -> None:
    ends_s[77] = 1e9
    with pytest.raises(TimeoutError, match="77"):
        resting.wait_for_rest([77], pause_s=0.0)
