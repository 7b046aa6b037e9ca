"""How much memory this process can still allocate, within cgroup limits.

Needs only the standard library, because `paceline doctor` must work without packages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number if there is no limit


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. The page cache counts as available, because the kernel can free it."""

    total: int
    available: int


# Files of a memory cgroup with its limit and usage, and the page cache entries of memory.stat.
_V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_active_file",
    "total_inactive_file",
)
_V2 = ("memory.max", "memory.current", "active_file", "inactive_file")


def host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """The minimum over the machine and all cgroups of this process."""
    values = _numbers(proc / "meminfo")
    total = values["MemTotal"] * 1024
    available = values.get("MemAvailable", values["MemFree"]) * 1024
    for limit, used in _cgroup_limits(proc / "self" / "cgroup", cgroups):
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return HostMemory(total, available)


def _cgroup_limits(membership: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of this process's memory cgroup and its parents."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names, root = (_V1, cgroups / "memory") if controllers else (_V2, cgroups)
        # In a container the path may be the host's; then only the root of the mount exists.
        inner = PurePosixPath(path).relative_to("/")
        for folder in (inner, *inner.parents):
            if (found := _limit_of(root / folder, names)) is not None:
                yield found


def _limit_of(folder: Path, names: tuple[str, str, str, str]) -> tuple[int, int] | None:
    """None if there is no such cgroup or it has no limit."""
    limit_file, usage_file, *cache = names
    try:
        limit = (folder / limit_file).read_text(encoding="ascii").strip()
        usage = int((folder / usage_file).read_text(encoding="ascii"))
        stat = _numbers(folder / "memory.stat")
    except OSError:
        return None
    if limit == "max" or int(limit) >= _UNLIMITED:
        return None
    return int(limit), usage - sum(stat.get(name, 0) for name in cache)


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line, by its name."""
    lines = path.read_text(encoding="ascii").splitlines()
    words = (line.replace(":", " ").split() for line in lines)
    return {name: int(value) for name, value, *_ in words}
