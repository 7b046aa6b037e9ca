"""Cases of rows in e4m3 and their products: both kinds of scales, each way to multiply, odd sizes,
rows of zeros, of huge, tiny and no numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.kernels.e4m3 import MOST
from paceline.kernels.fp8.reference import BLOCK, Fp8Rows, quantise_rows, quantise_weight
from paceline.kernels.linear.tiles import Tile
from tests.kernels.cases.pairs import FLOATS, TOLERANCE, Arguments, TritonCase

# Ampere has no e4m3.
LEAST_ARCH = 89
WIDTHS = {"one-row": (1, 80), "odd": (7, 300), "one-group": (3, 128), "wide": (4, 4096)}
FUSED = (("norm_rows", False), ("norm_rows", True), ("silu_rows", False))
LARGE_WIDTHS = {"8b-rows": (64, 4096), "8b-inner": (2048, 14336)}


@dataclass(frozen=True)
class Shape:
    """One product."""

    rows: int
    n: int
    k: int
    tile: Tile | None = None  # None: what the table says
    has_bias: bool = False


SMALL = {
    "one-row": Shape(1, 96, 80),
    "few-rows-bias": Shape(7, 200, 272, has_bias=True),
    "odd-inputs": Shape(9, 70, 203),
    "most-of-few": Shape(64, 130, 144),
    "many-rows-bias": Shape(130, 48, 160, has_bias=True),
    "dot-splits": Shape(5, 96, 400, Tile("dot", 16, 32, 32, 4, 2, 2)),
    "mma": Shape(5, 96, 256, Tile("mma", 8, 16, 64, 2, 2), True),
    "mma-splits": Shape(19, 112, 272, Tile("mma", 16, 32, 64, 2, 1, 2)),
    "tma-splits": Shape(9, 96, 656, Tile("tma", 16, 64, 128, 4, 2, 4), True),
    "tma-sixty-rows": Shape(60, 200, 272, Tile("tma", 64, 64, 128, 4, 2)),
    "tma-hundred-rows": Shape(100, 200, 272, Tile("tma", 128, 64, 128, 4, 2, 2)),
    "tma-many-rows": Shape(131, 112, 96, Tile("tma", 128, 64, 64, 8, 2), True),
    "tma-apart": Shape(70, 112, 96, Tile("tma", 64, 32, 32, 4, 2, 2, 0, True, True), True),
}
LARGE = {
    f"8b-{rows}": Shape(rows, n, 4096)
    for rows, n in ((1, 6144), (8, 4096), (64, 28672), (100, 4096), (2048, 4096))
}


def cases() -> Iterator[TritonCase]:
    for name, (rows, width) in {**WIDTHS, **LARGE_WIDTHS}.items():
        for is_blocked in (False, True):
            yield TritonCase(
                operation="quantise_rows",
                name=f"{name}-{_kind(is_blocked)}",
                make=partial(_make_rows, rows, width, is_blocked),
                # Every bit is the same.
                outputs=lambda _, rows: [rows[0].view(torch.uint8), rows[1].view(torch.int32)],
                dtypes=FLOATS,
                is_large=name in LARGE_WIDTHS,
                least_arch=LEAST_ARCH,
            )
            for operation, has_delta in (
                ("norm_rows", False),
                ("norm_rows", True),
                ("silu_rows", False),
            ):
                yield TritonCase(
                    operation=operation,
                    name=f"{name}-{_kind(is_blocked)}{'-delta' * has_delta}",
                    make=partial(_make_fused, operation, (rows, width), has_delta, is_blocked),
                    outputs=_numbers,
                    dtypes=FLOATS,
                    # The last bit of a norm may be another code, which is an eighth at most.
                    scale=0.13 / TOLERANCE[torch.float32],
                    is_large=name in LARGE_WIDTHS,
                    least_arch=LEAST_ARCH,
                )
    for name, shape in {**SMALL, **LARGE}.items():
        for is_blocked in (False,) if name.startswith("mma") else (False, True):
            # Hopper's matrix units do not add up e4m3 products in fp32.
            for kinds, scale in (((torch.float32,), 50.0), (FLOATS[1:], 2.0)):
                yield TritonCase(
                    operation="fp8_linear",
                    name=f"{name}-{_kind(is_blocked)}",
                    make=partial(_make, shape, is_blocked),
                    outputs=_outputs,
                    dtypes=kinds,
                    scale=scale,
                    is_large=name in LARGE,
                    least_arch=LEAST_ARCH,
                )


def _kind(is_blocked: bool) -> str:
    return "blocks" if is_blocked else "channels"


def _make_rows(
    rows: int, width: int, is_blocked: bool, device: torch.device, dtype: torch.dtype
) -> Arguments:
    """With gaps between rows, and rows that are hard."""
    generator = torch.Generator().manual_seed(rows + width)
    x_TK = torch.randn(rows, width + 16, generator=generator)
    if rows > 2:
        x_TK[0] = 0.0
        x_TK[1] *= 1e4 if dtype == torch.float16 else 1e30
        x_TK[2, width // 2] = float("nan")
    if rows > 3:
        x_TK[3] *= 1e-7 if dtype == torch.float16 else 1e-42
    if rows > 4:
        x_TK[4, 5] = float("inf")
        x_TK[5] *= torch.exp(4 * torch.randn(width + 16, generator=generator)).clamp(max=1e4)
    return x_TK.to(device, dtype)[:, :width], is_blocked


def _make_fused(
    operation: str,
    size: tuple[int, int],
    has_delta: bool,
    is_blocked: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Arguments:
    rows, width = size
    generator = torch.Generator().manual_seed(rows + width)
    shapes = ((rows, 2 * width), (rows, width), (width,))
    x, delta, weight = (torch.randn(s, generator=generator).to(device) for s in shapes)
    if operation == "silu_rows":
        return x.to(dtype), is_blocked
    more = delta.to(dtype) if has_delta else None
    return x[:, :width].contiguous(), more, weight, 1e-5, dtype, is_blocked


def _numbers(arguments: Arguments, rows: Fp8Rows) -> list[Tensor]:
    """What the codes stand for; and the residual, which a norm writes."""
    codes_TK, scale_TG = rows
    width = codes_TK.shape[1] if scale_TG.shape[1] == 1 else BLOCK
    scale_TK = scale_TG.repeat_interleave(width, 1)
    numbers_TK = codes_TK.float() * scale_TK[:, : codes_TK.shape[1]]
    return [numbers_TK] if len(arguments) == 2 else [numbers_TK, arguments[0]]


def _make(shape: Shape, is_blocked: bool, device: torch.device, dtype: torch.dtype) -> Arguments:
    generator = torch.Generator().manual_seed(shape.rows * 7 + shape.n)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device)

    weight_NK, x_TK = draw(shape.n, shape.k) * shape.k**-0.5, draw(shape.rows, shape.k)
    if shape.rows > 4:
        x_TK[1] = 0.0
        x_TK[2, shape.k // 2] = float("nan")
        x_TK[3] *= 1e-3
        x_TK[4, :40] *= 1e3
    bias = draw(shape.n).to(dtype) if shape.has_bias else None
    rows = quantise_rows(x_TK, is_blocked)
    return rows, quantise_weight(weight_NK, is_blocked), bias, dtype, shape.tile


def _outputs(arguments: Arguments, result: Tensor) -> list[Tensor]:
    """Relative to the largest number of a row."""
    rows: Fp8Rows = arguments[0]
    largest_T = (rows.scale_TG.nan_to_num(1.0).amax(1) * MOST).clamp(min=1.0)
    return [(result.float() / largest_T.unsqueeze(1)).to(result.dtype)]
