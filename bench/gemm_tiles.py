"""Tiles that bench/gemm_gpu tries, and how to compile them without a GPU. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from paceline.kernels.linear.tiles import Tile
from paceline.kernels.linear.triton import products

# By rows and outputs: (rows, outputs, inputs, warps, stages, splits, splits summed separately).
# Chosen so that a product fills 132 multiprocessors about once, with one program of up to 227 KiB
# or two of half that each. All compile without spills.
# Outputs: "wide" above 16384 (gate and up: half of each), "deep" few outputs from many inputs.
Cuts = tuple[tuple[int, int, int, int, int, int, bool], ...]
FEW: dict[str, Cuts] = {
    "wide": (
        (0, 128, 64, 4, 5, 1, False),
        (0, 256, 64, 8, 5, 1, False),
    ),
    "middle": (
        (0, 64, 128, 4, 6, 1, False),
        (0, 64, 128, 4, 4, 2, False),
        (0, 128, 128, 4, 4, 2, False),
    ),
    "narrow": (
        (0, 64, 128, 4, 6, 2, False),
        (0, 64, 128, 4, 4, 4, False),
        (0, 64, 128, 4, 4, 4, True),
    ),
    "deep": (
        (0, 64, 128, 4, 6, 2, False),
        (0, 64, 128, 4, 4, 4, False),
        (0, 64, 128, 4, 4, 4, True),
        (0, 128, 128, 4, 4, 4, True),
    ),
}
CUTS: dict[int, dict[str, Cuts]] = {
    32: FEW,
    64: {
        "wide": (
            (64, 128, 64, 4, 4, 1, False),
            (64, 256, 64, 8, 5, 1, False),
            (64, 256, 64, 4, 5, 1, False),
        ),
        "middle": (
            (64, 64, 128, 4, 6, 1, False),
            (64, 64, 64, 4, 6, 2, False),
            (64, 128, 64, 4, 8, 2, False),
        ),
        "narrow": (
            (64, 64, 128, 4, 6, 2, False),
            (64, 64, 128, 4, 6, 2, True),
            (64, 64, 64, 4, 6, 4, True),
            (64, 128, 64, 4, 8, 4, True),
        ),
        "deep": (
            (64, 64, 128, 4, 6, 2, True),
            (64, 64, 64, 4, 6, 4, True),
            (64, 128, 64, 4, 8, 4, True),
            (64, 128, 128, 4, 4, 4, True),
        ),
    },
    128: {
        "wide": (
            (128, 256, 64, 8, 4, 1, False),
            (128, 128, 64, 4, 3, 1, False),
            (128, 128, 64, 8, 3, 1, False),
        ),
        "middle": (
            (64, 128, 64, 8, 7, 1, False),
            (128, 64, 64, 8, 8, 1, False),
            (128, 64, 64, 8, 4, 2, False),
            (128, 128, 64, 8, 6, 2, False),
        ),
        "narrow": (
            (128, 64, 64, 8, 8, 2, False),
            (128, 64, 64, 8, 8, 2, True),
            (64, 128, 64, 4, 8, 2, True),
            (128, 128, 64, 8, 6, 4, True),
        ),
        "deep": (
            (128, 128, 64, 8, 6, 4, True),
            (128, 128, 128, 8, 3, 4, True),
            (128, 256, 64, 8, 4, 8, True),
            (128, 128, 64, 4, 3, 8, True),
        ),
    },
    256: {
        "wide": (
            (256, 128, 64, 8, 4, 1, False),
            (128, 256, 64, 8, 4, 1, False),
            (128, 128, 64, 4, 3, 1, False),
        ),
        "middle": (
            (128, 128, 64, 8, 6, 1, False),
            (256, 64, 64, 8, 5, 1, False),
            (128, 64, 64, 8, 4, 1, False),
            (128, 128, 64, 8, 3, 2, False),
        ),
        "narrow": (
            (128, 128, 64, 8, 6, 2, False),
            (128, 128, 64, 8, 6, 2, True),
            (256, 128, 64, 8, 4, 4, True),
        ),
        "deep": (
            (256, 128, 64, 8, 4, 4, True),
            (128, 256, 64, 8, 4, 4, True),
            (128, 128, 64, 8, 6, 2, True),
            (128, 128, 64, 8, 3, 4, True),
        ),
    },
}  # fmt: skip
AHEAD = 512


def candidates(n: int, k: int, rows: int) -> Iterator[Tile]:
    """Tiles to try for `rows` rows of an n x k weight."""
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
        yield from _few_large(n, rows)
        yield from _many_large(n, k, rows)


def variants(tile: Tile) -> list[Tile]:
    """The same tile with and without prefetched weights; only a stack shows which is faster."""
    return [tile, tile._replace(ahead=0)] if tile.kind == "tma" and tile.ahead else [tile]


def _small(n: int, k: int, rows: int) -> Iterator[Tile]:
    """A program requests all its weights before it waits."""
    width = 1 << (k - 1).bit_length()
    if rows == 1:
        cuts = ((8, 4), (16, 4), (8, 2)) if n > 16384 else ((4, 1), (4, 2), (8, 2))
        if n < 1024:  # always as many partial sums
            cuts = ((4, 1), (4, 2), (4, 4)) if k == n or k > n else ((2, 1), (4, 1), (8, 2))
        for block_n, warps in cuts:
            yield Tile("fma", 1, block_n, width, warps, 1)
        return
    if rows > 64:
        yield from _many_small(n, k, rows)
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


def _many_small(n: int, k: int, rows: int) -> Iterator[Tile]:
    if n > 16384:
        yield Tile("tma", 128, 128, 64, 8, 4, 1, k)
        return
    stages = min(9, k // 64)
    wide = 64 if n > 1024 else 32
    yield Tile("tma", 64, wide, 64, 4, stages, 1, k)
    yield Tile("tma", 64, wide // 2, 64, 4, stages, 1, k)
    if n > 1024:
        yield Tile("tma", 128, 64, 64, 8, min(stages, 8), 1, k)
    elif k > 1024:
        yield Tile("tma", 64, 32, 64, 4, stages, 2, k // 2)
        yield Tile("tma", 64, 64, 64, 4, stages, 4, k // 4)
    warps = 2 if k < 1024 else 8
    yield Tile("mma", 16, 16, 32, warps, -(-k // (32 * warps)))


def _few_large(n: int, rows: int) -> Iterator[Tile]:
    """(outputs, warps, chunks in flight, inputs prefetched) of tiles that read memory directly."""
    block_t = max(rows, 8)
    cuts = {
        8: ((16, 4, 4, 0), (16, 8, 4, 0), (16, 8, 2, 0), (32, 4, 4, 0), (16, 8, 4, 4096)),
        16: ((16, 8, 3, 0), (32, 4, 3, 0)),
        32: ((16, 8, 2, 0), (32, 4, 2, 0)),
    }.get(block_t, ())
    for block_n, warps, depth, ahead in cuts:
        if (not ahead or n < 16384) and (block_n == 16 or n > 4096):
            yield Tile("mma", block_t, block_n, 32, warps, depth, 1, ahead)


def _many_large(n: int, k: int, rows: int) -> Iterator[Tile]:
    """Tiles loaded by TMA; those of 32 rows also take fewer rows."""
    few = "deep" if k > 8192 else "narrow"
    width = "wide" if n > 16384 else "middle" if n > 4096 else few
    heights = (16, 32) if rows == 16 else (max(rows, 32),)
    for block_t, block_n, block_k, warps, depth, splits, is_apart in CUTS[heights[-1]][width]:
        for height in (block_t,) if block_t else heights:
            cut = (height, block_n, block_k, warps, depth, splits)
            yield Tile("tma", *cut, ahead=AHEAD, is_apart=is_apart)


class NoGpu:
    """The driver interface that Triton needs to compile for a Hopper GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class _Warm:
    """A kernel whose launch only compiles it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.kernel.warmup(*args, grid=grid, **options)


class CompileOnly:
    """In this context, launches of linear/triton kernels only compile them into the cache."""

    def __enter__(self) -> Self:
        driver.set_active(NoGpu())
        self._kernels = {
            x: getattr(products, x)
            for x in ("fma_kernel", "mma_kernel", "dot_kernel", "tma_kernel", "sum_kernel")
        }
        for name, kernel in self._kernels.items():
            setattr(products, name, _Warm(kernel))
        return self

    def __exit__(self, *_: object) -> None:
        for name, kernel in self._kernels.items():
            setattr(products, name, kernel)
