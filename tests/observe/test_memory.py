"""What counts as available memory: page cache does, what a cgroup forbids does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.observe.memory import HostMemory, host_memory

GIB = 1 << 30
KIB = 1 << 10
UNLIMITED = 9223372036854771712  # what version 1 has in place of "max"
WARM = HostMemory(32 * GIB, 16 * GIB)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine whose memory is full of page cache."""
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    lines = {"MemTotal": 32 * GIB, "MemFree": GIB // 5, "MemAvailable": 16 * GIB}
    text = "".join(f"{name}:   {value // KIB} kB\n" for name, value in lines.items())
    (folder / "meminfo").write_text(text + "HugePages_Total:       0\n")
    return folder


def join(proc: Path, *lines: str) -> None:
    (proc / "self" / "cgroup").write_text("".join(f"{line}\n" for line in lines))


def limit_v2(folder: Path, limit: int | str, current: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    stat = f"anon 1\nactive_file {cache // 2}\ninactive_file {cache // 2}\n"
    (folder / "memory.stat").write_text(stat)


def limit_v1(folder: Path, limit: int, usage: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    stat = f"rss 1\ntotal_active_file {cache // 2}\ntotal_inactive_file {cache // 2}\n"
    (folder / "memory.stat").write_text(stat)


def test_page_cache_is_available(proc: Path, tmp_path: Path) -> None:
    assert host_memory(proc, tmp_path) == WARM  # not the 0.2 GiB that are free


def test_a_kernel_that_does_not_say_what_is_available_says_what_is_free(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\nMemFree: 3 kB\n")
    assert host_memory(tmp_path, tmp_path) == HostMemory(8 * KIB, 3 * KIB)


def test_a_cgroup_of_version_2_limits_what_is_available(proc: Path, tmp_path: Path) -> None:
    join(proc, "0::/user/job")
    limit_v2(tmp_path / "user" / "job", 4 * GIB, 1 * GIB)
    assert host_memory(proc, tmp_path) == HostMemory(4 * GIB, 3 * GIB)


def test_page_cache_of_a_cgroup_is_available_too(proc: Path, tmp_path: Path) -> None:
    join(proc, "0::/job")
    limit_v2(tmp_path / "job", 4 * GIB, 4 * GIB, cache=3 * GIB)
    assert host_memory(proc, tmp_path).available == 3 * GIB


def test_the_tightest_of_nested_cgroups_counts(proc: Path, tmp_path: Path) -> None:
    join(proc, "0::/user/job")
    limit_v2(tmp_path / "user" / "job", "max", 1 * GIB)
    limit_v2(tmp_path / "user", 6 * GIB, 5 * GIB)
    assert host_memory(proc, tmp_path) == HostMemory(6 * GIB, 1 * GIB)


def test_a_cgroup_of_version_1_limits_what_is_available(proc: Path, tmp_path: Path) -> None:
    join(proc, "5:cpu,cpuacct:/job", "4:memory:/job", "0::/")
    limit_v1(tmp_path / "memory" / "job", 4 * GIB, 3 * GIB, cache=2 * GIB)
    limit_v1(tmp_path / "memory", UNLIMITED, 9 * GIB)
    assert host_memory(proc, tmp_path) == HostMemory(4 * GIB, 3 * GIB)


def test_a_container_that_sees_the_hosts_path_reads_the_root_of_its_mount(
    proc: Path, tmp_path: Path
) -> None:
    join(proc, "4:memory:/docker/0123456789ab")
    limit_v1(tmp_path / "memory", 2 * GIB, 1 * GIB)
    assert host_memory(proc, tmp_path) == HostMemory(2 * GIB, 1 * GIB)


def test_a_full_cgroup_has_nothing_available(proc: Path, tmp_path: Path) -> None:
    join(proc, "0::/")
    limit_v2(tmp_path, GIB, 2 * GIB)
    assert host_memory(proc, tmp_path).available == 0
