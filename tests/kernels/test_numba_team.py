"""Tiles of a kernel: each runs exactly once, whoever shares the work and whoever else asks."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from paceline.kernels import table
from paceline.kernels.vector import jit as cached
from paceline.kernels.vector.jit import c_function, jit
from paceline.kernels.vector.simd import atomic_add, load_i64, packed
from paceline.kernels.vector.team import MAX_TILES, run_tiles, team


def _count_tile(arguments: int, tile: int, scratch: int) -> None:
    atomic_add(load_i64(arguments) + 8 * tile, 1)


COUNT_TILE = c_function(_count_tile, 3)


@jit
def _count(address: int, body: int, counters: int, num_tiles: int) -> None:
    run_tiles(address, body, packed((counters,)), num_tiles)


def counted(num_tiles: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    counters = np.zeros(num_tiles, np.int64)
    _count(team.address, COUNT_TILE, counters.ctypes.data, num_tiles)
    return counters


@pytest.fixture(autouse=True)
def _usual_threads_afterwards() -> Iterator[None]:
    yield
    table.set_threads()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_tile_runs_once(threads: int) -> None:
    team.set_threads(threads)
    for num_tiles in (1, 2, 3, 17, 1000):
        for _ in range(50):
            assert (counted(num_tiles) == 1).all()


def test_as_many_tiles_as_a_ticket_can_count() -> None:
    team.set_threads(3)
    assert (counted(MAX_TILES) == 1).all()


def test_workers_that_sleep_wake_up_again() -> None:
    team.set_threads(3)
    for _ in range(5):
        assert (counted(200) == 1).all()
        time.sleep(0.02)  # longer than a worker spins: not a wait for anything


def test_kernels_of_several_threads_take_turns() -> None:
    team.set_threads(2)
    wrong: list[int] = []

    def work() -> None:
        for _ in range(200):
            if not (counted(40) == 1).all():
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_fewer_threads_may_be_asked_for_later() -> None:
    team.set_threads(4)
    assert (counted(100) == 1).all()
    team.set_threads(1)
    assert (counted(100) == 1).all()


def test_kernels_compile_where_no_cache_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setattr(cached, "cache_dir", lambda: blocked)
    cached._cache_folder.cache_clear()
    try:

        @jit
        def double(x: int) -> int:
            return 2 * x

        assert double(21) == 42
        assert "PACELINE_CACHE" in caplog.text
    finally:
        cached._cache_folder.cache_clear()


def test_machine_code_is_kept_under_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "cache_dir", lambda: tmp_path)
    cached._cache_folder.cache_clear()
    try:
        kept = jit(_twice)
        assert kept(3) == 6
        assert list((tmp_path / "numba").rglob("*.nbc"))
    finally:
        cached._cache_folder.cache_clear()


@pytest.mark.parametrize("keep_bytes", [0, 7, 40])
def test_a_damaged_cache_is_compiled_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    keep_bytes: int,
) -> None:
    monkeypatch.setattr(cached, "cache_dir", lambda: tmp_path)
    cached._cache_folder.cache_clear()
    try:
        assert jit(_twice)(3) == 6
        c_function(_nothing, 1)
        for path in (tmp_path / "numba").rglob("*.nb[ci]"):
            path.write_bytes(path.read_bytes()[:keep_bytes])
        assert jit(_twice)(3) == 6
        assert c_function(_nothing, 1)
        assert "remove that folder" in caplog.text
    finally:
        cached._cache_folder.cache_clear()


def test_a_full_disk_costs_the_cache_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cached, "cache_dir", lambda: tmp_path)
    cached._cache_folder.cache_clear()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        cached._cache_folder()
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        doubled, address = jit(_twice)(3), c_function(_nothing, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert doubled == 6
        assert address
        assert "File too large" in caplog.text
        assert not list((tmp_path / "numba").rglob("*.nbc"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        cached._cache_folder.cache_clear()


def _twice(x: int) -> int:
    return 2 * x


def _nothing(x: int) -> None:
    pass
