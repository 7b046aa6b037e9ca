"""Paged attention for rows of many queries on Hopper: prompts as FlashAttention-3 computes them.

What attention/triton/tiles does, in a language (Gluon) that says which warp does what. A program
for every multiprocessor takes tiles in turn. One warp does nothing but order keys and values from
the copy engine; two groups of four warps have half of a tile's rows each. While a group weighs a
block, the matrix unit has the values of the block before, and the other group's products.

Blocks of KV lie at multiples of BLOCK from position 0, and what a query does not see adds exact
zeros: its bits depend on its sequence and its position alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paceline.kernels.attention.hopper.rows import (
    BLOCK,
    HEAD,
    PAGE,
    ROWS,
    clear_values,
    hold,
    load_queries,
    masked,
    pack,
    scale_rows,
    store_result,
    unpack,
    weigh,
)
from paceline.kernels.attention.reference import AttentionBatch, AttentionWork
from paceline.kernels.attention.triton.spans import LOG2_E
from paceline.kernels.attention.triton.tiles import MOST_FUSED_ROWS
from paceline.kernels.attention.triton.work import PagedHeads
from paceline.kernels.gpu.device import is_hopper, num_multiprocessors

GROUPS = gl.constexpr(2)  # of four warps that attend: all of a tile's rows
STAGES = gl.constexpr(2)  # blocks of keys on their way or in use, and as many of values
# Of a thread. Scores, weights and sums of a group fill its registers; the copy engine needs none.
ATTENDING_REGISTERS, FETCHING_REGISTERS = gl.constexpr(240), gl.constexpr(24)


def is_supported(qkv_TD: Tensor, key_NSH: Tensor, value_NSH: Tensor, batch: AttentionBatch) -> bool:
    """By types, shapes and strides, which a model has once and for all: another kernel has other
    bits. What the copy engine reads begins and goes on at multiples of 16 bytes."""
    num_kv_heads, _, head_size = key_NSH.shape
    return (
        is_hopper(qkv_TD.device)
        and qkv_TD.dtype in (torch.bfloat16, torch.float16)
        and qkv_TD.dtype == key_NSH.dtype == value_NSH.dtype
        and head_size == HEAD.value
        and batch.page_size == PAGE.value
        and batch.group_size <= ROWS.value
        and not batch.window
        and qkv_TD.stride(0) % head_size == 0
        and key_NSH.stride(0) % head_size == 0
        and key_NSH.stride() == value_NSH.stride() == (key_NSH.stride(0), head_size, 1)
        and num_kv_heads * key_NSH.stride(0) // head_size < 2**31
        and all(x.data_ptr() % 16 == 0 for x in (qkv_TD, key_NSH, value_NSH))
    )


def attend_tiles(
    qkv_TD: Tensor,
    pages: PagedHeads,
    batch: AttentionBatch,
    work: AttentionWork,
    scale: float,
    out_TD: Tensor,
) -> None:
    """Fill the outputs of long rows, as attention/triton/tiles does."""
    key_NSH, value_NSH, _, _ = pages
    num_kv_heads, num_slots, head_size = key_NSH.shape
    head_slots = key_NSH.stride(0) // head_size
    slots = [(num_kv_heads - 1) * head_slots + num_slots, head_size]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    key_pages, value_pages = (
        TensorDescriptor(x, slots, [head_size, 1], [PAGE.value, head_size], layout)
        for x in (key_NSH, value_NSH)
    )
    own_blocks = None
    if len(qkv_TD) > MOST_FUSED_ROWS:
        own_blocks = TensorDescriptor.from_tensor(qkv_TD, [BLOCK.value, head_size], layout)
    num_items = len(work.tile_E8) * num_kv_heads
    _prefill_hopper_kernel[(min(num_multiprocessors(qkv_TD.device), num_items),)](
        *(qkv_TD, _query_blocks(qkv_TD, head_size, batch.group_size), own_blocks),
        *(key_pages, value_pages, out_TD, work.tile_E8, work.count_2, batch.table_SP),
        *(scale * LOG2_E, qkv_TD.stride(0), head_slots),
        *(batch.table_SP.stride(0), batch.table_SP.shape[1]),
        KV_HEADS=num_kv_heads,
        GROUP=batch.group_size,
        num_warps=4,
    )


def _query_blocks(qkv_TD: Tensor, head_size: int, group_size: int) -> TensorDescriptor | None:
    """Queries, times the heads that share a KV head, that fill the rows of a group of warps. None
    where none do: the warps fetch them themselves."""
    if ROWS.value % group_size != 0:
        return None
    return TensorDescriptor(
        qkv_TD,
        [len(qkv_TD), qkv_TD.shape[1] // head_size, head_size],
        [qkv_TD.stride(0), head_size, 1],
        [ROWS.value // group_size, group_size, head_size],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3),
    )


@gluon.jit(do_not_specialize=["table_stride", "num_columns"])
def _prefill_hopper_kernel(  # noqa: PLR0913
    qkv_TD,
    query_blocks,
    own_blocks,
    key_pages,
    value_pages,
    out_TD,
    tile_E8,
    count_2,
    table_SP,
    scale,
    qkv_stride,
    head_slots,
    table_stride,
    num_columns,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """The work of each warp group. They share nothing but shared memory."""
    queries = _make_ring(key_pages, GROUPS, ROWS, 1)
    keys = _make_ring(key_pages, STAGES, BLOCK, GROUPS)
    values = _make_ring(key_pages, STAGES, BLOCK, GROUPS)
    fence_async_shared()
    gl.thread_barrier()
    rings = (queries, keys, values)
    work = (tile_E8, gl.load(count_2 + 1) * KV_HEADS, num_columns * PAGE)
    attending = (work, rings, qkv_TD, qkv_stride, out_TD, scale)
    fetching = (work, rings, query_blocks, own_blocks, key_pages, value_pages)
    table = (table_SP, table_stride, head_slots)
    IS_COPIED: gl.constexpr = query_blocks is not None
    gl.warp_specialize(
        [
            (_attend, (0, attending, IS_COPIED, KV_HEADS, GROUP)),
            (_attend, (1, attending, IS_COPIED, KV_HEADS, GROUP)),
            (_fetch, (fetching, table, KV_HEADS, GROUP)),
        ],
        [4, 1],
        [ATTENDING_REGISTERS, FETCHING_REGISTERS],
    )


# ---- what all share


@gluon.jit
def _make_ring(like, NUM: gl.constexpr, ROWS_EACH: gl.constexpr, READERS: gl.constexpr):
    """Buffers, and for each: whether it is full, and whether all its readers are through."""
    buffers = gl.allocate_shared_memory(like.dtype, [NUM, ROWS_EACH, HEAD], like.layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return buffers, full, empty


@gluon.jit
def _place(count):
    """The buffer of a ring after `count` blocks, and the parity of its round."""
    return count % STAGES, count // STAGES & 1


@gluon.jit
def _num_turns(num_items):
    """How many items a program has. They are dealt out there and back, the longest first."""
    programs = gl.num_programs(0)
    full = num_items // programs
    place = gl.where(full % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    return full + gl.where(place < num_items % programs, 1, 0)


@gluon.jit
def _item_at(turn):
    programs = gl.num_programs(0)
    place = gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    return turn * programs + place


# ---- the warp that fetches


@gluon.jit
def _fetch(fetching, table, KV_HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Order everything that the others read, in their order, as soon as there is room."""
    work, rings, query_blocks, own_blocks, key_pages, value_pages = fetching
    tile_E8, num_items, length = work
    queries, keys, values = rings
    table_SP, table_stride, head_slots = table
    num_turns = _num_turns(num_items)
    tile = _load_tile(tile_E8, _item_at(0) // KV_HEADS)  # anything, if there are no tiles
    count = 0
    for turn in range(num_turns):
        entry, num_queries, first_position, table_row, own_position = tile
        head = _item_at(turn) % KV_HEADS
        # Read early, so that no later step waits for it.
        tile = _load_tile(tile_E8, _item_at(gl.minimum(turn + 1, num_turns - 1)) // KV_HEADS)
        end = gl.minimum(first_position + num_queries, length)
        num_blocks = (end + BLOCK - 1) // BLOCK
        pages = (
            table_SP + table_row.to(gl.int64) * table_stride,
            (end - 1) // PAGE,
            head * head_slots,
        )
        num_paged = num_blocks
        if own_blocks is not None:  # whole blocks of the step's own entries, and what is behind
            num_paged = (own_position + BLOCK - 1) // BLOCK
        own_row = entry - first_position
        own_column = (KV_HEADS * GROUP + head) * HEAD
        for i in range(num_blocks + 1):
            if i < num_blocks:
                own_at = (own_row + i * BLOCK, own_column)
                _fetch_block(*(i, count + i, keys, key_pages, pages, own_blocks, own_at, num_paged))
            if i > 0:
                own_at = (own_row + (i - 1) * BLOCK, own_column + KV_HEADS * HEAD)
                _fetch_block(
                    *(i - 1, count + i - 1, values, value_pages, pages),
                    *(own_blocks, own_at, num_paged),
                )
            elif query_blocks is not None:
                _fetch_queries(turn, queries, query_blocks, entry, head, GROUP)
        count += num_blocks


@gluon.jit
def _load_tile(tile_E8, index):
    """First entry, queries, first position, row of the page table, the step's first position."""
    at = tile_E8 + index * 8
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)


@gluon.jit
def _fetch_queries(turn, queries, query_blocks, entry, head, GROUP: gl.constexpr):
    buffers, full, empty = queries
    for group in gl.static_range(GROUPS):
        buffer = buffers.index(group)._reinterpret(
            buffers.dtype, query_blocks.block_type.shape, query_blocks.layout
        )
        bar = full.index(group)
        mbarrier.wait(empty.index(group), turn & 1 ^ 1)
        mbarrier.expect(bar, ROWS * HEAD * 2)
        at = [entry + group * (ROWS // GROUP), head * GROUP, 0]
        tma.async_copy_global_to_shared(query_blocks, at, bar, buffer)


@gluon.jit
def _fetch_block(block, count, ring, cache_pages, pages, own_blocks, own_at, num_paged):
    """Keys or values of a block, once all have read what was in the buffer before."""
    buffers, full, empty = ring
    table, last_column, first_slot = pages
    slot, parity = _place(count)
    buffer, bar, is_free = buffers.index(slot), full.index(slot), empty.index(slot)
    if block < num_paged:
        # By halves: a thread has few registers. The first pages are known before there is room.
        HALF: gl.constexpr = BLOCK // PAGE // 2
        for half in gl.static_range(2):
            at = block * (2 * HALF) + half * HALF
            page = (
                _page_at(table, at, last_column),
                _page_at(table, at + 1, last_column),
                _page_at(table, at + 2, last_column),
                _page_at(table, at + 3, last_column),
            )
            if half == 0:
                mbarrier.wait(is_free, parity ^ 1)
                mbarrier.expect(bar, BLOCK * HEAD * 2)
            for i in gl.static_range(HALF):
                part = buffer.slice((half * HALF + i) * PAGE, PAGE, 0)
                row = first_slot + page[i] * PAGE
                tma.async_copy_global_to_shared(cache_pages, [row, 0], bar, part)
    elif own_blocks is not None:
        mbarrier.wait(is_free, parity ^ 1)
        mbarrier.expect(bar, BLOCK * HEAD * 2)
        tma.async_copy_global_to_shared(own_blocks, [own_at[0], own_at[1]], bar, buffer)


@gluon.jit
def _page_at(table, column, last_column):
    """Behind the end any page does: keys are masked there and values cleared."""
    return gl.maximum(gl.load(table + gl.minimum(column, last_column)), 0)


# ---- the groups that attend


@gluon.jit
def _attend(
    which,
    attending,
    IS_COPIED: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """A group's half of the rows of every tile."""
    work, rings, qkv_TD, qkv_stride, out_TD, scale = attending
    tile_E8, num_items, length = work
    queries, keys, values = rings
    query_buffers, query_full, query_empty = queries
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    result_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    row = which * ROWS + gl.arange(0, ROWS, row_layout)
    query = query_buffers.index(which)
    count = 0
    for turn in range(_num_turns(num_items)):
        item = _item_at(turn)
        head = item % KV_HEADS
        entry, num_queries, first_position, _, _ = _load_tile(tile_E8, item // KV_HEADS)
        end = gl.minimum(first_position + num_queries, length)
        num_blocks = (end + BLOCK - 1) // BLOCK
        # Before this, every row sees whole blocks. The first is masked anyway.
        num_full = (first_position + which * ROWS // GROUP + 1) // BLOCK
        masked_begin = gl.maximum(gl.minimum(num_full, num_blocks), 1)
        position = first_position + row // GROUP
        if IS_COPIED:
            mbarrier.wait(query_full.index(which), turn & 1)
        else:
            load_queries(*(query, qkv_TD, qkv_stride, which, entry, head, num_queries, GROUP))
        seen = (query, position, scale, keys, values)
        state = _weigh_first(seen, count)
        result = gl.zeros([ROWS, HEAD], gl.float32, result_layout)
        result, state = _walk(1, masked_begin, result, state, seen, count, False)
        result, state = _walk(masked_begin, num_blocks, result, state, seen, count, True)
        if IS_COPIED:
            mbarrier.arrive(query_empty.index(which), count=1)
        count += num_blocks
        num_valid = end - (num_blocks - 1) * BLOCK
        result = _add_last(result, state, values, count - 1, num_valid)
        _, _, _, total = state
        store_result(out_TD, result, total, which, entry, head, num_queries, KV_HEADS, GROUP)


@gluon.jit
def _weigh_first(seen, count):
    """The first block, which may be on the diagonal: every query sees position 0."""
    query, position, scale, keys, _ = seen
    buffers, full, empty = keys
    row_layout: gl.constexpr = position.type.layout
    score_layout: gl.constexpr = row_layout.parent
    slot, parity = _place(count)
    mbarrier.wait(full.index(slot), parity)
    no_score = gl.zeros([ROWS, BLOCK], gl.float32, score_layout)
    key = buffers.index(slot).permute((1, 0))
    score = warpgroup_mma(query, key, no_score, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(empty.index(slot), count=1)
    top = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    total = gl.zeros([ROWS], gl.float32, row_layout)
    top, total, weight, keep = weigh(masked(score, position, 0), top, total, scale)
    return pack(weight, buffers.dtype), keep, top, total


@gluon.jit
def _walk(begin, end, result, state, seen, count, IS_MASKED: gl.constexpr):
    """Blocks into the running softmax: scores of each, and the values of the one before it."""
    weights, keep, top, total = state
    query, position, scale, keys, values = seen
    key_buffers, key_full, key_empty = keys
    value_buffers, value_full, value_empty = values
    score_layout: gl.constexpr = position.type.layout.parent
    no_score = gl.zeros([ROWS, BLOCK], gl.float32, score_layout)
    for i in range(begin, end):
        slot, parity = _place(count + i)
        mbarrier.wait(key_full.index(slot), parity)
        key = key_buffers.index(slot).permute((1, 0))
        next_score = warpgroup_mma(query, key, no_score, use_acc=False, is_async=True)
        last_slot, last_parity = _place(count + i - 1)
        weight = unpack(weights, key_buffers.dtype, result)
        result = scale_rows(result, keep)
        mbarrier.wait(value_full.index(last_slot), last_parity)
        value = value_buffers.index(last_slot)
        next_result = warpgroup_mma(weight, value, result, is_async=True)
        score = warpgroup_mma_wait(1, deps=[next_score])
        mbarrier.arrive(key_empty.index(slot), count=1)
        if IS_MASKED:
            score = masked(score, position, i * BLOCK)
        top, total, next_weight, keep = weigh(score, top, total, scale)
        weights = pack(next_weight, key_buffers.dtype)
        total = hold(total)
        result, weight, weights = warpgroup_mma_wait(0, deps=[next_result, weight, weights])
        mbarrier.arrive(value_empty.index(last_slot), count=1)
    return result, (weights, keep, top, total)


@gluon.jit
def _add_last(result, state, values, count, num_valid):
    """The values of the last block."""
    weights, keep, _, _ = state
    buffers, full, empty = values
    slot, parity = _place(count)
    mbarrier.wait(full.index(slot), parity)
    value = buffers.index(slot)
    clear_values(value, num_valid)
    weight = unpack(weights, buffers.dtype, result)
    result = warpgroup_mma(weight, value, scale_rows(result, keep), is_async=True)
    result = warpgroup_mma_wait(0, deps=[result])
    mbarrier.arrive(empty.index(slot), count=1)
    return result
