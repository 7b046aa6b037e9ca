"""Norms, gates, head norms with rotation and the KV write, on the CPU's vector units."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.elementwise.reference import HeadNorms
from paceline.kernels.kv_codes.reference import KvScales
from paceline.kernels.vector.jit import c_function, jit
from paceline.kernels.vector.simd import (
    add,
    div,
    exp,
    first_lane,
    float_bits,
    fused,
    load,
    load_f32,
    load_f64,
    load_i64,
    mul,
    packed,
    rotate,
    splat,
    store,
    store_codes,
    store_f32,
    total,
)
from paceline.kernels.vector.team import run_tiles, team

_NORM_ROWS = 32


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
    out, num_rows = load_i64(arguments + 24), load_i64(arguments + 32)
    width = load_i64(arguments + 40)
    eps = load_f64(arguments + 48)
    first = tile * _NORM_ROWS
    for row in range(first, min(first + _NORM_ROWS, num_rows)):
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
    run_tiles(team, body, arguments, -(-num_rows // _NORM_ROWS))


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """x / rms(x) * weight over the last axis. All in fp32."""
    out_TD = torch.empty_like(x_TD)
    num_rows, width = x_TD.shape
    where = (x_TD.data_ptr(), 0, weight_D.data_ptr(), out_TD.data_ptr())
    launch_norm(team.address, NORM_ROWS, where, num_rows, width, eps)
    return out_TD


def add_rms_norm(
    residual_TD: Tensor,
    delta_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
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


_GATE_ROWS = 16


@jit
def gate_row(gate: int, x: int, out: int, width: int, is_sigmoid: bool) -> None:
    """x times gate / (1 + e^-gate), or times 1 / (1 + e^-gate)."""
    one, minus = splat(1.0), splat(-1.0)
    whole = width // 16 * 16
    for i in range(0, whole, 16):
        g = load(gate + 4 * i)
        factor = div(one if is_sigmoid else g, add(one, exp(mul(g, minus))))
        store(out + 4 * i, mul(factor, load(x + 4 * i)))
    for i in range(whole, width):
        # The same instructions on sixteen copies of the number.
        g = splat(load_f32(gate + 4 * i))
        factor = div(one if is_sigmoid else g, add(one, exp(mul(g, minus))))
        store_f32(out + 4 * i, first_lane(mul(factor, splat(load_f32(x + 4 * i)))))


def _gate_rows(arguments: int, tile: int, scratch: int) -> None:
    gate_up, out = load_i64(arguments), load_i64(arguments + 8)
    num_rows, width = load_i64(arguments + 16), load_i64(arguments + 24)
    first = tile * _GATE_ROWS
    for row in range(first, min(first + _GATE_ROWS, num_rows)):
        gate = gate_up + 8 * row * width
        gate_row(gate, gate + 4 * width, out + 4 * row * width, width, False)


GATE_ROWS = c_function(_gate_rows, 3)


@jit
def launch_gate(team: int, body: int, gate_up: int, out: int, num_rows: int, width: int) -> None:
    arguments = packed((gate_up, out, num_rows, width))
    run_tiles(team, body, arguments, -(-num_rows // _GATE_ROWS))


def silu_and_mul(gate_up_TI: Tensor) -> Tensor:
    """silu(first half) * second half of the fused gate-up projection."""
    num_rows, width = gate_up_TI.shape
    width //= 2
    out_TI = torch.empty(num_rows, width)
    launch_gate(team.address, GATE_ROWS, gate_up_TI.data_ptr(), out_TI.data_ptr(), num_rows, width)
    return out_TI


def _sigmoid_rows(arguments: int, tile: int, scratch: int) -> None:
    x, x_stride, gate = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    gate_stride, out = load_i64(arguments + 24), load_i64(arguments + 32)
    num_rows, width = load_i64(arguments + 40), load_i64(arguments + 48)
    first = tile * _GATE_ROWS
    for row in range(first, min(first + _GATE_ROWS, num_rows)):
        at = out + 4 * row * width
        gate_row(gate + row * gate_stride, x + row * x_stride, at, width, True)


SIGMOID_ROWS = c_function(_sigmoid_rows, 3)


@jit
def _launch_sigmoid(
    team: int, body: int, numbers: tuple[int, int, int, int, int, int, int]
) -> None:
    run_tiles(team, body, packed(numbers), -(-numbers[5] // _GATE_ROWS))


def sigmoid_mul(x_TD: Tensor, gate_TD: Tensor) -> Tensor:
    """x * sigmoid(gate)."""
    out_TD = torch.empty(x_TD.shape)
    x, gate = ((t.data_ptr(), 4 * t.stride(0)) for t in (x_TD, gate_TD))
    _launch_sigmoid(team.address, SIGMOID_ROWS, (*x, *gate, out_TD.data_ptr(), *x_TD.shape))
    return out_TD


_TOKENS_PER_TILE = 16


@jit
def _rotate_head(head: int, rotation: int, size: int, copy: int) -> None:
    """In place, and once more to `copy` unless that is 0."""
    whole = size // 16 * 16
    for i in range(0, whole, 16):
        turned = rotate(load(head + 4 * i), load(rotation + 4 * i))
        store(head + 4 * i, turned)
        if copy:
            store(copy + 4 * i, turned)
    for i in range(whole, size, 2):
        x, y = load_f32(head + 4 * i), load_f32(head + 4 * i + 4)
        cos, sin = load_f32(rotation + 4 * i), load_f32(rotation + 4 * i + 4)
        store_f32(head + 4 * i, x * cos - y * sin)
        store_f32(head + 4 * i + 4, y * cos + x * sin)
        if copy:
            store_f32(copy + 4 * i, x * cos - y * sin)
            store_f32(copy + 4 * i + 4, y * cos + x * sin)


@jit
def copy_row(x: int, size: int, target: int) -> None:
    whole = size // 16 * 16
    for i in range(0, whole, 16):
        store(target + 4 * i, load(x + 4 * i))
    for i in range(whole, size):
        store_f32(target + 4 * i, load_f32(x + 4 * i))


@jit
def _encode_row(x: int, size: int, target: int, scale: float) -> None:
    """As `copy_row`, to fp8 codes."""
    divisor = splat(scale)
    whole = size // 16 * 16
    for i in range(0, whole, 16):
        store_codes(target + i, div(load(x + 4 * i), divisor), 16)
    for i in range(whole, size):
        store_codes(target + i, div(splat(load_f32(x + 4 * i)), divisor), 1)


@jit
def _norm_head(head: int, weight: int, size: int, eps: float) -> None:
    if weight:
        scale_row(head, weight, head, size, sum_of_squares(head, size), eps)


def _place_tokens(arguments: int, tile: int, scratch: int) -> None:
    qkv, rotation, slots = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    key, value = load_i64(arguments + 24), load_i64(arguments + 32)
    page_bytes = load_i64(arguments + 40)
    num_tokens, num_q = load_i64(arguments + 48), load_i64(arguments + 56)
    num_kv, size = load_i64(arguments + 64), load_i64(arguments + 72)
    q_norm, k_norm = load_i64(arguments + 80), load_i64(arguments + 88)
    eps, row_bytes = load_f64(arguments + 96), load_i64(arguments + 104)
    key_scales, value_scales = load_i64(arguments + 112), load_i64(arguments + 120)
    first = tile * _TOKENS_PER_TILE
    for token in range(first, min(first + _TOKENS_PER_TILE, num_tokens)):
        heads = qkv + token * row_bytes
        turn = rotation + 4 * token * size
        slot = load_i64(slots + 8 * token)
        for i in range(num_q):
            head = heads + 4 * i * size
            _norm_head(head, q_norm, size, eps)
            _rotate_head(head, turn, size, 0)
        for i in range(num_kv):
            at = i * page_bytes + 4 * slot * size
            head = heads + 4 * (num_q + i) * size
            _norm_head(head, k_norm, size, eps)
            _rotate_head(head, turn, size, key + at if not key_scales and slot >= 0 else 0)
            if not key_scales and slot >= 0:
                copy_row(head + 4 * num_kv * size, size, value + at)
        if key_scales and slot >= 0:
            for i in range(num_kv):
                at, head = i * page_bytes + slot * size, heads + 4 * (num_q + i) * size
                _encode_row(head, size, key + at, load_f32(key_scales + 4 * i))
                head += 4 * num_kv * size
                _encode_row(head, size, value + at, load_f32(value_scales + 4 * i))


PLACE_TOKENS = c_function(_place_tokens, 3)


@jit
def launch_place(
    team: int,
    body: int,
    tokens: tuple[int, int, int, int, int],
    pages: tuple[int, int, int, int, int],
    norms: tuple[int, int],
    eps: float,
    heads: tuple[int, int, int],
) -> None:
    qkv, row_bytes, rotation, slots, num_tokens = tokens
    key, value, page_bytes, key_scales, value_scales = pages
    num_q, num_kv, size = heads
    q_norm, k_norm = norms
    arguments = packed(
        (
            *(qkv, rotation, slots, key, value, page_bytes, num_tokens, num_q, num_kv, size),
            *(q_norm, k_norm, float_bits(eps), row_bytes, key_scales, value_scales),
        )
    )
    run_tiles(team, body, arguments, -(-num_tokens // _TOKENS_PER_TILE))


def page_addresses(key_NSH: Tensor, value_NSH: Tensor) -> tuple[int, int, int]:
    """And the bytes from head to head."""
    return key_NSH.data_ptr(), value_NSH.data_ptr(), key_NSH.itemsize * key_NSH.stride(0)


def scale_addresses(scales: KvScales | None) -> tuple[int, int]:
    """Of keys and values in fp8 pages; 0 if pages hold fp32."""
    return (0, 0) if scales is None else (scales.key_N.data_ptr(), scales.value_N.data_ptr())


def place_heads(
    qkv_TD: Tensor,
    rotation_TH: Tensor,
    norms: HeadNorms | None,
    key_NSH: Tensor,
    value_NSH: Tensor,
    slot_T: Tensor,
    scales: KvScales | None = None,
) -> None:
    """Norm and rotate queries and keys in place, write keys and values to their page slots."""
    num_tokens, width = qkv_TD.shape
    row_bytes = 4 * qkv_TD.stride(0)
    num_kv, _, size = key_NSH.shape
    at = (0, 0) if norms is None else (norms.query_H.data_ptr(), norms.key_H.data_ptr())
    launch_place(
        team.address,
        PLACE_TOKENS,
        (qkv_TD.data_ptr(), row_bytes, rotation_TH.data_ptr(), slot_T.data_ptr(), num_tokens),
        (*page_addresses(key_NSH, value_NSH), *scale_addresses(scales)),
        at,
        0.0 if norms is None else norms.eps,
        (width // size - 2 * num_kv, num_kv, size),
    )
