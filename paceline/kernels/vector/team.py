"""A few threads that share the tiles of one kernel. A tile's result is the same on any of them.

Threads claim tiles from a counter, so a kernel waits only for tiles that a thread has begun: on a
busy machine a worker that is not running costs its help and nothing else, where a fork-join team
would wait for it at every kernel. Workers spin for some microseconds after work, then sleep.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading

import numpy as np

from paceline.kernels.vector.jit import jit
from paceline.kernels.vector.simd import (
    atomic_add,
    atomic_load,
    atomic_store,
    atomic_swap,
    call_at,
    load_i64,
    relax,
    store_i64,
)

# Bytes that every thread has for itself, passed to each tile.
SCRATCH_BYTES = 1 << 20

# The control block: byte offsets of int64 words, those that change on cache lines of their own.
_TICKET, _DONE, _BUSY, _STOP = 0, 64, 128, 192
_BODY, _ARGUMENTS = 256, 264
_SEM_WAIT, _SEM_POST, _YIELD, _NUM_WORKERS, _SCRATCH = 320, 328, 336, 344, 352
# Then for each worker: whether it sleeps, its semaphore on a separate cache line, and its scratch.
_WORKERS, _WORKER_BYTES, _SEMAPHORE, _WORKER_SCRATCH = 384, 128, 64, 120
_MAX_WORKERS = 255
# A ticket is a generation, how many tiles it has, and how many are claimed: one word, so that a
# claim can never be of another kernel than the one it was meant for.
_TILES_SHIFT, _GENERATION_SHIFT = 20, 40
_FIELD = (1 << 20) - 1
MAX_TILES = _FIELD - _MAX_WORKERS
_SPINS_BEFORE_SLEEP = 1500
_SPINS_BEFORE_YIELD = 400


@jit
def _help(team: int, scratch: int) -> bool:
    """Run tiles until all are claimed; False when there was none."""
    ticket = atomic_load(team + _TICKET)
    if ticket & _FIELD >= (ticket >> _TILES_SHIFT) & _FIELD:
        return False
    count = 0
    while True:
        ticket = atomic_add(team + _TICKET, 1)
        tile = ticket & _FIELD
        if tile >= (ticket >> _TILES_SHIFT) & _FIELD:
            break
        # The kernel cannot end before this thread reports its tiles: body and arguments stay.
        call_at(load_i64(team + _BODY), (load_i64(team + _ARGUMENTS), tile, scratch))
        count += 1
    if count:
        atomic_add(team + _DONE, count)
    return count > 0


@jit
def _work(team: int, index: int) -> None:
    """The life of a worker."""
    own = team + _WORKERS + index * _WORKER_BYTES
    scratch = load_i64(own + _WORKER_SCRATCH)
    idle = 0
    while atomic_load(team + _STOP) == 0:
        if index < atomic_load(team + _NUM_WORKERS) and _help(team, scratch):
            idle = 0
            continue
        idle += 1
        if idle < _SPINS_BEFORE_SLEEP:
            relax()
            continue
        idle = 0
        atomic_store(own, 1)
        # Work that came before the flag was up wakes no thread: look once more.
        ticket = atomic_load(team + _TICKET)
        is_over = ticket & _FIELD >= (ticket >> _TILES_SHIFT) & _FIELD
        if is_over and atomic_load(team + _STOP) == 0:
            call_at(load_i64(team + _SEM_WAIT), (own + _SEMAPHORE,))
        atomic_store(own, 0)


@jit
def num_threads(team: int) -> int:
    workers: int = load_i64(team + _NUM_WORKERS)
    return workers + 1


@jit
def _spin(team: int, spins: int) -> int:
    """One turn of a waiting loop: short waits spin, longer ones let others run."""
    if spins < _SPINS_BEFORE_YIELD:
        relax()
        return spins + 1
    call_at(load_i64(team + _YIELD), (0,))
    return spins


@jit
def run_tiles(team: int, body: int, arguments: int, num_tiles: int) -> None:
    """body(arguments, tile, scratch) for every tile; returns when all are done."""
    spins = 0
    while atomic_swap(team + _BUSY, 1) != 0:  # another thread's kernel
        spins = _spin(team, spins)
    scratch = load_i64(team + _SCRATCH)
    num_workers = load_i64(team + _NUM_WORKERS)
    if num_tiles == 1 or num_workers == 0:
        for tile in range(num_tiles):
            call_at(body, (arguments, tile, scratch))
        atomic_store(team + _BUSY, 0)
        return
    store_i64(team + _BODY, body)
    store_i64(team + _ARGUMENTS, arguments)
    atomic_store(team + _DONE, 0)
    generation = (atomic_load(team + _TICKET) >> _GENERATION_SHIFT) + 1
    ticket = (generation & _FIELD) << _GENERATION_SHIFT | num_tiles << _TILES_SHIFT
    atomic_store(team + _TICKET, ticket)
    for index in range(num_workers):
        own = team + _WORKERS + index * _WORKER_BYTES
        if atomic_load(own) != 0 and atomic_swap(own, 0) != 0:
            call_at(load_i64(team + _SEM_POST), (own + _SEMAPHORE,))
    _help(team, scratch)
    spins = 0
    while atomic_load(team + _DONE) != num_tiles:
        spins = _spin(team, spins)
    atomic_store(team + _BUSY, 0)


class _Team:
    """The control block of this process and its worker threads."""

    def __init__(self) -> None:
        words = (_WORKERS + _WORKER_BYTES * _MAX_WORKERS) // 8
        # Touched by workers until the process ends, so it is never freed.
        self._control = np.zeros(words + 8, np.int64)
        self.address = -(-self._control.ctypes.data // 64) * 64
        self._scratch: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []
        self._workers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._libc = ctypes.CDLL(None)

    def set_threads(self, count: int) -> None:
        """Have `count` threads work on a kernel, the calling one among them."""
        with self._lock:
            wanted = max(0, min(count - 1, _MAX_WORKERS))
            if not self._scratch:
                self._prepare()
            while len(self._workers) < wanted and self._can_sleep:
                self._start_worker(len(self._workers))
            self._write(_NUM_WORKERS, min(wanted, len(self._workers)))

    def _prepare(self) -> None:
        self._write(_SCRATCH, self._new_scratch())
        self._can_sleep = all(
            hasattr(self._libc, name) for name in ("sem_init", "sem_wait", "sem_post")
        )
        if self._can_sleep:
            for offset, name in (
                (_SEM_WAIT, "sem_wait"),
                (_SEM_POST, "sem_post"),
                (_YIELD, "sched_yield"),
            ):
                function = ctypes.cast(getattr(self._libc, name), ctypes.c_void_p)
                self._write(offset, function.value or 0)
        atexit.register(self._stop)
        os.register_at_fork(after_in_child=self._forget_workers)

    def _new_scratch(self) -> int:
        self._scratch.append(np.empty(SCRATCH_BYTES + 64, np.uint8))
        return -(-self._scratch[-1].ctypes.data // 64) * 64

    def _start_worker(self, index: int) -> None:
        own = _WORKERS + index * _WORKER_BYTES
        self._write(own + _WORKER_SCRATCH, self._new_scratch())
        semaphore = self.address + own + _SEMAPHORE
        if self._libc.sem_init(ctypes.c_void_p(semaphore), 0, 0) != 0:
            self._can_sleep = False
            return
        thread = threading.Thread(
            target=_work, args=(self.address, index), name=f"kernel-{index + 1}", daemon=True
        )
        thread.start()
        self._workers.append(thread)

    def _write(self, offset: int, value: int) -> None:
        ctypes.c_int64.from_address(self.address + offset).value = value

    def _stop(self) -> None:
        self._write(_STOP, 1)
        for index, thread in enumerate(self._workers):
            semaphore = self.address + _WORKERS + index * _WORKER_BYTES + _SEMAPHORE
            self._libc.sem_post(ctypes.c_void_p(semaphore))
            thread.join(timeout=1.0)

    def _forget_workers(self) -> None:
        """In a forked child there are no workers, and the lock is free."""
        self._workers = []
        self._write(_NUM_WORKERS, 0)
        self._write(_BUSY, 0)


team = _Team()
