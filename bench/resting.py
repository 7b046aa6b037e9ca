"""How much CPU time engine processes take, and when they have nothing left to do."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

AT_REST = 0.1  # of a core
WINDOW_S, MOST_S = 0.5, 60.0


def cpu_s(pid: int) -> float:
    """Of all threads of a process since it began."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def busy_shares(pids: Sequence[int], seconds: float) -> list[float]:
    """Of a core, by process, over the next seconds."""
    before = [cpu_s(pid) for pid in pids]
    time.sleep(seconds)
    return [(cpu_s(pid) - was) / seconds for pid, was in zip(pids, before, strict=True)]


def wait_for_rest(pids: Sequence[int], pause_s: float) -> float:
    """Until engines that prepare after a pause without requests are done. Seconds that it took."""
    begin_s = time.monotonic()
    time.sleep(pause_s)
    while max(busy_shares(pids, WINDOW_S), default=0.0) > AT_REST:
        if time.monotonic() - begin_s > MOST_S:
            raise TimeoutError(f"engine processes {list(pids)} do not come to rest")
    return time.monotonic() - begin_s
