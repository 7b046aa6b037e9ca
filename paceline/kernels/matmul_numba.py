"""The product with panels of weights on the CPU's vector units; twin of kernels/matmul.

Few rows multiply weights as they are decoded. More rows decode a panel once into the thread's
scratch and run over it. Both add in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from paceline.kernels.matmul import PANEL, Kind, PanelWeight
from paceline.kernels.numba_jit import c_function, jit
from paceline.kernels.numba_simd import call_at, load, load_i64, packed, store
from paceline.kernels.numba_team import run_tiles, team
from paceline.kernels.numba_tile import (
    ADD_PRODUCT,
    BFLOAT,
    BLOCK_BYTES,
    BLOCK_INPUTS,
    FLOAT,
    HALF,
    MOST_ROWS,
    Q4,
    Q8,
    coded_product,
    decode_columns,
)

_CODES: dict[Kind, int] = {"q4": Q4, "q8": Q8, "f16": HALF, "bf16": BFLOAT, "f32": FLOAT}
_BLOCK_INPUTS = {kind: BLOCK_INPUTS[code] for kind, code in _CODES.items()}
# Rows that multiply weights while these are decoded, MOST_ROWS at a time.
_DIRECT_ROWS = 36
# Inputs decoded at once for more rows: 128 KiB of fp32, which stay in the second-level cache.
_SLAB = 1024
# Tiles of a product with few rows: so many that threads finish together.
_TILES = 32


def _body(code: int) -> Callable[[int, int, int], None]:
    """The tile function of one kind of weights. Arguments: see `_launch`."""
    block_bytes, block_inputs = BLOCK_BYTES[code], BLOCK_INPUTS[code]
    slab = _SLAB // block_inputs
    rows1, rows2, rows4, rows6, rows8, rows12 = (code * 100 + n for n in (1, 2, 4, 6, 8, 12))

    def product(arguments: int, tile: int, scratch: int) -> None:
        add_product = load_i64(arguments)
        x, x_stride, num_rows = (
            load_i64(arguments + 8),
            load_i64(arguments + 16),
            load_i64(arguments + 24),
        )
        data, num_blocks = load_i64(arguments + 32), load_i64(arguments + 40)
        bias, out, out_stride = (
            load_i64(arguments + 48),
            load_i64(arguments + 56),
            load_i64(arguments + 64),
        )
        num_panels, per_tile = load_i64(arguments + 72), load_i64(arguments + 80)
        first = tile * per_tile
        for panel in range(first, min(first + per_tile, num_panels)):
            columns = data + panel * num_blocks * block_bytes
            bias_at, out_at = bias + panel * 128, out + panel * 128
            if num_rows <= _DIRECT_ROWS:
                for row in range(0, num_rows, MOST_ROWS):
                    count, x_at = min(MOST_ROWS, num_rows - row), x + row * x_stride
                    to = out_at + row * out_stride
                    numbers = (
                        x_at, x_stride, count, columns, num_blocks, bias_at, to, out_stride
                    )  # fmt: skip
                    if count == 1:
                        coded_product(rows1, numbers)
                    elif count == 2:
                        coded_product(rows2, numbers)
                    elif count <= 4:
                        coded_product(rows4, numbers)
                    elif count <= 6:
                        coded_product(rows6, numbers)
                    elif count <= 8:
                        coded_product(rows8, numbers)
                    else:
                        coded_product(rows12, numbers)
                continue
            low, high = load(bias_at), load(bias_at + 64)
            for row in range(num_rows):
                store(out_at + row * out_stride, low)
                store(out_at + row * out_stride + 64, high)
            for block in range(0, num_blocks, slab):
                count = min(slab, num_blocks - block)
                decode_columns(code, columns + block * block_bytes, count, scratch)
                inner, x_at = count * block_inputs, x + 4 * block * block_inputs
                for row in range(0, num_rows, MOST_ROWS):
                    rows, to = min(MOST_ROWS, num_rows - row), out_at + row * out_stride
                    at = x_at + row * x_stride
                    call_at(add_product, (at, x_stride, rows, scratch, 128, inner, to, out_stride))

    return product


@cache
def _compiled(kind: Kind) -> int:
    return c_function(_body(_CODES[kind]), 3)


@jit
def _launch(
    team: int,
    bodies: tuple[int, int],
    rows: tuple[int, int, int],
    weight: tuple[int, int, int],
    out: int,
    width: int,
) -> None:
    body, add_product = bodies
    x, x_stride, num_rows = rows
    data, bias, num_blocks = weight
    num_panels = width // PANEL
    per_tile = max(1, num_panels // _TILES) if num_rows <= _DIRECT_ROWS else 1
    arguments = packed(
        (
            add_product,
            x,
            x_stride,
            num_rows,
            data,
            num_blocks,
            bias,
            out,
            4 * width,
            num_panels,
            per_tile,
        )
    )
    run_tiles(team, body, arguments, -(-num_panels // per_tile))


def matmul(x_TD: Tensor, weight: PanelWeight) -> Tensor:
    """x W^T + bias, fp32, [T, N]."""
    kind, width, num_outputs = weight.kind, weight.width, weight.num_outputs
    num_rows = x_TD.shape[0]
    out_TN = torch.empty(num_rows, width)
    _launch(
        team.address,
        (_compiled(kind), ADD_PRODUCT),
        (x_TD.data_ptr(), 4 * x_TD.stride(0), num_rows),
        (*weight.addresses, weight.num_inputs // _BLOCK_INPUTS[kind]),
        out_TN.data_ptr(),
        width,
    )
    return out_TN if width == num_outputs else out_TN[:, :num_outputs].contiguous()
