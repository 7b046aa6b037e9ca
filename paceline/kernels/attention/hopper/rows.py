"""What a group of four warps does with its rows of a tile, in registers and shared memory.

For `tiles` alone. Rows are queries times the heads that share a KV head.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from paceline.kernels.attention.triton.work import TILE_ROWS

HEAD = gl.constexpr(128)  # with 64 the plain kernel is no slower (bench/h200_kernels.md)
PAGE = gl.constexpr(16)
BLOCK = gl.constexpr(128)  # KV positions at once
ROWS = gl.constexpr(TILE_ROWS // 2)  # of a group: the fewest that a product of four warps has


@gluon.jit
def masked(score, position, first):
    layout: gl.constexpr = score.type.layout
    at = first + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    is_seen = gl.expand_dims(at, 0) <= gl.expand_dims(position, 1)
    return gl.where(is_seen, score, float("-inf"))


@gluon.jit
def weigh(score, top, total, scale):
    """A block's weights, and what becomes of the sums before it."""
    new_top = gl.maximum(top, gl.max(score, 1) * scale)
    weight = _power(score * scale - gl.expand_dims(new_top, 1))
    keep = _power(top - new_top)
    return new_top, total * keep + gl.sum(weight, 1), weight, keep


@gluon.jit
def scale_rows(result, factor):
    result_layout: gl.constexpr = result.type.layout
    layout: gl.constexpr = gl.SliceLayout(1, result_layout)
    return result * gl.expand_dims(gl.convert_layout(factor, layout), 1)


@gluon.jit
def _power(x):
    """Of 2, without the two more instructions that exact results below 2**-126 take."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def pack(weight, dtype: gl.constexpr):
    """Two weights in 32 bits. On their way around a loop, 16 bits would take a register each."""
    even, odd = weight.reshape([weight.shape[0], weight.shape[1] // 2, 2]).split()
    name: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    convert: gl.constexpr = "cvt.rn." + name + ".f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(
        convert, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack(weights, dtype: gl.constexpr, result):
    """As the left operand of what is added to `result`."""
    result_layout: gl.constexpr = result.type.layout
    halves: gl.constexpr = (gl.int16, gl.int16)
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [weights], dtype=halves, is_pure=True, pack=1
    )
    weight = gl.join(even, odd).reshape([weights.shape[0], 2 * weights.shape[1]])
    layout: gl.constexpr = gl.DotOperandLayout(0, result_layout, 2)
    return gl.convert_layout(weight.to(dtype, bitcast=True), layout)


@gluon.jit
def hold(x):
    """x itself, which is not below 0; what comes next does not begin before it is known. Without
    this, ptxas waits for all products and only then computes the weights."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .f32 t; min.f32 t, $2, $3; setp.lt.f32 p, t, 0f00000000;"
        " @p nanosleep.u32 1; mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=f,=f,f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def load_queries(
    query,
    qkv_TD,
    qkv_stride,
    which,
    entry,
    head,
    num_queries,
    GROUP: gl.constexpr,
):
    """Where the copy engine cannot."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    at_entry, offset, inside = _rows_at(which, entry, head, num_queries, layout, GROUP)
    query.store(gl.load(qkv_TD + at_entry * qkv_stride + offset, mask=inside, other=0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _rows_at(
    which,
    entry,
    head,
    num_queries,
    layout: gl.constexpr,
    GROUP: gl.constexpr,
):
    """A group's rows of a tile among entries: which, where within them, and whether they exist."""
    row = which * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, HEAD, gl.SliceLayout(0, layout))
    at_entry = gl.expand_dims((entry + row // GROUP).to(gl.int64), 1)
    offset = (head * GROUP + gl.expand_dims(row % GROUP, 1)) * HEAD + gl.expand_dims(column, 0)
    return at_entry, offset, gl.expand_dims(row < num_queries * GROUP, 1)


@gluon.jit
def clear_values(value, num_valid):
    """Values behind the end are others', NaN perhaps, which no weight of 0 takes away: both groups
    write zeros over them, in any order; no program reads one that it has not written."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    if num_valid < BLOCK:
        for i in gl.static_range(BLOCK // PAGE):
            if num_valid < (i + 1) * PAGE:
                part = value.slice(i * PAGE, PAGE, 0)
                place = i * PAGE + gl.arange(0, PAGE, gl.SliceLayout(1, layout))
                kept = part.load(layout)
                is_valid = gl.expand_dims(place < num_valid, 1)
                part.store(gl.where(is_valid, kept, gl.zeros_like(kept)))
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def store_result(  # noqa: PLR0913
    out_TD,
    result,
    total,
    which,
    entry,
    head,
    num_queries,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
):
    # Four threads hold 64 bytes of a row.
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [ROWS, HEAD],
    )
    out = scale_rows(result, 1.0 / total).to(out_TD.dtype.element_ty)
    at_entry, offset, inside = _rows_at(which, entry, head, num_queries, layout, GROUP)
    out_at = out_TD + at_entry * (KV_HEADS * GROUP * HEAD) + offset
    gl.store(out_at, gl.convert_layout(out, layout), mask=inside)
