"""The product with panels of weights on the CPU's vector units.

Few rows multiply weights as they are decoded. More rows decode a panel once into the thread's
scratch and run over it. Both add in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from paceline.kernels.panels.reference import PANEL, Kind, PanelWeight
from paceline.kernels.vector.jit import c_function, jit
from paceline.kernels.vector.simd import call_at, load, load_i64, packed, store
from paceline.kernels.vector.team import num_threads, run_tiles, team
from paceline.kernels.vector.tile import (
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
# For more rows, inputs and panels that are decoded at once: 12 rows of as many inputs stay in the
# first-level cache while they meet the panels, and these in the second.
_SLAB = 768
_MOST_PANELS = 4
_PANEL_BYTES = 4 * PANEL * _SLAB
# Tiles of a product with few rows, per thread: enough that threads finish together.
_TILES_PER_THREAD = 16


def _body(code: int) -> Callable[[int, int, int], None]:
    """The tile function of one kind of weights. Arguments: see `launch_product`."""
    block_bytes, block_inputs = BLOCK_BYTES[code], BLOCK_INPUTS[code]
    slab = _SLAB // block_inputs

    def product(arguments: int, tile: int, scratch: int) -> None:
        add_product = load_i64(arguments)
        x, x_stride = load_i64(arguments + 8), load_i64(arguments + 16)
        num_rows = load_i64(arguments + 24)
        data, num_blocks = load_i64(arguments + 32), load_i64(arguments + 40)
        bias = load_i64(arguments + 48)
        out, out_stride = load_i64(arguments + 56), load_i64(arguments + 64)
        num_panels, per_tile = load_i64(arguments + 72), load_i64(arguments + 80)
        first = tile * per_tile
        last = min(first + per_tile, num_panels)
        panel_bytes = num_blocks * block_bytes
        if num_rows <= _DIRECT_ROWS:
            for panel in range(first, last):
                columns, bias_at = data + panel * panel_bytes, bias + 128 * panel
                for row in range(0, num_rows, MOST_ROWS):
                    count, at = min(MOST_ROWS, num_rows - row), x + row * x_stride
                    to = out + row * out_stride + 128 * panel
                    numbers = (at, x_stride, count, columns, num_blocks, bias_at, to, out_stride)
                    coded_product(code, numbers)
            return
        for row in range(num_rows):
            for i in range(128 * first, 128 * last, 64):
                store(out + row * out_stride + i, load(bias + i))
        for block in range(0, num_blocks, slab):
            count = min(slab, num_blocks - block)
            for panel in range(first, last):
                columns = data + panel * panel_bytes + block * block_bytes
                decode_columns(code, columns, count, scratch + (panel - first) * _PANEL_BYTES)
            inner, x_at = count * block_inputs, x + 4 * block * block_inputs
            for row in range(0, num_rows, MOST_ROWS):
                rows, at = min(MOST_ROWS, num_rows - row), x_at + row * x_stride
                for panel in range(first, last):
                    columns = scratch + (panel - first) * _PANEL_BYTES
                    to = out + row * out_stride + 128 * panel
                    call_at(add_product, (at, x_stride, rows, columns, 128, inner, to, out_stride))

    return product


@cache
def product_body(kind: Kind) -> int:
    """The address of the tile function."""
    return c_function(_body(_CODES[kind]), 3)


@jit
def launch_product(
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
    if num_rows <= _DIRECT_ROWS:
        per_tile = max(1, num_panels // (_TILES_PER_THREAD * num_threads(team)))
    else:
        per_tile = min(max(1, num_panels // (3 * num_threads(team))), _MOST_PANELS)
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


def num_blocks(weight: PanelWeight) -> int:
    return weight.num_inputs // _BLOCK_INPUTS[weight.kind]


def matmul(x_TD: Tensor, weight: PanelWeight) -> Tensor:
    """x W^T + bias, fp32, [T, N]."""
    assert x_TD.dtype == torch.float32
    assert x_TD.stride(1) == 1
    kind, width, num_outputs = weight.kind, weight.width, weight.num_outputs
    num_rows = x_TD.shape[0]
    out_TN = torch.empty(num_rows, width)
    launch_product(
        team.address,
        (product_body(kind), ADD_PRODUCT),
        (x_TD.data_ptr(), 4 * x_TD.stride(0), num_rows),
        (*weight.addresses, num_blocks(weight)),
        out_TN.data_ptr(),
        width,
    )
    return out_TN if width == num_outputs else out_TN[:, :num_outputs].contiguous()
