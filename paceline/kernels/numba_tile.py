"""The one inner loop of all products: a few rows times 32 columns, in registers.

Every number of the result is a chain of fused multiply-adds in ascending order of the inner index,
for any number of rows: so a row has the same bits alone, in a batch and in a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from paceline.kernels.numba_jit import emitted, jit
from paceline.kernels.numba_simd import (
    F16,
    F32,
    I8,
    I16,
    V,
    const,
    count_loop,
    fill_bits,
    fma,
    lanes_of,
    load_at,
    spread,
    store_at,
)

WIDTH = 32  # columns of a tile: two vectors
_HALVES = (0, 1)

# How the columns of one inner index, or of a block of them, are stored.
Q4, Q8, HALF, BFLOAT, FLOAT = range(5)
BLOCK_INPUTS = {Q4: 32, Q8: 32, HALF: 4, BFLOAT: 4, FLOAT: 4}
BLOCK_BYTES = {Q4: 640, Q8: 1088, HALF: 256, BFLOAT: 256, FLOAT: 512}
# Rows that one pass holds in registers; other counts repeat their last row.
DIRECT_ROWS = (1, 2, 4, 6, 8)
MOST_ROWS = 12

_EIGHT = types.UniTuple(types.int64, 8)
_Columns = list[Any]  # the two vectors of one inner index


def _half_pair(b: Any, at: Any, offset: int) -> _Columns:
    half = lanes_of(F16)
    return [b.fpext(load_at(b, half, at, offset + 32 * i, 2), V) for i in _HALVES]


def _decode(b: Any, kind: int, at: Any) -> list[Callable[[], _Columns]]:
    """For each inner index of the block at this address, what loads its 32 columns as fp32."""
    if kind == Q4:
        return _decode_q4(b, at)
    if kind == Q8:
        scale = _half_pair(b, at, 0)

        def signed(k: int) -> _Columns:
            raw = [load_at(b, lanes_of(I8), at, 64 + 32 * k + 16 * i, 1) for i in _HALVES]
            return [b.fmul(b.sitofp(r, V), s) for r, s in zip(raw, scale, strict=True)]

        return [lambda k=k: signed(k) for k in range(32)]  # type: ignore[misc]

    def plain(k: int) -> _Columns:
        if kind == HALF:
            return _half_pair(b, at, 64 * k)
        if kind == FLOAT:
            return [load_at(b, V, at, 128 * k + 64 * i) for i in _HALVES]
        raw = [load_at(b, lanes_of(I16), at, 64 * k + 32 * i, 2) for i in _HALVES]
        wide = [b.shl(b.zext(r, lanes_of(ir.IntType(32))), fill_bits(16)) for r in raw]
        return [b.bitcast(w, V) for w in wide]

    return [lambda k=k: plain(k) for k in range(BLOCK_INPUTS[kind])]  # type: ignore[misc]


def _decode_q4(b: Any, at: Any) -> list[Callable[[], _Columns]]:
    scale, offset = _half_pair(b, at, 0), _half_pair(b, at, 64)
    raw: _Columns = []

    def nibble(k: int) -> _Columns:
        if k % 2 == 0:  # a byte holds two neighbours
            bytes_at = [128 + 32 * (k // 2) + 16 * i for i in _HALVES]
            loaded = [load_at(b, lanes_of(I8), at, o, 1) for o in bytes_at]
            raw[:] = [b.zext(r, lanes_of(ir.IntType(32))) for r in loaded]
            numbers = [b.and_(r, fill_bits(15)) for r in raw]
        else:
            numbers = [b.lshr(r, fill_bits(4)) for r in raw]
        return [fma(b, b.sitofp(n, V), scale[i], offset[i]) for i, n in enumerate(numbers)]

    return [lambda k=k: nibble(k) for k in range(32)]  # type: ignore[misc]


def _row_addresses(b: Any, base: Any, stride: Any, num_rows: Any, rows: int) -> list[Any]:
    """Rows past the last one are the last one again: same work, same numbers, same place."""
    last = b.sub(num_rows, const(1))
    found = [base]
    for r in range(1, rows):
        index = b.select(b.icmp_signed("<", const(r), last), const(r), last)
        found.append(b.add(base, b.mul(index, stride)))
    return found


def _add_products(b: Any, sums: list[Any], xs: list[Any], offset: int, columns: _Columns) -> None:
    """sums[row, half] += x[row] * columns[half]"""
    for r, x in enumerate(xs):
        value = spread(b, load_at(b, F32, x, offset))
        for i in _HALVES:
            at = 2 * r + i
            sums[at] = fma(b, value, columns[i], sums[at])


def _numbers(b: Any, numbers: Any) -> list[Any]:
    found: list[Any] = cgutils.unpack_tuple(b, numbers, 8)
    return found


def _store_rows(b: Any, sums: list[Any], outs: list[Any]) -> None:
    for r, out in enumerate(outs):
        for i in _HALVES:
            store_at(b, sums[2 * r + i], out, 64 * i)


@emitted
def coded_product(_: Any, shape: Any, numbers: Any) -> Any:
    """out = x columns + bias, for columns in any kind of storage.

    `shape` is a literal, kind * 100 + rows. `numbers`: x, its stride, rows that count, columns,
    their blocks, bias, out, its stride.
    """
    kind, rows = divmod(shape.literal_value, 100)

    def write(context: Any, b: Any, _s: Any, a: Any) -> Any:
        x, x_stride, num_rows, columns, num_blocks, bias, out, out_stride = _numbers(b, a[1])
        xs = _row_addresses(b, x, x_stride, num_rows, rows)
        outs = _row_addresses(b, out, out_stride, num_rows, rows)
        start = [load_at(b, V, bias, 64 * i) for i in _HALVES] * rows

        def block(index: Any, sums: list[Any]) -> list[Any]:
            sums = list(sums)
            at = b.add(columns, b.mul(index, const(BLOCK_BYTES[kind])))
            shift = b.mul(index, const(4 * BLOCK_INPUTS[kind]))
            here = [b.add(x, shift) for x in xs]
            for k, decoded in enumerate(_decode(b, kind, at)):
                _add_products(b, sums, here, 4 * k, decoded())
            return sums

        _store_rows(b, count_loop(b, num_blocks, start, block), outs)
        return context.get_dummy_value()

    return types.void(shape, _EIGHT), write


@emitted
def _plain_product(_: Any, rows: Any, numbers: Any) -> Any:
    """out += x columns, for fp32 columns with any distance between inner indices.

    `rows` is a literal. `numbers`: x, its stride, rows that count, columns, their stride, inner
    size, out, its stride.
    """
    count = rows.literal_value

    def write(context: Any, b: Any, _s: Any, a: Any) -> Any:
        x, x_stride, num_rows, columns, column_stride, inner, out, out_stride = _numbers(b, a[1])
        xs = _row_addresses(b, x, x_stride, num_rows, count)
        outs = _row_addresses(b, out, out_stride, num_rows, count)
        start = [load_at(b, V, o, 64 * i) for o in outs for i in _HALVES]

        def turn(first: Any, unroll: int) -> Callable[[Any, list[Any]], list[Any]]:
            def body(index: Any, sums: list[Any]) -> list[Any]:
                sums = list(sums)
                k0 = b.add(first, b.mul(index, const(unroll)))
                here = [b.add(x, b.mul(k0, const(4))) for x in xs]
                at = b.add(columns, b.mul(k0, column_stride))
                for k in range(unroll):
                    pair = [load_at(b, V, at, 64 * i) for i in _HALVES]
                    _add_products(b, sums, here, 4 * k, pair)
                    at = b.add(at, column_stride)
                return sums

            return body

        whole = b.lshr(inner, const(2))
        sums = count_loop(b, whole, start, turn(const(0), 4))
        done = b.shl(whole, const(2))
        sums = count_loop(b, b.sub(inner, done), sums, turn(done, 1))
        _store_rows(b, sums, outs)
        return context.get_dummy_value()

    return types.void(rows, _EIGHT), write


@emitted
def decode_columns(_: Any, kind: Any, columns: Any, num_blocks: Any, out: Any) -> Any:
    """Columns in storage -> fp32, 32 side by side for each inner index."""
    code = kind.literal_value

    def write(context: Any, b: Any, _s: Any, a: Any) -> Any:
        _, columns, num_blocks, out = a

        def block(index: Any, _carried: list[Any]) -> list[Any]:
            at = b.add(columns, b.mul(index, const(BLOCK_BYTES[code])))
            to = b.add(out, b.mul(index, const(4 * WIDTH * BLOCK_INPUTS[code])))
            for k, decoded in enumerate(_decode(b, code, at)):
                for i, vector in enumerate(decoded()):
                    store_at(b, vector, to, 128 * k + 64 * i)
            return []

        count_loop(b, num_blocks, [], block)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 3), write


@jit
def add_product(
    x: int,
    x_stride: int,
    num_rows: int,
    columns: int,
    column_stride: int,
    inner: int,
    out: int,
    out_stride: int,
) -> None:
    """out[rows, 32] += x[rows, inner] columns[inner, 32]; strides in bytes; at most MOST_ROWS."""
    numbers = (x, x_stride, num_rows, columns, column_stride, inner, out, out_stride)
    if num_rows > 8:
        _plain_product(12, numbers)
    elif num_rows > 6:
        _plain_product(8, numbers)
    elif num_rows > 4:
        _plain_product(6, numbers)
    elif num_rows > 3:
        _plain_product(4, numbers)
    elif num_rows > 2:
        _plain_product(3, numbers)
    elif num_rows > 1:
        _plain_product(2, numbers)
    else:
        _plain_product(1, numbers)
