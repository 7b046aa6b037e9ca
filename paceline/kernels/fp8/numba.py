"""Rows rounded to e4m3, and outputs scaled, on the CPU's vector units.

In torch these would be several passes, whose threads get in the way of the products' threads.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.e4m3 import MOST
from paceline.kernels.fp8.reference import BLOCK
from paceline.kernels.vector.jit import c_function, jit
from paceline.kernels.vector.simd import (
    add,
    div,
    e4m3,
    first_lane,
    larger,
    largest,
    load,
    load_f32,
    load_i64,
    mul,
    packed,
    splat,
    store,
    store_f32,
)
from paceline.kernels.vector.team import run_tiles, team

_ROWS = 16


@jit
def _round_group(x: int, out: int, width: int) -> None:
    """Numbers that share a scale."""
    found, minus = splat(0.0), splat(-1.0)
    whole = width // 16 * 16
    for i in range(0, whole, 16):
        value = load(x + 4 * i)
        found = larger(found, larger(value, mul(value, minus)))
    for i in range(whole, width):
        found = larger(found, splat(abs(load_f32(x + 4 * i))))
    scale = np.float32(largest(found) / np.float32(MOST))
    if scale == 0:
        scale = np.float32(1)
    each = splat(scale)
    for i in range(0, whole, 16):
        store(out + 4 * i, mul(e4m3(div(load(x + 4 * i), each)), each))
    for i in range(whole, width):
        value = splat(load_f32(x + 4 * i))
        store_f32(out + 4 * i, first_lane(mul(e4m3(div(value, each)), each)))


def _round_rows(arguments: int, tile: int, scratch: int) -> None:
    x, x_stride, out = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    num_rows, width = load_i64(arguments + 24), load_i64(arguments + 32)
    size = load_i64(arguments + 40)
    for row in range(tile * _ROWS, min(tile * _ROWS + _ROWS, num_rows)):
        for first in range(0, width, size):
            at = x + row * x_stride + 4 * first
            _round_group(at, out + 4 * (row * width + first), min(size, width - first))


def _scale_rows(arguments: int, tile: int, scratch: int) -> None:
    x, scale, bias = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    num_rows, width = load_i64(arguments + 24), load_i64(arguments + 32)
    whole = width // 16 * 16
    for row in range(tile * _ROWS, min(tile * _ROWS + _ROWS, num_rows)):
        at = x + 4 * row * width
        for i in range(0, whole, 16):
            value = mul(load(at + 4 * i), load(scale + 4 * i))
            store(at + 4 * i, add(value, load(bias + 4 * i)) if bias else value)
        for i in range(whole, width):
            one = np.float32(load_f32(at + 4 * i) * load_f32(scale + 4 * i))
            store_f32(at + 4 * i, np.float32(one + load_f32(bias + 4 * i)) if bias else one)


_ROUND_ROWS, _SCALE_ROWS = c_function(_round_rows, 3), c_function(_scale_rows, 3)


@jit
def _launch(team: int, body: int, numbers: tuple[int, int, int, int, int, int]) -> None:
    run_tiles(team, body, packed(numbers), -(-numbers[3] // _ROWS))


def round_rows(x_TK: Tensor, is_blocked: bool) -> Tensor:
    """What rows are after `quantise_rows`: code * scale in fp32."""
    assert x_TK.dtype == torch.float32
    assert x_TK.stride(1) == 1
    out_TK = torch.empty(x_TK.shape)
    num_rows, width = x_TK.shape
    where = (x_TK.data_ptr(), 4 * x_TK.stride(0), out_TK.data_ptr())
    size = BLOCK if is_blocked else width
    _launch(team.address, _ROUND_ROWS, (*where, num_rows, width, size))
    return out_TK


def scale_outputs(x_TN: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    """x * scale + bias, in place."""
    assert x_TN.is_contiguous()
    bias = 0 if bias_N is None else bias_N.data_ptr()
    where = (x_TN.data_ptr(), scale_N.data_ptr(), bias)
    _launch(team.address, _SCALE_ROWS, (*where, *x_TN.shape, 0))
    return x_TN
