"""Measures the CPU time of engine processes, and waits until they are idle."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

AT_REST = 0.1  # of a core
WINDOW_S, MOST_S = 0.5, 60.0


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process since it started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def busy_shares(pids: Sequence[int], seconds: float) -> list[float]:
    """CPU use as a share of a core, by process, over the next seconds."""
    before = [cpu_s(pid) for pid in pids]
    time.sleep(seconds)
    return [(cpu_s(pid) - was) / seconds for pid, was in zip(pids, before, strict=True)]


def wait_for_rest(pids: Sequence[int], pause_s: float) -> float:
    """Wait until engines have finished their idle-time work. Returns the seconds it took."""
    begin_s = time.monotonic()
    time.sleep(pause_s)
    while max(busy_shares(pids, WINDOW_S), default=0.0) > AT_REST:
        if time.monotonic() - begin_s > MOST_S:
            raise TimeoutError(f"engine processes {list(pids)} do not become idle")
    return time.monotonic() - begin_s
