"""The gated delta rule token by token, on the CPU's vector units. A tile is one head of one row.

The state of a tile is copied to the scratch memory of its thread, so drafts never reach the slot.
Sizes are padded to whole vectors there. The bits of a row do not depend on its batch.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.delta_rule.reference import (
    NORM_EPS,
    DeltaRows,
    DeltaSizes,
    DeltaState,
    DeltaWeights,
)
from paceline.kernels.elementwise.numba import copy_row, gate_row, scale_row, sum_of_squares
from paceline.kernels.vector.jit import c_function, jit
from paceline.kernels.vector.simd import (
    add,
    div,
    exp,
    float_bits,
    fused,
    load,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    mul,
    packed,
    splat,
    store,
    store_f32,
    total,
)
from paceline.kernels.vector.team import SCRATCH_BYTES, run_tiles, team

# Words of the arguments: tensors, then sizes.
_INPUT, _CONV, _DECAY, _BIAS, _STATE, _KEPT, _SAVED, _SAVED_INPUT = range(0, 64, 8)
_SLOT, _ROW_START, _QUERY_LEN, _START, _COMMITTED, _STATE_LEN, _MARK, _ENTRY = range(64, 128, 8)
_OUT, _STRIDE, _NUM_ROWS, _NUM_KEPT, _NUM_MARKS = range(128, 168, 8)
_NUM_KEYS, _NUM_VALUES, _KEY, _VALUE, _TAPS = range(168, 208, 8)


@jit
def _field(arguments: int, field: int, row: int) -> int:
    """Of one row, from a tensor of int32."""
    found: int = load_i32(load_i64(arguments + field) + 4 * row)
    return found


@jit
def _whole(size: int) -> int:
    return -(-size // 16) * 16


@jit
def _clear(x: int, count: int) -> None:
    for i in range(0, count, 16):
        store(x + 4 * i, splat(0.0))


@jit
def _input_row(arguments: int, row: int, position: int) -> int:
    """The address of the inputs of a position: the row's own, or what its slot keeps."""
    start = _field(arguments, _START, row)
    if position >= start:
        entry = _field(arguments, _ROW_START, row) + position - start
        own: int = load_i64(arguments + _INPUT) + entry * load_i64(arguments + _STRIDE)
        return own
    return _kept_row(arguments, row, position)


@jit
def _kept_row(arguments: int, row: int, position: int) -> int:
    num_kept = load_i64(arguments + _NUM_KEPT)
    index = _field(arguments, _SLOT, row) * num_kept + position % num_kept
    kept: int = load_i64(arguments + _KEPT) + 4 * index * _width(arguments)
    return kept


@jit
def _channels(arguments: int) -> int:
    keys = 2 * load_i64(arguments + _NUM_KEYS) * load_i64(arguments + _KEY)
    channels: int = keys + load_i64(arguments + _NUM_VALUES) * load_i64(arguments + _VALUE)
    return channels


@jit
def _width(arguments: int) -> int:
    width: int = _channels(arguments) + 2 * load_i64(arguments + _NUM_VALUES)
    return width


@jit
def _columns(arguments: int, head: int) -> tuple[int, int, int]:
    """First columns of a value head's query, key and value."""
    num_keys, size = load_i64(arguments + _NUM_KEYS), load_i64(arguments + _KEY)
    query = head // (load_i64(arguments + _NUM_VALUES) // num_keys) * size
    value = 2 * num_keys * size + head * load_i64(arguments + _VALUE)
    return query, num_keys * size + query, value


@jit
def _place_taps(arguments: int, head: int, target: int, padded: int) -> None:
    """Taps of the head's channels, those of one position side by side; zeros in between."""
    taps, conv = load_i64(arguments + _TAPS), load_i64(arguments + _CONV)
    size, value_size = load_i64(arguments + _KEY), load_i64(arguments + _VALUE)
    query, key, value = _columns(arguments, head)
    _clear(target, taps * padded)
    for tap in range(taps):
        to = target + 4 * tap * padded
        for i in range(size):
            store_f32(to + 4 * i, load_f32(conv + 4 * ((query + i) * taps + tap)))
            key_at = to + 4 * (_whole(size) + i)
            store_f32(key_at, load_f32(conv + 4 * ((key + i) * taps + tap)))
        for i in range(value_size):
            value_at = to + 4 * (2 * _whole(size) + i)
            store_f32(value_at, load_f32(conv + 4 * ((value + i) * taps + tap)))


@jit
def _place_input(arguments: int, row: int, position: int, head: int, target: int) -> None:
    """The head's raw query, key and value, each padded with zeros."""
    size, value_size = load_i64(arguments + _KEY), load_i64(arguments + _VALUE)
    padded = _whole(size)
    _clear(target, 2 * padded + _whole(value_size))
    if position >= 0:
        query, key, value = _columns(arguments, head)
        source = _input_row(arguments, row, position)
        copy_row(source + 4 * query, size, target)
        copy_row(source + 4 * key, size, target + 4 * padded)
        copy_row(source + 4 * value, value_size, target + 8 * padded)


@jit
def _convolve(ring: int, weights: int, out: int, padded: int, taps: int, position: int) -> None:
    """silu of the sum over taps. Position p is in the ring at p % taps."""
    one, minus = splat(1.0), splat(-1.0)
    for i in range(0, padded, 16):
        sums = splat(0.0)
        for tap in range(taps):
            at = ring + 4 * ((position + 1 + tap) % taps * padded + i)
            sums = fused(load(at), load(weights + 4 * (tap * padded + i)), sums)
        store(out + 4 * i, div(sums, add(one, exp(mul(sums, minus)))))


@jit
def _scale(x: int, size: int, factor: float) -> None:
    """x * factor / |x|"""
    scale = splat(np.float32(factor / math.sqrt(sum_of_squares(x, size) + NORM_EPS)))
    for i in range(0, size, 16):
        store(x + 4 * i, mul(load(x + 4 * i), scale))


@jit
def _gates(arguments: int, source: int, head: int) -> tuple[float, float]:
    """Decay and beta."""
    columns = source + 4 * (_channels(arguments) + head)
    b = float(load_f32(columns))
    a = float(load_f32(columns + 4 * load_i64(arguments + _NUM_VALUES)))
    a += float(load_f32(load_i64(arguments + _BIAS) + 4 * head))
    softplus = a if a > 20.0 else math.log1p(math.exp(a))
    decay = math.exp(float(load_f32(load_i64(arguments + _DECAY) + 4 * head)) * softplus)
    return decay, 1.0 / (1.0 + math.exp(-b))


@jit
def _advance(
    state: int, heads: int, padded: int, value_size: int, decay: float, beta: float, out: int
) -> None:
    """One position: heads are its query, key and value. Reads go to `out` unless that is 0."""
    query, key, value = heads, heads + 4 * padded, heads + 8 * padded
    products = splat(0.0)
    for i in range(0, padded, 16):
        products = fused(load(query + 4 * i), load(key + 4 * i), products)
    query_key = total(products)
    factor = splat(np.float32(decay))
    for v in range(value_size):
        at = state + 4 * v * padded
        by_key, by_query = splat(0.0), splat(0.0)
        for i in range(0, padded, 16):
            x = load(at + 4 * i)
            by_key = fused(x, load(key + 4 * i), by_key)
            by_query = fused(x, load(query + 4 * i), by_query)
        delta = np.float32((load_f32(value + 4 * v) - decay * total(by_key)) * beta)
        change = splat(delta)
        for i in range(0, padded, 16):
            store(at + 4 * i, fused(load(at + 4 * i), factor, mul(change, load(key + 4 * i))))
        if out:
            store_f32(out + 4 * v, np.float32(decay * total(by_query) + delta * query_key))


@jit
def _copy_state(source: int, padded: int, target: int, size: int, value_size: int) -> None:
    """From padded rows."""
    for v in range(value_size):
        copy_row(source + 4 * v * padded, size, target + 4 * v * size)


def _apply_head(arguments: int, tile: int, scratch: int) -> None:
    num_values, size = load_i64(arguments + _NUM_VALUES), load_i64(arguments + _KEY)
    value_size, taps = load_i64(arguments + _VALUE), load_i64(arguments + _TAPS)
    row, head = tile // num_values, tile % num_values
    query_len = _field(arguments, _QUERY_LEN, row)
    if query_len == 0:
        return
    padded = _whole(size)
    heads_size = 2 * padded + _whole(value_size)
    weights = scratch + 4 * value_size * padded
    ring = weights + 4 * taps * heads_size
    heads = ring + 4 * taps * heads_size
    start, state_len = _field(arguments, _START, row), _field(arguments, _STATE_LEN, row)
    num_final = start + _field(arguments, _COMMITTED, row)
    matrix = value_size * size
    state = _field(arguments, _SLOT, row) * num_values + head
    state = load_i64(arguments + _STATE) + 4 * state * matrix
    _clear(scratch, value_size * padded)
    if state_len > 0:
        for v in range(value_size):
            copy_row(state + 4 * v * size, size, scratch + 4 * v * padded)
    _place_taps(arguments, head, weights, heads_size)
    for position in range(state_len - taps + 1, start + query_len):
        _place_input(arguments, row, position, head, ring + 4 * (position % taps) * heads_size)
        if position < state_len:
            continue
        _convolve(ring, weights, heads, heads_size, taps, position)
        _scale(heads, padded, 1.0 / math.sqrt(size))
        _scale(heads + 4 * padded, padded, 1.0)
        decay, beta = _gates(arguments, _input_row(arguments, row, position), head)
        out = 0
        if position >= start:
            entry = _field(arguments, _ROW_START, row) + position - start
            out = load_i64(arguments + _OUT) + 4 * (entry * num_values + head) * value_size
        _advance(scratch, heads, padded, value_size, decay, beta, out)
        length = position + 1
        if length == num_final:
            _copy_state(scratch, padded, state, size, value_size)
        for mark in range(load_i64(arguments + _NUM_MARKS)):
            at = row * load_i64(arguments + _NUM_MARKS) + mark
            if length <= num_final and _field(arguments, _MARK, at) == length:
                saved = _field(arguments, _ENTRY, at) * num_values + head
                saved = load_i64(arguments + _SAVED) + 4 * saved * matrix
                _copy_state(scratch, padded, saved, size, value_size)


APPLY_HEAD = c_function(_apply_head, 3)


@jit
def _keep_inputs(arguments: int, row: int) -> None:
    """Into the snapshots whose lengths were passed, then into the slot."""
    width, before = _width(arguments), load_i64(arguments + _TAPS) - 1
    start, state_len = _field(arguments, _START, row), _field(arguments, _STATE_LEN, row)
    num_final = start + _field(arguments, _COMMITTED, row)
    for mark in range(load_i64(arguments + _NUM_MARKS)):
        at = row * load_i64(arguments + _NUM_MARKS) + mark
        length = _field(arguments, _MARK, at)
        if state_len < length <= num_final:
            saved = load_i64(arguments + _SAVED_INPUT)
            saved += 4 * _field(arguments, _ENTRY, at) * before * width
            for tap in range(before):
                position = length - before + tap
                target = saved + 4 * tap * width
                if position >= 0:
                    copy_row(_input_row(arguments, row, position), width, target)
                else:
                    for i in range(width):
                        store_f32(target + 4 * i, np.float32(0.0))
    end = start + _field(arguments, _QUERY_LEN, row)
    for position in range(max(start, num_final - before), end):
        source = _input_row(arguments, row, position)
        copy_row(source, width, _kept_row(arguments, row, position))


@jit
def _launch(team: int, body: int, numbers: tuple[int, ...]) -> None:
    arguments = packed(numbers)
    num_rows = load_i64(arguments + _NUM_ROWS)
    run_tiles(team, body, arguments, num_rows * load_i64(arguments + _NUM_VALUES))
    # Only now: all heads have read what is overwritten.
    for row in range(num_rows):
        if _field(arguments, _QUERY_LEN, row) > 0:
            _keep_inputs(arguments, row)


def delta_rule(
    input_TP: Tensor, weights: DeltaWeights, sizes: DeltaSizes, state: DeltaState, rows: DeltaRows
) -> Tensor:
    num_kept = state.input_SRP.shape[1]
    padded = [-(-size // 16) * 16 for size in (sizes.key_size, sizes.value_size)]
    heads = 2 * padded[0] + padded[1]
    needed = 4 * (sizes.value_size * padded[0] + (2 * sizes.conv_size + 1) * heads)
    assert needed <= SCRATCH_BYTES, f"a head of {needed} bytes, at most {SCRATCH_BYTES}"
    out_TV = torch.zeros(len(input_TP), sizes.num_value_heads * sizes.value_size)
    integers = [x.int().contiguous() for x in rows[:-1]]
    tensors = (input_TP, *weights, *state, *integers, out_TV)
    numbers = (
        *(x.data_ptr() for x in tensors),
        *(4 * input_TP.stride(0), len(rows.slot_B), num_kept, rows.mark_len_BM.shape[1]),
        *sizes,
    )
    _launch(team.address, APPLY_HEAD, numbers)
    return out_TV


_NORM_ROWS = 8


def _norm_rows(arguments: int, tile: int, scratch: int) -> None:
    x, gate, gate_stride = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    weight, out, size = (
        load_i64(arguments + 24),
        load_i64(arguments + 32),
        load_i64(arguments + 40),
    )
    num_rows, width = load_i64(arguments + 48), load_i64(arguments + 56)
    is_sigmoid, eps = load_i64(arguments + 64) != 0, load_f64(arguments + 72)
    first = tile * _NORM_ROWS
    for row in range(first, min(first + _NORM_ROWS, num_rows)):
        for column in range(0, width, size):
            at = 4 * (row * width + column)
            scale_row(x + at, weight, out + at, size, sum_of_squares(x + at, size), eps)
        to = out + 4 * row * width
        gate_row(gate + row * gate_stride, to, to, width, is_sigmoid)


NORM_ROWS = c_function(_norm_rows, 3)


@jit
def _launch_norm(
    team: int, body: int, numbers: tuple[int, int, int, int, int, int, int, int, int], eps: float
) -> None:
    arguments = packed((*numbers, float_bits(eps)))
    run_tiles(team, body, arguments, -(-numbers[6] // _NORM_ROWS))


def gated_norm(
    out_TV: Tensor, gate_TV: Tensor, norm_V: Tensor, eps: float, is_sigmoid: bool
) -> Tensor:
    normed_TV = torch.empty(out_TV.shape)
    gate = (gate_TV.data_ptr(), 4 * gate_TV.stride(0))
    to = (norm_V.data_ptr(), normed_TV.data_ptr(), len(norm_V))
    numbers = (out_TV.data_ptr(), *gate, *to, *out_TV.shape, int(is_sigmoid))
    _launch_norm(team.address, NORM_ROWS, numbers, eps)
    return normed_TV
