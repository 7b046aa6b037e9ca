"""Sixteen float32 lanes as a value in numba code, and the few instructions the kernels are made of.

Orders are fixed: a sum over lanes is one tree, whatever CPU it becomes instructions of. LLVM splits
the lanes where registers are narrower. Addresses are int64 and need no alignment.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import register_model

from paceline.kernels.vector.jit import emitted

LANES = 16
F32, F16 = ir.FloatType(), ir.HalfType()
I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))


def lanes_of(item: Any) -> Any:
    return ir.VectorType(item, LANES)


V = lanes_of(F32)


class _Lanes(types.Type):  # type: ignore[misc]  # numba is untyped
    def __init__(self) -> None:
        super().__init__(name="float32x16")


lanes = _Lanes()


def _lanes_model(manager: Any, kind: Any) -> Any:
    return models.PrimitiveModel(manager, kind, V)


register_model(_Lanes)(_lanes_model)

# -- what the code generators share --------------------------------------------------------------


def const(value: int) -> Any:
    return ir.Constant(I64, value)


def fill(value: float) -> Any:
    return ir.Constant(V, [value] * LANES)


def fill_bits(value: int) -> Any:
    return ir.Constant(lanes_of(I32), [value] * LANES)


def load_at(b: Any, kind: Any, address: Any, offset: int = 0, align: int = 4) -> Any:
    at = b.add(address, const(offset)) if offset else address
    return b.load(b.inttoptr(at, kind.as_pointer()), align=align)


def store_at(b: Any, value: Any, address: Any, offset: int = 0) -> None:
    at = b.add(address, const(offset)) if offset else address
    b.store(value, b.inttoptr(at, value.type.as_pointer()), align=4)


def spread(b: Any, scalar: Any) -> Any:
    """One number in every lane."""
    one = b.insert_element(ir.Constant(V, ir.Undefined), scalar, ir.Constant(I32, 0))
    return shuffle(b, one, one, [0] * LANES)


def shuffle(b: Any, x: Any, y: Any, order: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(order)), order))


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z with one rounding, for lanes and for single numbers."""
    name = "llvm.fma.v16f32" if isinstance(x.type, ir.VectorType) else "llvm.fma.f32"
    kind = ir.FunctionType(x.type, [x.type] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), [x, y, z])


def count_loop(
    b: Any, count: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """for i in range(count), carrying values in registers from turn to turn."""
    entry = b.block
    head, turn, end = (b.append_basic_block(n) for n in ("loop", "turn", "end"))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64)
    index.add_incoming(const(0), entry)
    held = [b.phi(value.type) for value in carried]
    for phi, value in zip(held, carried, strict=True):
        phi.add_incoming(value, entry)
    b.cbranch(b.icmp_signed("<", index, count), turn, end)
    b.position_at_end(turn)
    results = body(index, held)
    index.add_incoming(b.add(index, const(1)), b.block)
    for phi, value in zip(held, results, strict=True):
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(end)
    return held


def _exp(b: Any, x: Any) -> Any:
    """e^x within 2 units in the last place up to x = 88; 0 below -87.3.

    x = n ln 2 + r with |r| <= ln(2) / 2. 2^n is an exponent field; e^r = 1 + r + r^2 p(r), where p
    is fitted to (e^r - 1 - r) / r^2 at Chebyshev nodes.
    """
    magic = fill(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to an integer
    low = fill(-87.3)
    clamped = b.select(b.fcmp_ordered("<", x, low), low, x)
    clamped = b.select(b.fcmp_ordered(">", clamped, fill(88.0)), fill(88.0), clamped)
    n = b.fsub(fma(b, clamped, fill(1.44269504), magic), magic)
    # ln 2 in two parts: n times the first is exact.
    r = fma(b, n, fill(-0.693145751953125), clamped)
    r = fma(b, n, fill(-1.42860682e-6), r)
    p = fill(0.00139336882)
    for c in (0.00836320501, 0.041666463, 0.166665763, 0.5):
        p = fma(b, p, r, fill(c))
    p = fma(b, b.fmul(r, r), p, b.fadd(r, fill(1.0)))
    exponent = b.shl(b.add(b.fptosi(n, lanes_of(I32)), fill_bits(127)), fill_bits(23))
    grown = b.fmul(p, b.bitcast(exponent, V))
    # NaN stays NaN: it is not "<" anything.
    return b.select(b.fcmp_ordered("<", x, low), fill(0.0), grown)


def _tree(b: Any, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Halves onto each other until one lane is left."""
    width = LANES // 2
    while width:
        x = combine(x, shuffle(b, x, x, [(i + width) % LANES for i in range(LANES)]))
        width //= 2
    return b.extract_element(x, ir.Constant(I32, 0))


def _larger(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered("<", x, y), y, x)


def _numbers(b: Any, codes: Any) -> Any:
    """What e4m3 codes stand for: the bits of a float16, but for its exponent. 0x7f is NaN."""
    code = b.zext(codes, lanes_of(I16))
    low, sign, seven, eight = (ir.Constant(code.type, [x] * LANES) for x in (0x7F, 0x80, 7, 8))
    size = b.and_(code, low)
    bits = b.or_(b.shl(b.and_(code, sign), eight), b.shl(size, seven))
    number = b.fmul(b.fpext(b.bitcast(bits, lanes_of(F16)), V), fill(256.0))
    return b.select(b.icmp_unsigned("==", size, low), fill(float("nan")), number)


def _codes(b: Any, x: Any) -> Any:
    """The nearest e4m3 codes, ties to even; beyond 448 that of 448. kv_codes/reference says why."""
    bits = b.bitcast(x, lanes_of(I32))
    sign = b.and_(b.lshr(bits, fill_bits(24)), fill_bits(0x80))
    size = b.and_(bits, fill_bits(0x7FFFFFFF))
    is_nan = b.icmp_unsigned(">", size, fill_bits(0x7F800000))
    most = fill_bits(0x43E00000)
    size = b.select(b.icmp_unsigned(">", size, most), most, size)
    # Three bits of the mantissa are left, and an exponent that begins 120 later.
    odd = b.and_(b.lshr(size, fill_bits(20)), fill_bits(1))
    rounded = b.add(b.add(size, fill_bits(0x7FFFF)), odd)
    normal = b.sub(b.lshr(rounded, fill_bits(20)), fill_bits(960))
    # Below 2^-6 codes are multiples of 2^-9: one unit of a float32 that is at least 2^14.
    raised = b.bitcast(b.fadd(b.bitcast(size, V), fill(16384.0)), lanes_of(I32))
    small = b.sub(raised, fill_bits(0x46800000))
    code = b.select(b.icmp_unsigned("<", size, fill_bits(0x3C800000)), small, normal)
    code = b.or_(b.select(is_nan, fill_bits(0x7F), code), sign)
    return b.trunc(code, lanes_of(I8))


# -- values and memory ---------------------------------------------------------------------------
# Each of these is a call in kernel code. The first argument, numba's typing context, is not used.


@emitted
def load(_: Any, address: Any) -> Any:
    """Sixteen numbers from here on."""
    return lanes(types.int64), lambda _c, b, _s, a: load_at(b, V, a[0])


def _storing(kind: Any) -> Any:
    def write(context: Any, b: Any, _s: Any, a: Any) -> Any:
        store_at(b, a[1], a[0])
        return context.get_dummy_value()

    return types.void(types.int64, kind), write


@emitted
def store(_: Any, address: Any, value: Any) -> Any:
    return _storing(lanes)


@emitted
def load_f32(_: Any, address: Any) -> Any:
    return types.float32(types.int64), lambda _c, b, _s, a: load_at(b, F32, a[0])


@emitted
def store_f32(_: Any, address: Any, value: Any) -> Any:
    return _storing(types.float32)


@emitted
def load_codes(_: Any, address: Any, count: Any) -> Any:
    """e4m3 numbers: sixteen, or one in the first lane. `count` is 16 or 1."""

    def write(_c: Any, b: Any, _s: Any, a: Any) -> Any:
        codes = load_at(b, I8 if count.literal_value == 1 else lanes_of(I8), a[0], align=1)
        if count.literal_value == 1:
            none = ir.Constant(lanes_of(I8), [0] * LANES)
            codes = b.insert_element(none, codes, ir.Constant(I32, 0))
        return _numbers(b, codes)

    return lanes(types.int64, count), write


@emitted
def store_codes(_: Any, address: Any, value: Any, count: Any) -> Any:
    """The e4m3 codes of all lanes, or of the first one alone."""

    def write(context: Any, b: Any, _s: Any, a: Any) -> Any:
        codes = _codes(b, a[1])
        if count.literal_value == 1:
            codes = b.extract_element(codes, ir.Constant(I32, 0))
        b.store(codes, b.inttoptr(a[0], codes.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, lanes, count), write


@emitted
def load_i32(_: Any, address: Any) -> Any:
    def write(_c: Any, b: Any, _s: Any, a: Any) -> Any:
        return b.sext(load_at(b, I32, a[0]), I64)

    return types.int64(types.int64), write


@emitted
def load_i64(_: Any, address: Any) -> Any:
    return types.int64(types.int64), lambda _c, b, _s, a: load_at(b, I64, a[0], align=8)


@emitted
def store_i64(_: Any, address: Any, value: Any) -> Any:
    return _storing(types.int64)


@emitted
def load_f64(_: Any, address: Any) -> Any:
    kind = ir.DoubleType()
    return types.float64(types.int64), lambda _c, b, _s, a: load_at(b, kind, a[0], align=8)


@emitted
def float_bits(_: Any, value: Any) -> Any:
    """A float64 as the int64 that `load_f64` reads."""
    return types.int64(types.float64), lambda _c, b, _s, a: b.bitcast(a[0], I64)


@emitted
def packed(_: Any, numbers: Any) -> Any:
    """The address of a tuple of int64 numbers; valid until the caller returns."""

    def write(_c: Any, b: Any, _s: Any, a: Any) -> Any:
        return b.ptrtoint(cgutils.alloca_once_value(b, a[0]), I64)

    return types.int64(types.UniTuple(types.int64, len(numbers))), write


# -- arithmetic ----------------------------------------------------------------------------------


@emitted
def splat(_: Any, value: Any) -> Any:
    return lanes(types.float32), lambda _c, b, _s, a: spread(b, a[0])


@emitted
def add(_: Any, x: Any, y: Any) -> Any:
    return lanes(lanes, lanes), lambda _c, b, _s, a: b.fadd(a[0], a[1])


@emitted
def mul(_: Any, x: Any, y: Any) -> Any:
    return lanes(lanes, lanes), lambda _c, b, _s, a: b.fmul(a[0], a[1])


@emitted
def div(_: Any, x: Any, y: Any) -> Any:
    return lanes(lanes, lanes), lambda _c, b, _s, a: b.fdiv(a[0], a[1])


@emitted
def fused(_: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    return lanes(lanes, lanes, lanes), lambda _c, b, _s, a: fma(b, *a)


@emitted
def exp(_: Any, x: Any) -> Any:
    return lanes(lanes), lambda _c, b, _s, a: _exp(b, a[0])


@emitted
def e4m3(_: Any, x: Any) -> Any:
    return lanes(lanes), lambda _c, b, _s, a: _numbers(b, _codes(b, a[0]))


@emitted
def larger(_: Any, x: Any, y: Any) -> Any:
    return lanes(lanes, lanes), lambda _c, b, _s, a: _larger(b, *a)


@emitted
def total(_: Any, x: Any) -> Any:
    """The sum of the lanes, as a tree."""
    return types.float32(lanes), lambda _c, b, _s, a: _tree(b, a[0], b.fadd)


@emitted
def largest(_: Any, x: Any) -> Any:
    return types.float32(lanes), lambda _c, b, _s, a: _tree(b, a[0], lambda x, y: _larger(b, x, y))


@emitted
def first_lane(_: Any, x: Any) -> Any:
    def write(_c: Any, b: Any, _s: Any, a: Any) -> Any:
        return b.extract_element(a[0], ir.Constant(I32, 0))

    return types.float32(lanes), write


@emitted
def first(_: Any, count: Any, x: Any, other: Any) -> Any:
    """Lanes below `count` from x, the rest from `other`."""

    def write(_c: Any, b: Any, _s: Any, a: Any) -> Any:
        wide = b.trunc(a[0], I32)
        bits = lanes_of(I32)
        one = b.insert_element(ir.Constant(bits, ir.Undefined), wide, ir.Constant(I32, 0))
        limit = shuffle(b, one, one, [0] * LANES)
        index = ir.Constant(bits, list(range(LANES)))
        return b.select(b.icmp_signed("<", index, limit), a[1], a[2])

    return lanes(types.int64, lanes, lanes), write


@emitted
def rotate(_: Any, x: Any, rotation: Any) -> Any:
    """Complex product of neighbouring pairs (2i, 2i + 1)."""

    def write(_c: Any, b: Any, _s: Any, a: Any) -> Any:
        x, rotation = a
        even = [i & ~1 for i in range(LANES)]
        cos = shuffle(b, rotation, rotation, even)
        sin = shuffle(b, rotation, rotation, [i | 1 for i in range(LANES)])
        sign = ir.Constant(V, [-1.0, 1.0] * (LANES // 2))
        swapped = shuffle(b, x, x, [i ^ 1 for i in range(LANES)])
        return fma(b, x, cos, b.fmul(swapped, b.fmul(sin, sign)))

    return lanes(lanes, lanes), write


@emitted
def transpose(_: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> Any:
    """A 16 x 16 block; strides are in bytes."""

    def write(context: Any, b: Any, _s: Any, a: Any) -> Any:
        source, source_stride, target, target_stride = a
        rows = [load_at(b, V, b.add(source, b.mul(source_stride, const(i)))) for i in range(LANES)]
        width = 1
        while width < LANES:
            # Swap the off-diagonal blocks of size `width` in pairs of rows that far apart.
            low = [i if not i & width else i - width + LANES for i in range(LANES)]
            high = [i + width if not i & width else i + LANES for i in range(LANES)]
            for i in range(LANES):
                if not i & width:
                    x, y = rows[i], rows[i + width]
                    rows[i], rows[i + width] = shuffle(b, x, y, low), shuffle(b, x, y, high)
            width *= 2
        for i, row in enumerate(rows):
            store_at(b, row, b.add(target, b.mul(target_stride, const(i))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), write


# -- between threads -----------------------------------------------------------------------------


def _word(b: Any, address: Any) -> Any:
    return b.inttoptr(address, I64.as_pointer())


@emitted
def atomic_load(_: Any, address: Any) -> Any:
    def write(_c: Any, b: Any, _s: Any, a: Any) -> Any:
        return b.load_atomic(_word(b, a[0]), "seq_cst", 8)

    return types.int64(types.int64), write


@emitted
def atomic_store(_: Any, address: Any, value: Any) -> Any:
    def write(context: Any, b: Any, _s: Any, a: Any) -> Any:
        b.store_atomic(a[1], _word(b, a[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), write


@emitted
def atomic_add(_: Any, address: Any, value: Any) -> Any:
    """Adds and returns what was there before."""

    def write(_c: Any, b: Any, _s: Any, a: Any) -> Any:
        return b.atomic_rmw("add", _word(b, a[0]), a[1], "seq_cst")

    return types.int64(types.int64, types.int64), write


@emitted
def atomic_swap(_: Any, address: Any, value: Any) -> Any:
    def write(_c: Any, b: Any, _s: Any, a: Any) -> Any:
        return b.atomic_rmw("xchg", _word(b, a[0]), a[1], "seq_cst")

    return types.int64(types.int64, types.int64), write


@emitted
def relax(_: Any) -> Any:
    """Tells the core that this is a waiting loop."""

    def write(context: Any, b: Any, _s: Any, _a: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), write


@emitted
def call_at(_: Any, function: Any, arguments: Any) -> Any:
    """Call the C function at this address with a tuple of int64 arguments; its int result."""

    def write(_c: Any, b: Any, _s: Any, a: Any) -> Any:
        values = cgutils.unpack_tuple(b, a[1], len(arguments))
        kind = ir.FunctionType(I32, [I64] * len(arguments))
        return b.call(b.inttoptr(a[0], kind.as_pointer()), values)

    return types.int32(types.int64, types.UniTuple(types.int64, len(arguments))), write
