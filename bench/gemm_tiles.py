"""Tiles that bench/gemm_gpu tries, and a way to compile them without a GPU; times nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from paceline.kernels import gemv_triton
from paceline.kernels.gemv_table import Tile


def candidates(n: int, k: int, rows: int) -> Iterator[Tile]:
    """Tiles worth a try for `rows` rows of an n x k weight."""
    if k < 2048:
        yield from _small(n, k, rows)
    elif rows == 1:
        for block_n, block_k, warps, depth in (
            (4, 1024, 4, 2),
            (4, 2048, 4, 1),
            (4, 4096, 8, 1),
            (8, 2048, 8, 1),
        ):
            if block_n == 4 or n > 4096:
                yield Tile("fma", 1, block_n, block_k, warps, depth)
    else:
        yield from _large(n, k, rows)


def _small(n: int, k: int, rows: int) -> Iterator[Tile]:
    """All weights of a program are on their way before it waits."""
    width = 1 << (k - 1).bit_length()
    if rows == 1:
        cuts = ((8, 4), (16, 4), (8, 2)) if n > 16384 else ((4, 1), (4, 2), (8, 2))
        if n < 1024:  # always as many partial sums
            cuts = ((4, 1), (4, 2), (4, 4)) if k == n or k > n else ((2, 1), (4, 1), (8, 2))
        for block_n, warps in cuts:
            yield Tile("fma", 1, block_n, width, warps, 1)
        return
    for warps in (2, 4) if k < 1024 else (4, 8):
        depth = -(-k // (32 * warps))
        yield Tile("mma", 8, 16, 32, warps, depth)
        if rows > 8:
            yield Tile("mma", 16, 16, 32, warps, depth)
        if rows > 16:
            yield Tile("mma", 32, 16, 32, warps, 3, 1, k)
    if n > 1024:
        yield Tile("mma", min(rows, 16), 32, 32, 2, 9 if rows == 8 else 4, 1, k)
    if rows > 16:
        yield Tile("dot", rows, 32 if n < 16384 else 64, 64, 4, 4, 1, k)


def _large(n: int, k: int, rows: int) -> Iterator[Tile]:
    """(outputs, warps, chunks in flight, inputs pulled ahead); then tiles in shared memory."""
    cuts = {
        8: ((16, 4, 4, 0), (16, 8, 4, 0), (16, 8, 2, 0), (32, 4, 4, 0), (16, 8, 4, 4096)),
        16: ((16, 4, 4, 0), (16, 8, 3, 0), (32, 4, 3, 0), (32, 8, 2, 0)),
        32: ((16, 8, 2, 0), (32, 4, 2, 0), (32, 8, 1, 0)),
        64: (),
    }[rows]
    for block_n, warps, depth, ahead in cuts:
        if (not ahead or n < 16384) and (block_n == 16 or n > 4096):
            yield Tile("mma", rows, block_n, 32, warps, depth, 1, ahead)
    if rows < 32:
        return
    if n < 16384:
        yield Tile("dot", rows, 64, 128, 4, 4, 1, 512)
        yield Tile("dot", rows, 64, 128, 4, 4, 2, 512)
    else:
        yield Tile("dot", rows, 128, 64, 4, 5, 1, 512)
        yield Tile("dot", rows, 128, 64, 4, 5, 1, 0)


class _NoGpu:
    """What Triton asks of a driver when it only compiles for a Hopper GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class _Warm:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.kernel.warmup(*args, grid=grid, **options)


class CompileOnly:
    """Inside, the kernels of gemv_triton are compiled into the cache and not run."""

    def __enter__(self) -> Self:
        driver.set_active(_NoGpu())
        self._kernels = {
            x: getattr(gemv_triton, x) for x in ("fma_kernel", "mma_kernel", "dot_kernel")
        }
        for name, kernel in self._kernels.items():
            setattr(gemv_triton, name, _Warm(kernel))
        return self

    def __exit__(self, *_: object) -> None:
        for name, kernel in self._kernels.items():
            setattr(gemv_triton, name, kernel)
