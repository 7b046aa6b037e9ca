"""Tiles that bench/gemm_gpu tries, and a way to compile them without a GPU; times nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from paceline.kernels import gemv_triton
from paceline.kernels.gemv_table import Tile


def candidates(end: str, n: int, k: int, rows: int) -> Iterator[Tile]:
    """Tiles worth a try for `rows` rows of an n x k weight."""
    is_small = k < 2048
    if rows == 1 or (rows <= 4 and is_small and n < 16384):
        yield from _fma(1 if rows == 1 else 4, n, k)
    if rows > 1 or not is_small:
        yield from _mma(n, k, rows)
    if rows > 16:
        yield from _dot(n, k, rows)


def _fma(block_t: int, n: int, k: int) -> Iterator[Tile]:
    width = 1 << (k - 1).bit_length()
    if n < 16384 and k < 2048:
        for block_n, warps in ((2, 1), (4, 1), (4, 2), (8, 2)):
            yield Tile("fma", block_t, block_n, width, warps, 1)
    elif k < 2048:  # a vocabulary of a small model
        for block_n, warps in ((8, 2), (8, 4), (16, 4), (4, 1)):
            yield Tile("fma", block_t, block_n, width, warps, 1)
    else:
        for block_n, block_k, warps, depth in (
            (4, 1024, 4, 2),
            (4, 2048, 4, 1),
            (4, 4096, 8, 1),
            (4, 1024, 4, 3),
            (8, 2048, 8, 1),
            (8, 512, 2, 2),
            (2, 4096, 4, 1),
        ):
            yield Tile("fma", block_t, block_n, block_k, warps, depth)


def _mma(n: int, k: int, rows: int) -> Iterator[Tile]:
    """(outputs, warps, chunks in flight, splits) for each number of padded rows."""
    block_t = max(8, min(64, 1 << (rows - 1).bit_length()))
    if k < 2048:
        cuts = {
            8: ((16, 1, 6, 1), (16, 2, 9, 1), (16, 4, 6, 1), (32, 2, 4, 1), (32, 4, 3, 1)),
            16: ((16, 1, 6, 1), (16, 2, 6, 1), (16, 4, 4, 1), (32, 2, 4, 1), (32, 4, 3, 1)),
            32: ((16, 2, 4, 1), (16, 4, 3, 1), (32, 2, 3, 1), (32, 4, 2, 1)),
            64: ((16, 2, 2, 1), (16, 4, 2, 1), (32, 4, 1, 1)),
        }[block_t]
    else:
        cuts = {
            8: ((16, 4, 4, 1), (16, 8, 4, 1), (16, 8, 2, 1), (32, 4, 3, 1), (32, 8, 2, 1)),
            16: ((16, 4, 4, 1), (16, 8, 3, 1), (32, 4, 3, 1), (32, 8, 2, 1), (32, 4, 2, 2)),
            32: ((16, 8, 2, 1), (32, 4, 2, 1), (32, 8, 2, 1), (32, 4, 2, 2)),
            64: ((16, 8, 1, 1), (32, 4, 1, 1), (32, 4, 1, 2)),
        }[block_t]
    for block_n, warps, depth, splits in cuts:
        if splits == 1 or n < 16384:
            yield Tile("mma", block_t, block_n, 32, warps, depth, splits)
    if block_t > 16 and k < 2048:
        yield Tile("mma", 16, 32, 32, 2, 4)
        yield Tile("mma", 16, 16, 32, 2, 6)


def _dot(n: int, k: int, rows: int) -> Iterator[Tile]:
    block_t = 32 if rows <= 32 else 64
    if k < 2048:
        for block_n, warps, depth in ((16, 4, 4), (32, 4, 4), (64, 4, 4), (128, 4, 3)):
            yield Tile("dot", block_t, block_n, 64, warps, depth, 1, k)
        return
    for block_n, block_k, warps, depth, splits, ahead in (
        (64, 128, 4, 4, 1, 512),
        (64, 128, 4, 4, 2, 512),
        (128, 64, 4, 5, 1, 512),
        (128, 64, 4, 5, 1, 0),
        (128, 64, 4, 5, 2, 512),
        (128, 128, 8, 3, 4, 512),
        (128, 64, 8, 6, 1, 256),
    ):
        if splits == 1 or n < 16384:
            yield Tile("dot", block_t, block_n, block_k, warps, depth, splits, ahead)


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
            x: getattr(gemv_triton, x) for x in ("_fma_kernel", "_mma_kernel", "_dot_kernel")
        }
        for name, kernel in self._kernels.items():
            setattr(gemv_triton, name, _Warm(kernel))
        return self

    def __exit__(self, *_: object) -> None:
        for name, kernel in self._kernels.items():
            setattr(gemv_triton, name, kernel)
