"""Benchmarks wait until an engine has prepared what it prepares in idle time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.resting import busy_shares, cpu_s, wait_for_rest

# Says so, works for a while, then rests.
PROGRAM = """
import sys, time
print(flush=True)
end_s = time.process_time() + float(sys.argv[1])
while time.process_time() < end_s:
    pass
time.sleep(60)
"""


@contextmanager
def process(busy_s: float) -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(busy_s)], stdout=subprocess.PIPE
    ) as started:
        assert started.stdout is not None
        started.stdout.readline()
        try:
            yield started.pid
        finally:
            started.kill()


def test_it_takes_until_the_last_of_them_rests() -> None:
    begin_s = time.monotonic()
    with process(0.0) as idle, process(1.5) as busy:
        taken_s = wait_for_rest([idle, busy], pause_s=0.1)
        assert cpu_s(busy) >= 1.4, "it was still at work"  # counted in ticks
        assert max(busy_shares([idle, busy], 0.2)) < 0.1
    assert 0.1 <= taken_s <= time.monotonic() - begin_s


def test_one_that_never_rests_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.resting.MOST_S", 0.5)
    with process(60.0) as busy, pytest.raises(TimeoutError, match=str(busy)):
        wait_for_rest([busy], pause_s=0.0)
