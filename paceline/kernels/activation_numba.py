"""Gate activations on the CPU's vector units; twin of kernels/activation."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.numba_jit import c_function, jit
from paceline.kernels.numba_simd import (
    add,
    div,
    exp,
    first_lane,
    load,
    load_f32,
    load_i64,
    mul,
    packed,
    splat,
    store,
    store_f32,
)
from paceline.kernels.numba_team import run_tiles, team

_ROWS_PER_TILE = 16


@jit
def _gate_row(gate: int, up: int, out: int, width: int) -> None:
    """x / (1 + e^-x) * up"""
    one, minus = splat(1.0), splat(-1.0)
    whole = width // 16 * 16
    for i in range(0, whole, 16):
        x = load(gate + 4 * i)
        silu = div(x, add(one, exp(mul(x, minus))))
        store(out + 4 * i, mul(silu, load(up + 4 * i)))
    for i in range(whole, width):
        # The same instructions on sixteen copies of the number.
        x = splat(load_f32(gate + 4 * i))
        silu = div(x, add(one, exp(mul(x, minus))))
        store_f32(out + 4 * i, first_lane(mul(silu, splat(load_f32(up + 4 * i)))))


def _gate_rows(arguments: int, tile: int, scratch: int) -> None:
    gate_up, out, num_rows, width = (
        load_i64(arguments),
        load_i64(arguments + 8),
        load_i64(arguments + 16),
        load_i64(arguments + 24),
    )
    first = tile * _ROWS_PER_TILE
    for row in range(first, min(first + _ROWS_PER_TILE, num_rows)):
        gate = gate_up + 8 * row * width
        _gate_row(gate, gate + 4 * width, out + 4 * row * width, width)


GATE_ROWS = c_function(_gate_rows, 3)


@jit
def launch_gate(team: int, body: int, gate_up: int, out: int, num_rows: int, width: int) -> None:
    arguments = packed((gate_up, out, num_rows, width))
    run_tiles(team, body, arguments, -(-num_rows // _ROWS_PER_TILE))


def silu_and_mul(gate_up_TI: Tensor) -> Tensor:
    """silu(first half) * second half of the fused gate-up projection."""
    num_rows, width = gate_up_TI.shape
    width //= 2
    out_TI = torch.empty(num_rows, width)
    launch_gate(team.address, GATE_ROWS, gate_up_TI.data_ptr(), out_TI.data_ptr(), num_rows, width)
    return out_TI
