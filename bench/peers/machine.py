"""CPU use of our contenders and of other programs. Reads /proc, Linux only.

Other programs distort a benchmark, so the result records their CPU use.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuClock:
    """CPU seconds since the start: of this process and its descendants, and of all others."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._start_all_s = machine_cpu_s()
        self._start_ours_s = tree_cpu_s(os.getpid())

    def shares(self) -> dict[str, float]:
        """Mean number of cores used by us and by others."""
        wall_s = time.perf_counter() - self._start_s
        ours_s = tree_cpu_s(os.getpid()) - self._start_ours_s
        all_s = machine_cpu_s() - self._start_all_s
        others_s = max(all_s - ours_s, 0.0)
        return {"ours": round(ours_s / wall_s, 3), "others": round(others_s / wall_s, 3)}


def idle_share(pid: int, seconds: float) -> float:
    """Cores that an idle process and its descendants use."""
    start_s, start_cpu_s = time.perf_counter(), tree_cpu_s(pid)
    time.sleep(seconds)
    return (tree_cpu_s(pid) - start_cpu_s) / (time.perf_counter() - start_s)


def machine_cpu_s() -> float:
    """Busy seconds of all cores: user, nice, system, irq, softirq, steal."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of a process and its descendants, children that have ended included."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := _stat(folder)) is not None:
            number = int(folder.name)
            parents[number] = int(fields[1])
            seconds[number] = sum(map(int, fields[11:15])) / _TICKS_PER_S
    tree = {pid}
    while more := {n for n, parent in parents.items() if parent in tree and n not in tree}:
        tree |= more
    return sum(seconds.get(number, 0.0) for number in tree)


def _stat(folder: Path) -> list[str] | None:
    """The fields of /proc/<pid>/stat after the name; None if the process has ended."""
    try:
        text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
