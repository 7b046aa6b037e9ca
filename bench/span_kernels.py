"""Kernels that only bench/long_contexts_gpu runs.

A candidate for decode attention takes two blocks of KV in every round of its loop.

Reductions of both blocks share their barriers: 11 for two blocks instead of 18 in the code for
sm_90, and about a tenth fewer instructions. A round holds twice the shared memory. Blocks are
merged in the same order; only the sum within a block may be ordered otherwise.
`use_pairs` puts the loop in place of the one in use. `read_kernel` only reads.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from paceline.kernels.attention.triton import spans
from paceline.kernels.attention.triton.spans import (
    _base,
    _merge,
    _nothing,
    pages_at,
    row_offsets,
)


@contextmanager
def use_pairs() -> Iterator[None]:
    """Inside, `attend_spans` is compiled with the loop below."""
    kernel = spans._span_kernel
    if isinstance(kernel, JITFunction):  # a kernel remembers what it was compiled from
        kernel = triton.jit(kernel.fn, do_not_specialize=["partial_rows"])
    with mock.patch.multiple(spans, _walk=_walk_pairs, _span_kernel=kernel):
        yield


@triton.jit
def _scores(  # noqa: PLR0913
    query, keys, at, end, position, window_at, scale, WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr
):
    score = tl.dot(query, tl.trans(keys), input_precision="ieee")
    is_seen = (at < end)[None, :] & ((at[None, :] <= position[:, None]) | (not IS_CAUSAL))
    if WINDOW > 0:
        is_seen = is_seen & (at[None, :] > window_at[:, None] - WINDOW)
    return tl.where(is_seen, score * scale, float("-inf"))


@triton.jit
def _settle(  # noqa: PLR0913
    row,
    far,
    run,
    into_reach,
    reach,
    is_more,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    STRETCH_SIZE: tl.constexpr,
):
    """After a block: a stretch that is complete joins its reach, and a reach its row."""
    if ((into_reach % STRETCH_SIZE == 0) | (into_reach == reach)) & is_more:
        far = _merge(*far, *run)
        run = _nothing(ROWS, PADDED)
        if into_reach == reach:
            row = _merge(*row, *far)
            far = _nothing(ROWS, PADDED)
    return row, far, run


@triton.jit
def _walk_pairs(  # noqa: PLR0913
    query,
    key,
    value,
    table,
    page,
    position,
    window_at,
    begin,
    end,
    reach,
    scale,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    STRETCH_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """As `spans._walk`."""
    column = tl.arange(0, PADDED)
    row, far, run = _nothing(ROWS, PADDED), _nothing(ROWS, PADDED), _nothing(ROWS, PADDED)
    into_reach = begin % reach
    page2 = pages_at(table, begin + SIZE + tl.arange(0, SIZE), end, PAGE)
    for passed in range(0, end - begin, 2 * SIZE):
        at = begin + passed + tl.arange(0, SIZE)
        at2 = at + SIZE
        is_key, is_key2 = at < end, at2 < end
        if WINDOW > 0:
            is_key = is_key & (at > tl.min(window_at, 0) - WINDOW)
            is_key2 = is_key2 & (at2 > tl.min(window_at, 0) - WINDOW)
        inside = is_key[:, None] & (column < HEAD)[None, :]
        inside2 = is_key2[:, None] & (column < HEAD)[None, :]
        offset = row_offsets(page, at, PAGE, HEAD)[:, None] + column[None, :]
        offset2 = row_offsets(page2, at2, PAGE, HEAD)[:, None] + column[None, :]
        page = pages_at(table, at + 2 * SIZE, end, PAGE)
        page2 = pages_at(table, at2 + 2 * SIZE, end, PAGE)
        keys = tl.load(key + offset, mask=inside, other=0.0)
        keys2 = tl.load(key + offset2, mask=inside2, other=0.0)
        values = tl.load(value + offset, mask=inside, other=0.0)
        values2 = tl.load(value + offset2, mask=inside2, other=0.0)
        score = _scores(query, keys, at, end, position, window_at, scale, WINDOW, IS_CAUSAL)
        score2 = _scores(query, keys2, at2, end, position, window_at, scale, WINDOW, IS_CAUSAL)
        block_top, block_top2 = tl.split(tl.max(tl.join(score, score2), 1))
        weight = tl.exp2(score - _base(block_top)[:, None])
        weight2 = tl.exp2(score2 - _base(block_top2)[:, None])
        block_total, block_total2 = tl.split(tl.sum(tl.join(weight, weight2), 1))
        block_result = tl.dot(weight.to(values.dtype), values, input_precision="ieee")
        block_result2 = tl.dot(weight2.to(values.dtype), values2, input_precision="ieee")
        run = _merge(*run, block_top, block_total, block_result)
        into_reach += SIZE
        is_more = passed + SIZE < end - begin
        row, far, run = _settle(
            row, far, run, into_reach, reach, is_more, ROWS, PADDED, STRETCH_SIZE
        )
        into_reach = tl.where(into_reach == reach, 0, into_reach)
        run = _merge(*run, block_top2, block_total2, block_result2)
        into_reach += SIZE
        is_more = passed + 2 * SIZE < end - begin
        row, far, run = _settle(
            row, far, run, into_reach, reach, is_more, ROWS, PADDED, STRETCH_SIZE
        )
        into_reach = tl.where(into_reach == reach, 0, into_reach)
    if end - begin > STRETCH_SIZE:
        run = _merge(*far, *run)
        if begin // reach != (end - 1) // reach:
            run = _merge(*row, *run)
    return run


@triton.jit
def read_kernel(  # noqa: PLR0913
    key,
    value,
    table,
    out,
    length,
    cache_stride,
    table_stride,
    num_parts,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Programs take blocks in turn, heads of a block one after the other."""
    column = tl.arange(0, PADDED)
    found = tl.zeros((SIZE, PADDED), dtype=tl.float32)
    blocks = tl.cdiv(length, SIZE)
    for item in tl.range(
        tl.program_id(0), blocks * num_parts, tl.num_programs(0), num_stages=STAGES
    ):
        head, row = item % num_parts % HEADS, item % num_parts // HEADS
        at = item // num_parts * SIZE + tl.arange(0, SIZE)
        page = pages_at(table + row.to(tl.int64) * table_stride, at, length, PAGE)
        offset = row_offsets(page, at, PAGE, HEAD)[:, None] + column[None, :]
        inside = (at < length)[:, None] & (column < HEAD)[None, :]
        first = head.to(tl.int64) * cache_stride
        found += tl.load(key + first + offset, mask=inside, other=0.0).to(tl.float32)
        if HAS_VALUES:
            found += tl.load(value + first + offset, mask=inside, other=0.0).to(tl.float32)
    place = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)) * PADDED
    tl.store(out + place[:, None] + column[None, :], found)
