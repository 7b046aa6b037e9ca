"""Cases of the products of few rows: each way to multiply, each end, odd sizes and real ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.linear.reference import HeadPlaces, NormedRows, Product
from paceline.kernels.linear.tiles import Tile
from tests.kernels.cases.pairs import FLOATS, Arguments, TritonCase

EPS = 1e-5
FUNCTIONS = {
    "plain": "linear",
    "wide": "linear",
    "normed": "norm_linear",
    "gated": "norm_linear_silu",
    "heads": "norm_linear_heads",
    "added": "linear_add",
    "last": "linear_add",
}
ALL = tuple(FUNCTIONS)


@dataclass(frozen=True)
class Shape:
    """One product, and which of its ends are tried."""

    rows: int
    n: int
    k: int
    ends: tuple[str, ...]
    tile: Tile | None = None  # None: what the table says
    has_bias: bool = False
    num_kv: int = 2
    head: int = 16


SMALL = {
    "fma": Shape(1, 96, 80, ALL, Tile("fma", 1, 8, 32, 4, 2)),
    "fma-three-rows-bias": Shape(3, 96, 72, ("heads", "added"), Tile("fma", 4, 16, 128), True),
    "fma-two-rows": Shape(2, 112, 64, ("gated", "plain"), Tile("fma", 2, 4, 64, 2)),
    "mma-bias": Shape(5, 96, 256, ALL, Tile("mma", 8, 16, 32, 2, 3), True),
    "mma-odd": Shape(13, 112, 80, ("heads", "gated", "added"), Tile("mma", 16, 32, 32, 2, 2)),
    "mma-splits": Shape(19, 96, 256, ("heads", "added"), Tile("mma", 16, 16, 32, 2, 1, 2)),
    "dot": Shape(5, 96, 80, ("gated", "plain"), Tile("dot", 16, 32, 16, 4, 2)),
    "dot-splits": Shape(21, 112, 96, ("heads", "added"), Tile("dot", 16, 32, 32, 4, 2, 2), True),
    "tma-few-rows-bias": Shape(21, 112, 96, ALL, Tile("tma", 32, 64, 32, 4, 2), True),
    "tma-many-rows": Shape(131, 112, 96, ALL, Tile("tma", 64, 32, 32, 4, 2)),
    "tma-splits": Shape(70, 112, 160, ("heads", "added"), Tile("tma", 128, 32, 32, 4, 2, 2), True),
    "tma-two-rows": Shape(2, 112, 96, ALL, Tile("tma", 32, 64, 32, 4, 2)),
    "tma-two-rows-splits": Shape(2, 96, 160, ("heads", "added"), Tile("tma", 32, 64, 32, 4, 2, 2)),
    "tma-few-rows-splits": Shape(9, 96, 80, ALL, Tile("tma", 16, 64, 16, 4, 2, 3)),
    "tma-apart": Shape(70, 112, 96, ALL, Tile("tma", 64, 32, 32, 4, 2, 2, 0, True, True), True),
    "one-row-by-default": Shape(1, 96, 72, ("heads", "added")),
    "few-rows-by-default": Shape(7, 96, 72, ("heads", "added")),
    "more-rows-by-default": Shape(40, 96, 72, ("gated", "last"), has_bias=True),
}
LARGE = {
    "8b-one-row": Shape(1, 6144, 4096, ("heads", "gated"), num_kv=8, head=128),
    "8b-eight-rows": Shape(8, 4096, 4096, ("added", "wide"), Tile("mma", 8, 16, 32, 8, 4)),
    "8b-sixty-rows": Shape(60, 4096, 4096, ("added",), Tile("dot", 64, 64, 64, 4, 3, 2, 512)),
    "8b-thirty-rows": Shape(
        30, 6144, 4096, ("heads", "gated"), Tile("tma", 32, 128, 64, 4, 5, 1, 512), False, 8, 128
    ),
    "8b-five-rows": Shape(
        5, 6144, 4096, ("heads", "added"), Tile("tma", 32, 64, 64, 4, 6, 2, 512), False, 8, 128
    ),
    "8b-five-rows-gated": Shape(5, 6144, 4096, ("gated",), Tile("tma", 32, 128, 64, 4, 5, 1, 512)),
    "8b-hundred-rows": Shape(
        100, 6144, 4096, ("heads", "gated"), Tile("tma", 128, 128, 64, 8, 3, 1, 512), False, 8, 128
    ),
    "8b-two-hundred-rows": Shape(
        200, 4096, 4096, ("added", "wide"), Tile("tma", 128, 128, 64, 8, 3, 2, 512, is_apart=True)
    ),
    "135m-one-row": Shape(1, 960, 576, ("heads", "added"), num_kv=3, head=64),
    "135m-thirty-rows": Shape(30, 960, 576, ("heads",), Tile("mma", 8, 16, 32, 2, 9), False, 3, 64),
}

# Rows, outputs, inputs: one tile, some that are not full, more than a group of row tiles.
MANY_ROWS = {
    "one": (128, 128, 64),
    "odd": (300, 256, 192),
    "group": (17 * 128 + 5, 256, 64),
    "8b": (2000, 14336, 4096),
}


def cases() -> Iterator[TritonCase]:
    for name, shape in {**SMALL, **LARGE}.items():
        for end in shape.ends:
            yield TritonCase(
                operation=FUNCTIONS[end],
                name=f"{end}-{name}",
                make=partial(_make, end, shape),
                outputs=partial(_outputs, end, shape),
                dtypes=FLOATS,
                # Many products are added up, and a tile's order of them is not torch's.
                scale=4.0 if name in LARGE else 2.0,
                is_large=name in LARGE,
            )

    for rows, width in ((1, 80), (5, 576), (3, 4096)):
        yield TritonCase(
            operation="scale_rows",
            name=f"{rows}x{width}",
            make=partial(_make_residual, rows, width),
            outputs=lambda _, result: [result.x_TD, result.squares_TP / result.x_TD.shape[1]],
            dtypes=FLOATS,
        )
    for name, (rows, width, inputs) in MANY_ROWS.items():
        yield TritonCase(
            operation="linear_silu",
            name=name,
            make=partial(_make_many, rows, width, inputs),
            outputs=lambda arguments, result: [result],
            dtypes=(torch.float16, torch.bfloat16),
            scale=4.0,
            is_large=inputs > 1024,
            backend="hopper",
        )


def _make_residual(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> Arguments:
    generator = torch.Generator().manual_seed(rows * 7 + width)
    residual_TD = torch.randn(rows, width, generator=generator).to(device)
    norm_D = torch.randn(width, generator=generator).to(device, dtype)
    return residual_TD, norm_D, EPS, norm_D


def _make_many(
    rows: int, width: int, inputs: int, device: torch.device, dtype: torch.dtype
) -> Arguments:
    return _make("plain", Shape(rows, 2 * width, inputs, ()), device, dtype)[:2]


def _make(end: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> Arguments:
    generator = torch.Generator().manual_seed(shape.rows * 7 + shape.n)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device)

    weight = draw(shape.n, shape.k) * shape.k**-0.5
    bias = draw(shape.n).to(dtype) if shape.has_bias else None
    product = Product(weight.to(dtype), bias)
    x = draw(shape.rows, shape.k)
    rows = NormedRows(x.to(dtype), x.square().view(shape.rows, 8, -1).sum(2), EPS)
    residual, norm = draw(shape.rows, shape.n), draw(shape.n).to(dtype)
    arguments: dict[str, Arguments] = {
        "plain": (rows.x_TD, product, None),
        "wide": (rows.x_TD, product, torch.float32),
        "normed": (rows, product),
        "gated": (rows, product),
        "heads": (rows, product, _places(shape, device, dtype, draw)),
        "added": (rows.x_TD, product, residual, norm, EPS),
        "last": (rows.x_TD, product, residual, None, 0.0),
    }
    return (*arguments[end], shape.tile)


def _places(shape: Shape, device: torch.device, dtype: torch.dtype, draw: Any) -> HeadPlaces:
    angle = draw(shape.rows, shape.head // 2)
    key = torch.zeros(shape.num_kv, 2 * shape.rows + 99, shape.head, device=device, dtype=dtype)
    slot = torch.arange(shape.rows, dtype=torch.int32) * 2 - 1  # the first writes nothing
    rotation = torch.polar(torch.ones_like(angle), angle)
    return HeadPlaces(rotation, key, torch.zeros_like(key), slot.to(device))


def _outputs(end: str, shape: Shape, arguments: Arguments, result: Any) -> list[Tensor]:
    if end == "heads":
        places: HeadPlaces = arguments[2]
        num_q = shape.n - 2 * shape.num_kv * shape.head
        return [result[:, :num_q], places.key_NSH, places.value_NSH]
    if end == "last":
        return [arguments[2]]
    if end == "added":
        return [arguments[2], result.x_TD, result.squares_TP.sum(1) / shape.n]
    return [result]
