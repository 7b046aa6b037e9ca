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
    is_small = k < 2048 and n < 16384
    width = 1 << (k - 1).bit_length()
    if rows <= 4:
        block_t = 1 if rows == 1 else 4
        yield from _fma(block_t, n, width, is_small)
    if rows > 1 or not is_small:
        yield from _dot(rows, n, k, is_small)


def _fma(block_t: int, n: int, width: int, is_small: bool) -> Iterator[Tile]:
    if is_small:
        for block_n, warps in ((2, 1), (4, 1), (4, 2), (8, 2), (8, 4), (4, 4)):
            yield Tile("fma", block_t, block_n, width, warps, 1)
    elif width <= 1024:  # a vocabulary of a small model
        for block_n, warps in ((8, 2), (16, 4), (8, 4), (32, 4), (16, 2)):
            yield Tile("fma", block_t, block_n, width, warps, 1)
    else:
        for block_n, block_k, warps, depth in (
            (4, 1024, 4, 2),
            (8, 1024, 4, 1),
            (8, 1024, 4, 2),
            (8, 2048, 8, 1),
            (4, 2048, 4, 1),
            (8, 512, 2, 2),
            (16, 512, 4, 2),
        ):
            if block_t == 1 or block_n <= 8:
                yield Tile("fma", block_t, block_n, block_k, warps, depth)


def _dot(rows: int, n: int, k: int, is_small: bool) -> Iterator[Tile]:
    block_t = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if is_small:
        for block_n, warps, depth in ((16, 4, 4), (16, 2, 4), (32, 4, 4), (16, 4, 9), (64, 4, 4)):
            yield Tile("dot", block_t, block_n, 64, warps, depth, 1, k)
            if rows > 16 and block_n >= 32:
                yield Tile("dot", 16, block_n, 64, warps, depth, 1, k)
        return
    if block_t == 16:
        cuts = (
            (16, 256, 4, 4, 1),
            (32, 128, 4, 5, 1),
            (32, 256, 4, 4, 1),
            (64, 128, 4, 5, 1),
            (64, 256, 8, 4, 1),
            (32, 256, 4, 4, 2),
            (64, 128, 4, 5, 2),
        )
    else:
        cuts = (
            (64, 128, 4, 4, 1),
            (128, 64, 4, 5, 1),
            (128, 128, 8, 3, 1),
            (64, 128, 4, 4, 2),
            (128, 64, 4, 5, 2),
            (128, 128, 8, 3, 4),
            (128, 64, 8, 5, 4),
            (256, 64, 8, 4, 1),
        )
    for block_n, block_k, warps, depth, splits in cuts:
        if k < 2048:
            block_k, depth = 64, 4
        if k % (block_k * splits) or (splits > 1 and n > 16384):
            continue
        yield Tile("dot", block_t, block_n, block_k, warps, depth, splits, 512)


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
        self._kernels = {x: getattr(gemv_triton, x) for x in ("_fma_kernel", "_mma_kernel", "_dot_kernel")}
        for name, kernel in self._kernels.items():
            setattr(gemv_triton, name, _Warm(kernel))
        return self

    def __exit__(self, *_: object) -> None:
        for name, kernel in self._kernels.items():
            setattr(gemv_triton, name, kernel)
