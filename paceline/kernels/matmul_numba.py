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
from paceline.kernels.numba_simd import load, load_i64, packed, store
from paceline.kernels.numba_team import run_tiles, team
from paceline.kernels.numba_tile import (
    BFLOAT,
    BLOCK_BYTES,
    BLOCK_INPUTS,
    FLOAT,
    HALF,
    MOST_ROWS,
    Q4,
    Q8,
    add_product,
    coded_product,
    decode_columns,
)

_CODES: dict[Kind, int] = {"q4": Q4, "q8": Q8, "f16": HALF, "bf16": BFLOAT, "f32": FLOAT}
_MOST_DIRECT_ROWS = 8
# Inputs decoded at once: 128 KiB of fp32, which stay in the core's second-level cache.
_SLAB = 1024
# Tiles of a product with few rows: so many that threads finish together.
_TILES = 32


def _body(code: int) -> Callable[[int, int, int], None]:
    """The tile function of one kind of weights. Arguments: see `_launch`."""
    block_bytes, block_inputs = BLOCK_BYTES[code], BLOCK_INPUTS[code]
    rows1, rows2, rows4, rows6, rows8 = (code * 100 + n for n in (1, 2, 4, 6, 8))

    def product(arguments: int, tile: int, scratch: int) -> None:
        x, x_stride, num_rows = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
        data, num_blocks = load_i64(arguments + 24), load_i64(arguments + 32)
        bias, out, out_stride = (
            load_i64(arguments + 40),
            load_i64(arguments + 48),
            load_i64(arguments + 56),
        )
        num_panels, per_tile = load_i64(arguments + 64), load_i64(arguments + 72)
        first = tile * per_tile
        for panel in range(first, min(first + per_tile, num_panels)):
            columns = data + panel * num_blocks * block_bytes
            bias_here, out_here = bias + panel * 128, out + panel * 128
            if num_rows <= 8:
                numbers = (
                    x, x_stride, num_rows, columns, num_blocks, bias_here, out_here, out_stride
                )
                if num_rows == 1:
                    coded_product(rows1, numbers)
                elif num_rows == 2:
                    coded_product(rows2, numbers)
                elif num_rows <= 4:
                    coded_product(rows4, numbers)
                elif num_rows <= 6:
                    coded_product(rows6, numbers)
                else:
                    coded_product(rows8, numbers)
                continue
            low, high = load(bias_here), load(bias_here + 64)
            for row in range(num_rows):
                store(out_here + row * out_stride, low)
                store(out_here + row * out_stride + 64, high)
            for block in range(0, num_blocks, _SLAB // block_inputs):
                count = min(_SLAB // block_inputs, num_blocks - block)
                decode_columns(code, columns + block * block_bytes, count, scratch)
                x_here = x + 4 * block * block_inputs
                for row in range(0, num_rows, MOST_ROWS):
                    add_product(
                        x_here + row * x_stride,
                        x_stride,
                        min(MOST_ROWS, num_rows - row),
                        scratch,
                        128,
                        count * block_inputs,
                        out_here + row * out_stride,
                        out_stride,
                    )

    return product


@cache
def _compiled(kind: Kind) -> int:
    return c_function(_body(_CODES[kind]), 3)


@jit
def _launch(
    team: int, body: int, rows: tuple[int, int, int], weight: tuple[int, int, int], out: int, width: int, per_tile: int
) -> None:
    x, x_stride, num_rows = rows
    data, num_blocks, bias = weight
    num_panels = width // PANEL
    arguments = packed(
        (x, x_stride, num_rows, data, num_blocks, bias, out, 4 * width, num_panels, per_tile)
    )
    run_tiles(team, body, arguments, -(-num_panels // per_tile))


def matmul(x_TD: Tensor, weight: PanelWeight) -> Tensor:
    """x W^T + bias, fp32, [T, N]."""
    num_rows = x_TD.shape[0]
    width = weight.bias_N.shape[0]
    out_TN = torch.empty(num_rows, width)
    num_panels = width // PANEL
    per_tile = max(1, num_panels // _TILES) if num_rows <= 8 else 1
    code = _CODES[weight.kind]
    _launch(
        team.address,
        _compiled(weight.kind),
        (x_TD.data_ptr(), 4 * x_TD.stride(0), num_rows),
        (weight.data.data_ptr(), weight.num_inputs // BLOCK_INPUTS[code], weight.bias_N.data_ptr()),
        out_TN.data_ptr(),
        width,
        per_tile,
    )
    return out_TN if width == weight.num_outputs else out_TN[:, : weight.num_outputs].contiguous()
