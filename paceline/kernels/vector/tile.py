"""The one inner loop of all products: a few rows times 32 columns, in registers.

Every number of the result is a chain of fused multiply-adds in ascending order of the inner index,
for any number of rows: so a row has the same bits alone, in a batch and in a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from numba import types
from numba.core import cgutils

from paceline.kernels.vector.jit import c_function, emitted
from paceline.kernels.vector.simd import (
    F16,
    F32,
    I8,
    I16,
    I32,
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

# How 32 columns are stored. Quantised kinds have blocks of 32 inner indices with a header of fp16
# scales (and offsets), then 16 or 32 bytes for each inner index; the others are plain numbers.
Q4, Q8, HALF, BFLOAT, FLOAT = range(5)
BLOCK_INPUTS = {Q4: 32, Q8: 32, HALF: 4, BFLOAT: 4, FLOAT: 4}
_HEADER_BYTES = {Q4: 128, Q8: 64, HALF: 0, BFLOAT: 0, FLOAT: 0}
_INPUT_BYTES = {Q4: 16, Q8: 32, HALF: 64, BFLOAT: 64, FLOAT: 128}
BLOCK_BYTES = {k: _HEADER_BYTES[k] + n * _INPUT_BYTES[k] for k, n in BLOCK_INPUTS.items()}
# Inner indices that are written out; the rest is a loop. More gain nothing and compile longer.
_UNROLLED = 4
# Rows that one pass holds in registers; a count without its own code repeats its last row.
MOST_ROWS = 12

_EIGHT = types.UniTuple(types.int64, 8)
_Columns = list[Any]  # the two vectors of one inner index


def _halves_at(b: Any, at: Any, offset: int) -> _Columns:
    half = lanes_of(F16)
    return [b.fpext(load_at(b, half, at, offset + 32 * i, 2), V) for i in _HALVES]


def _header(b: Any, kind: int, at: Any) -> list[_Columns]:
    """Scales, then offsets, of a quantised block."""
    return [_halves_at(b, at, offset) for offset in range(0, _HEADER_BYTES[kind], 64)]


def _decode(b: Any, kind: int, header: list[_Columns], at: Any) -> Iterator[_Columns]:
    """The columns of `_UNROLLED` inner indices in turn, as fp32."""
    bits, small = lanes_of(I32), lanes_of(I8)
    for k in range(_UNROLLED):
        offset = k * _INPUT_BYTES[kind]
        if kind == Q4:
            if k % 2 == 0:  # a byte holds two neighbours
                pairs = [load_at(b, small, at, 32 * (k // 2) + 16 * i, 1) for i in _HALVES]
                wide = [b.zext(p, bits) for p in pairs]
                numbers = [b.and_(w, fill_bits(15)) for w in wide]
            else:
                numbers = [b.lshr(w, fill_bits(4)) for w in wide]
            scale, shift = header
            yield [fma(b, b.sitofp(n, V), scale[i], shift[i]) for i, n in enumerate(numbers)]
        elif kind == Q8:
            raw = [load_at(b, small, at, offset + 16 * i, 1) for i in _HALVES]
            yield [b.fmul(b.sitofp(r, V), header[0][i]) for i, r in enumerate(raw)]
        elif kind == HALF:
            yield _halves_at(b, at, offset)
        elif kind == BFLOAT:
            raw = [load_at(b, lanes_of(I16), at, offset + 32 * i, 2) for i in _HALVES]
            yield [b.bitcast(b.shl(b.zext(r, bits), fill_bits(16)), V) for r in raw]
        else:
            yield [load_at(b, V, at, offset + 64 * i) for i in _HALVES]


def _each_input(
    b: Any,
    kind: int,
    columns: Any,
    num_blocks: Any,
    carried: list[Any],
    use: Callable[[Any, int, _Columns, list[Any]], None],
) -> list[Any]:
    """use(first inner index, k, columns of first + k, carried values) in ascending order."""

    def block(index: Any, held: list[Any]) -> list[Any]:
        at = b.add(columns, b.mul(index, const(BLOCK_BYTES[kind])))
        header = _header(b, kind, at)
        begin = b.mul(index, const(BLOCK_INPUTS[kind]))

        def turn(step: Any, held: list[Any]) -> list[Any]:
            held = list(held)
            first = b.add(begin, b.mul(step, const(_UNROLLED)))
            skipped = b.mul(step, const(_UNROLLED * _INPUT_BYTES[kind]))
            here = b.add(b.add(at, const(_HEADER_BYTES[kind])), skipped)
            for k, decoded in enumerate(_decode(b, kind, header, here)):
                use(first, k, decoded, held)
            return held

        turns = BLOCK_INPUTS[kind] // _UNROLLED
        return count_loop(b, const(turns), held, turn) if turns > 1 else turn(const(0), held)

    return count_loop(b, num_blocks, carried, block)


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


def _for_rows(b: Any, num_rows: Any, sizes: tuple[int, ...], emit: Callable[[int], None]) -> None:
    """Code for each number of rows in `sizes`, of which the smallest that suffices runs."""
    end = b.append_basic_block("rows.end")
    for size in sizes[:-1]:
        fits, more = b.append_basic_block(f"rows.{size}"), b.append_basic_block("rows.more")
        b.cbranch(b.icmp_signed("<=", num_rows, const(size)), fits, more)
        b.position_at_end(fits)
        emit(size)
        b.branch(end)
        b.position_at_end(more)
    emit(sizes[-1])
    b.branch(end)
    b.position_at_end(end)


@emitted
def coded_product(_: Any, kind: Any, numbers: Any) -> Any:
    """out = x columns + bias, for columns in storage of this (literal) kind.

    `numbers`: x, its stride, at most MOST_ROWS rows, columns, their blocks, bias, out, its stride.
    """
    code = kind.literal_value

    def write(context: Any, b: Any, _s: Any, a: Any) -> Any:
        x, x_stride, num_rows, columns, num_blocks, bias, out, out_stride = _numbers(b, a[1])

        def emit(rows: int) -> None:
            xs = _row_addresses(b, x, x_stride, num_rows, rows)
            outs = _row_addresses(b, out, out_stride, num_rows, rows)
            start = [load_at(b, V, bias, 64 * i) for i in _HALVES] * rows

            def use(first: Any, k: int, decoded: _Columns, sums: list[Any]) -> None:
                shift = b.mul(first, const(4))
                _add_products(b, sums, [b.add(x, shift) for x in xs], 4 * k, decoded)

            _store_rows(b, _each_input(b, code, columns, num_blocks, start, use), outs)

        _for_rows(b, num_rows, (1, 2, 4, 6, 8, MOST_ROWS), emit)
        return context.get_dummy_value()

    return types.void(kind, _EIGHT), write


@emitted
def _plain_product(_: Any, numbers: Any) -> Any:
    """out += x columns, for fp32 columns with any distance between inner indices.

    `numbers`: x, its stride, at most MOST_ROWS rows, columns, their stride, inner size, out, its
    stride.
    """

    def write(context: Any, b: Any, _s: Any, a: Any) -> Any:
        x, x_stride, num_rows, columns, column_stride, inner, out, out_stride = _numbers(b, a[0])

        def emit(rows: int) -> None:
            xs = _row_addresses(b, x, x_stride, num_rows, rows)
            outs = _row_addresses(b, out, out_stride, num_rows, rows)
            sums = [load_at(b, V, o, 64 * i) for o in outs for i in _HALVES]

            def turns(begin: Any, count: Any, unrolled: int, sums: list[Any]) -> list[Any]:
                def turn(index: Any, held: list[Any]) -> list[Any]:
                    held = list(held)
                    k0 = b.add(begin, b.mul(index, const(unrolled)))
                    here = [b.add(x, b.mul(k0, const(4))) for x in xs]
                    at = b.add(columns, b.mul(k0, column_stride))
                    for k in range(unrolled):
                        pair = [load_at(b, V, at, 64 * i) for i in _HALVES]
                        _add_products(b, held, here, 4 * k, pair)
                        at = b.add(at, column_stride)
                    return held

                return count_loop(b, count, sums, turn)

            whole = b.lshr(inner, const(2))
            done = b.shl(whole, const(2))
            sums = turns(const(0), whole, 4, sums)
            _store_rows(b, turns(done, b.sub(inner, done), 1, sums), outs)

        _for_rows(b, num_rows, (1, 2, 3, 4, 6, 8, MOST_ROWS), emit)
        return context.get_dummy_value()

    return types.void(_EIGHT), write


@emitted
def decode_columns(_: Any, kind: Any, columns: Any, num_blocks: Any, out: Any) -> Any:
    """Columns in storage -> fp32, 32 side by side for each inner index."""
    code = kind.literal_value

    def write(context: Any, b: Any, _s: Any, a: Any) -> Any:
        _, columns, num_blocks, out = a

        def use(first: Any, k: int, decoded: _Columns, _carried: list[Any]) -> None:
            to = b.add(out, b.mul(first, const(4 * WIDTH)))
            for i, vector in enumerate(decoded):
                store_at(b, vector, to, 128 * k + 64 * i)

        _each_input(b, code, columns, num_blocks, [], use)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 3), write


def _product(
    x: int,
    x_stride: int,
    num_rows: int,
    columns: int,
    column_stride: int,
    inner: int,
    out: int,
    out_stride: int,
) -> None:
    _plain_product((x, x_stride, num_rows, columns, column_stride, inner, out, out_stride))


# The address of out[rows, 32] += x[rows, inner] columns[inner, 32], for at most MOST_ROWS rows and
# strides in bytes; arguments as above. Called by address, so that it is compiled once.
ADD_PRODUCT = c_function(_product, 8)
