"""RMS norm and its fusions on the CPU's vector units; twin of kernels/norm."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.numba_jit import c_function, jit
from paceline.kernels.numba_simd import (
    add,
    float_bits,
    fused,
    load,
    load_f32,
    load_f64,
    load_i64,
    mul,
    packed,
    splat,
    store,
    store_f32,
    total,
)
from paceline.kernels.numba_team import run_tiles, team

_ROWS_PER_TILE = 32


@jit
def scale_row(x: int, weight: int, out: int, width: int, sums: float, eps: float) -> None:
    """out = x / rms(x) * weight, given the sum of squares of x."""
    inverse = np.float32(1.0 / math.sqrt(sums / width + eps))
    scale = splat(inverse)
    whole = width // 16 * 16
    for i in range(0, whole, 16):
        store(out + 4 * i, mul(mul(load(x + 4 * i), scale), load(weight + 4 * i)))
    for i in range(whole, width):
        store_f32(out + 4 * i, load_f32(x + 4 * i) * inverse * load_f32(weight + 4 * i))


@jit
def sum_of_squares(x: int, width: int) -> float:
    """Sixteen partial sums, then their tree, then what is left of the row."""
    sums = splat(0.0)
    whole = width // 16 * 16
    for i in range(0, whole, 16):
        value = load(x + 4 * i)
        sums = fused(value, value, sums)
    result: float = total(sums)
    for i in range(whole, width):
        rest = load_f32(x + 4 * i)
        result += rest * rest
    return result


@jit
def _add_row(x: int, delta: int, width: int) -> None:
    whole = width // 16 * 16
    for i in range(0, whole, 16):
        store(x + 4 * i, add(load(x + 4 * i), load(delta + 4 * i)))
    for i in range(whole, width):
        store_f32(x + 4 * i, load_f32(x + 4 * i) + load_f32(delta + 4 * i))


def _norm_rows(arguments: int, tile: int, scratch: int) -> None:
    x, delta, weight = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    out, num_rows, width = (
        load_i64(arguments + 24),
        load_i64(arguments + 32),
        load_i64(arguments + 40),
    )
    eps = load_f64(arguments + 48)
    first = tile * _ROWS_PER_TILE
    for row in range(first, min(first + _ROWS_PER_TILE, num_rows)):
        at = 4 * row * width
        if delta:
            _add_row(x + at, delta + at, width)
        scale_row(x + at, weight, out + at, width, sum_of_squares(x + at, width), eps)


NORM_ROWS = c_function(_norm_rows, 3)


@jit
def launch_norm(
    team: int, body: int, where: tuple[int, int, int, int], num_rows: int, width: int, eps: float
) -> None:
    """`where`: x, what is added to it first (or 0), weight, out."""
    x, delta, weight, out = where
    arguments = packed((x, delta, weight, out, num_rows, width, float_bits(eps)))
    run_tiles(team, body, arguments, -(-num_rows // _ROWS_PER_TILE))


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis."""
    out_TD = torch.empty_like(x_TD)
    num_rows, width = x_TD.shape
    where = (x_TD.data_ptr(), 0, weight_D.data_ptr(), out_TD.data_ptr())
    launch_norm(team.address, NORM_ROWS, where, num_rows, width, eps)
    return out_TD


def add_rms_norm(residual_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """residual += delta in place, then its norm."""
    out_TD = torch.empty_like(residual_TD)
    num_rows, width = residual_TD.shape
    where = (
        residual_TD.data_ptr(),
        delta_TD.data_ptr(),
        weight_D.data_ptr(),
        out_TD.data_ptr(),
    )
    launch_norm(team.address, NORM_ROWS, where, num_rows, width, eps)
    return out_TD
