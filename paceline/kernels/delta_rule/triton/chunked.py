"""The gated delta rule in chunks: rows of many positions, all of them final.

Within a chunk that begins with state S0, with G_i the sum of its log decays up to position i:

    delta_i = beta_i (v_i - e^G_i S0 k_i - sum over j < i of e^(G_i - G_j) (k_i . k_j) delta_j)
    S_i = e^G_i S0 + sum over j <= i of e^(G_i - G_j) delta_j k_j^T
    out_i = S_i q_i

The first line is a unit lower triangular system, whose inverse T depends on no state. So one kernel
prepares all chunks at once: delta = u - w S0^T with u = T (beta v) and w = T (beta e^G k). A second
one passes the state from chunk to chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.delta_rule.reference import DeltaSizes
from paceline.kernels.delta_rule.triton.parts import (
    gates,
    is_chunked,
    load_row,
    query_and_key,
    save_inputs,
    source_of,
    values,
)
from paceline.kernels.gpu.triton import wait_for_input

CHUNK = 64


class Chunks(NamedTuple):
    """What is known of each chunk before its state is. Z chunks, I positions of a chunk."""

    query_ZNIK: Tensor  # by key head
    key_ZNIK: Tensor  # by key head
    attention_ZNII: Tensor  # e^(G_i - G_j) q_i . k_j
    w_ZNIK: Tensor
    u_ZNIV: Tensor
    log_decay_ZNI: Tensor  # fp32: G

    @staticmethod
    def empty(num_chunks: int, sizes: DeltaSizes, like: Tensor) -> Chunks:
        key_size, value_size = padded(sizes.key_size), padded(sizes.value_size)
        keys, values = (num_chunks, sizes.num_key_heads), (num_chunks, sizes.num_value_heads)
        return Chunks(
            like.new_empty(*keys, CHUNK, key_size),
            like.new_empty(*keys, CHUNK, key_size),
            like.new_empty(*values, CHUNK, CHUNK),
            like.new_empty(*values, CHUNK, key_size),
            like.new_empty(*values, CHUNK, value_size),
            like.new_empty(*values, CHUNK, dtype=torch.float32),
        )


def padded(size: int) -> int:
    """Sizes of a head that a product takes."""
    return max(triton.next_power_of_2(size), 16)


@triton.jit
def _count_chunks(rows, row_R, num_rows, SIZE: tl.constexpr):
    """Chunks of rows: 0 for those that go token by token."""
    _, _, query_len_B, start_B, committed_B, state_len_B, _, _ = rows
    is_row_R = row_R < num_rows
    query_len_R = tl.load(query_len_B + row_R, mask=is_row_R, other=0).to(tl.int32)
    start_R = tl.load(start_B + row_R, mask=is_row_R, other=0).to(tl.int32)
    committed_R = tl.load(committed_B + row_R, mask=is_row_R, other=0).to(tl.int32)
    state_len_R = tl.load(state_len_B + row_R, mask=is_row_R, other=0).to(tl.int32)
    is_ours_R = is_chunked(query_len_R, committed_R, start_R, state_len_R)
    return tl.where(is_ours_R, (query_len_R + SIZE - 1) // SIZE, 0)


@triton.jit
def _row_of_chunk(rows, chunk, num_rows, SIZE: tl.constexpr):
    """The row of a chunk and its first chunk. At least num_rows if there is no such chunk."""
    row, first, total = 0, 0, 0
    for row_0 in range(0, num_rows, 32):
        chunks_R = _count_chunks(rows, row_0 + tl.arange(0, 32), num_rows, SIZE)
        is_before_R = total + tl.cumsum(chunks_R, axis=0) <= chunk
        row += tl.sum(is_before_R.to(tl.int32), axis=0)
        first += tl.sum(tl.where(is_before_R, chunks_R, 0), axis=0)
        total += tl.sum(chunks_R, axis=0)
    return row, first


@triton.jit
def _chunk_of_row(rows, row, num_rows, SIZE: tl.constexpr):
    """The first chunk of a row."""
    first = 0
    for row_0 in range(0, row, 32):
        row_R = row_0 + tl.arange(0, 32)
        chunks_R = _count_chunks(rows, row_R, num_rows, SIZE)
        first += tl.sum(tl.where(row_R < row, chunks_R, 0), axis=0)
    return first


@triton.jit
def _inverse(lower_II, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + lower)^-1 of a strictly lower triangular matrix of 64 rows.

    Blocks of 16 on the diagonal are inverted row by row. With D their inverses and M = D times what
    is left below them, the inverse is (1 - M + M^2 - M^3) D: M^4 is 0. Powers of the whole matrix
    would grow without bound where keys are alike.
    """
    tl.static_assert(SIZE == 64)
    block, index = tl.arange(0, 4), tl.arange(0, 16)
    is_diagonal = block[:, None, None, None] == block[None, None, :, None]
    lower_4 = tl.reshape(lower_II, (4, 16, 4, 16))
    small = tl.sum(tl.where(is_diagonal, lower_4, 0.0), axis=2)
    below_II = tl.reshape(tl.where(is_diagonal, 0.0, lower_4), (SIZE, SIZE))
    inverse = tl.where(index[None, :, None] == index[None, None, :], 1.0, 0.0 * small)
    for i in range(1, 16):
        is_row = index[None, :, None] == i
        row = tl.sum(tl.where(is_row, small, 0.0), axis=1)
        solved = tl.sum(row[:, :, None] * inverse, axis=1)
        inverse = tl.where(is_row, inverse - solved[:, None, :], inverse)
    inverse_4 = tl.where(is_diagonal, inverse[:, :, None, :], 0.0 * lower_4)
    inverse_II = tl.reshape(inverse_4, (SIZE, SIZE))
    power_II = tl.dot(inverse_II, below_II, input_precision=PRECISION)
    square_II = tl.dot(power_II, power_II, input_precision=PRECISION)
    cube_II = tl.dot(square_II, power_II, input_precision=PRECISION)
    rest_II = tl.dot(square_II - power_II - cube_II, inverse_II, input_precision=PRECISION)
    return inverse_II + rest_II


@triton.jit(do_not_specialize=["num_rows"])
def prepare_kernel(  # noqa: PLR0913
    input_TP,
    weights,
    input_SRP,
    chunks,
    rows,
    input_stride,
    num_rows,
    SIZES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One chunk of one value head. `rows`: the tensors of DeltaRows."""
    wait_for_input(IS_DEPENDENT)
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    row, first = _row_of_chunk(rows, chunk, num_rows, SIZE)
    if row >= num_rows:
        return
    row_start, query_len, start, _, _ = load_row(rows, row)
    slot = tl.load(rows[0] + row).to(tl.int64)

    NUM_VALUES: tl.constexpr = SIZES.NUM_VALUES
    GROUP: tl.constexpr = NUM_VALUES // SIZES.NUM_KEYS
    BLOCK_K: tl.constexpr = SIZES.BLOCK_K
    index_I, key_K, value_V = tl.arange(0, SIZE), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    position_I = start + (chunk - first) * SIZE + index_I
    at_I = (position_I, position_I < start + query_len)
    source = source_of(input_TP, input_stride, input_SRP, slot, row_start, start, SIZES)
    dtype: tl.constexpr = chunks.query_ZNIK.dtype.element_ty

    # Positions past the end have no decay, no beta, and keys and values of 0.
    log_decay_I, beta_I = gates(source, weights, at_I, head, SIZES)
    log_decay_I = tl.cumsum(log_decay_I, axis=0)
    at = chunk.to(tl.int64) * NUM_VALUES + head
    tl.store(chunks.log_decay_ZNI + at * SIZE + index_I, log_decay_I)
    query_IK, key_IK = query_and_key(source, weights.conv_CJ, at_I, head, SIZES)
    query_IK, key_IK = query_IK.to(dtype), key_IK.to(dtype)
    part_IK = index_I[:, None] * BLOCK_K + key_K[None, :]
    if head % GROUP == 0:
        key_head = chunk.to(tl.int64) * SIZES.NUM_KEYS + head // GROUP
        key_at = key_head * (SIZE * BLOCK_K) + part_IK
        tl.store(chunks.query_ZNIK + key_at, query_IK)
        tl.store(chunks.key_ZNIK + key_at, key_IK)

    is_past_II = index_I[:, None] >= index_I[None, :]
    decay_II = tl.exp(tl.where(is_past_II, log_decay_I[:, None] - log_decay_I[None, :], 0.0))
    decay_II = tl.where(is_past_II, decay_II, 0.0)
    attention_II = tl.dot(query_IK, tl.trans(key_IK), input_precision=PRECISION) * decay_II
    part_II = index_I[:, None] * SIZE + index_I[None, :]
    tl.store(chunks.attention_ZNII + at * (SIZE * SIZE) + part_II, attention_II.to(dtype))

    products_II = tl.dot(key_IK, tl.trans(key_IK), input_precision=PRECISION)
    is_before_II = index_I[:, None] > index_I[None, :]
    lower_II = tl.where(is_before_II, products_II * decay_II * beta_I[:, None], 0.0)
    inverse_II = _inverse(lower_II, SIZE, EXACT).to(dtype)
    scaled_IK = (key_IK.to(tl.float32) * (beta_I * tl.exp(log_decay_I))[:, None]).to(dtype)
    w_IK = tl.dot(inverse_II, scaled_IK, input_precision=PRECISION)
    tl.store(chunks.w_ZNIK + at * (SIZE * BLOCK_K) + part_IK, w_IK.to(dtype))
    value_IV = values(source, weights.conv_CJ, at_I, head, value_V, SIZES)
    value_IV = (value_IV * beta_I[:, None]).to(dtype)
    u_IV = tl.dot(inverse_II, value_IV, input_precision=PRECISION)
    part_IV = index_I[:, None] * BLOCK_V + value_V[None, :]
    tl.store(chunks.u_ZNIV + at * (SIZE * BLOCK_V) + part_IV, u_IV.to(dtype))


@triton.jit
def _next_mark(mark_len_M, passed, end, MARKS: tl.constexpr):
    """The shortest length above `passed`; end + 1 if there is none."""
    found = end + 1
    for mark in range(MARKS):
        length = tl.load(mark_len_M + mark).to(tl.int32)
        found = tl.where((length > passed) & (length < found), length, found)
    return found


@triton.jit
def _entry(mark_len_M, mark_entry_M, length, MARKS: tl.constexpr):
    """The snapshot of the mark at a length."""
    entry = tl.load(mark_entry_M).to(tl.int64)
    for mark in range(1, MARKS):
        is_it = tl.load(mark_len_M + mark).to(tl.int32) == length
        entry = tl.where(is_it, tl.load(mark_entry_M + mark).to(tl.int64), entry)
    return entry


@triton.jit
def _load_chunk(chunks, chunk, head, value_V, shape, SIZES: tl.constexpr):
    """u, w, keys and log decays of one chunk of a head."""
    SIZE, BLOCK_V = shape
    BLOCK_K: tl.constexpr = SIZES.BLOCK_K
    index_I = tl.arange(0, SIZE)
    part_IK = index_I[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    part_IV = index_I[:, None] * BLOCK_V + value_V[None, :]
    at = chunk * SIZES.NUM_VALUES + head
    key_at = chunk * SIZES.NUM_KEYS + head // (SIZES.NUM_VALUES // SIZES.NUM_KEYS)
    u_IV = tl.load(chunks.u_ZNIV + at * (SIZE * BLOCK_V) + part_IV).to(tl.float32)
    w_IK = tl.load(chunks.w_ZNIK + at * (SIZE * BLOCK_K) + part_IK)
    key_IK = tl.load(chunks.key_ZNIK + key_at * (SIZE * BLOCK_K) + part_IK)
    return u_IV, w_IK, key_IK, tl.load(chunks.log_decay_ZNI + at * SIZE + index_I)


@triton.jit
def _apply_chunk(
    state_KV, chunks, chunk, head, value_V, shape, SIZES: tl.constexpr, PRECISION: tl.constexpr
):
    """The state behind a chunk, and what its positions read."""
    SIZE, _ = shape
    u_IV, w_IK, key_IK, log_decay_I = _load_chunk(chunks, chunk, head, value_V, shape, SIZES)
    BLOCK_K: tl.constexpr = SIZES.BLOCK_K
    index_I = tl.arange(0, SIZE)
    part_IK = index_I[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    part_II = index_I[:, None] * SIZE + index_I[None, :]
    at = chunk * SIZES.NUM_VALUES + head
    key_at = chunk * SIZES.NUM_KEYS + head // (SIZES.NUM_VALUES // SIZES.NUM_KEYS)
    query_IK = tl.load(chunks.query_ZNIK + key_at * (SIZE * BLOCK_K) + part_IK)
    attention_II = tl.load(chunks.attention_ZNII + at * (SIZE * SIZE) + part_II)
    last = tl.load(chunks.log_decay_ZNI + at * SIZE + SIZE - 1)

    rounded_KV = state_KV.to(key_IK.dtype)
    delta_IV = u_IV - tl.dot(w_IK, rounded_KV, input_precision=PRECISION)
    out_IV = tl.dot(query_IK, rounded_KV, input_precision=PRECISION)
    out_IV *= tl.exp(log_decay_I)[:, None]
    rounded_IV = delta_IV.to(key_IK.dtype)
    out_IV = tl.dot(attention_II, rounded_IV, acc=out_IV, input_precision=PRECISION)
    scaled_IV = (delta_IV * tl.exp(last - log_decay_I)[:, None]).to(key_IK.dtype)
    state_KV *= tl.exp(last)
    state_KV = tl.dot(tl.trans(key_IK), scaled_IV, acc=state_KV, input_precision=PRECISION)
    return state_KV, out_IV


@triton.jit
def _state_within(  # noqa: PLR0913
    state_KV,
    chunks,
    chunk,
    head,
    value_V,
    count,
    shape,
    SIZES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state after the first `count` positions of a chunk: as if it ended there."""
    SIZE, _ = shape
    u_IV, w_IK, key_IK, log_decay_I = _load_chunk(chunks, chunk, head, value_V, shape, SIZES)
    last = tl.load(chunks.log_decay_ZNI + (chunk * SIZES.NUM_VALUES + head) * SIZE + count - 1)
    is_before_I = tl.arange(0, SIZE) < count
    scale_I = tl.exp(tl.where(is_before_I, last - log_decay_I, 0.0))
    rounded_KV = state_KV.to(key_IK.dtype)
    delta_IV = u_IV - tl.dot(w_IK, rounded_KV, input_precision=PRECISION)
    scaled_IV = tl.where(is_before_I[:, None], delta_IV * scale_I[:, None], 0.0)
    key_KI, kept_KV = tl.trans(key_IK), state_KV * tl.exp(last)
    return tl.dot(key_KI, scaled_IV.to(key_IK.dtype), acc=kept_KV, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows"])
def pass_kernel(  # noqa: PLR0913
    input_TP,
    state,
    chunks,
    rows,
    out_TV,
    input_stride,
    num_rows,
    SIZES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART_V: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Some values of one head of one row, over all of its chunks. The state is transposed here."""
    wait_for_input(IS_DEPENDENT)
    head = tl.program_id(1)
    row = tl.program_id(2)
    row_start, query_len, start, committed, state_len = load_row(rows, row)
    if not is_chunked(query_len, committed, start, state_len):
        return
    slot = tl.load(rows[0] + row).to(tl.int64)
    end = start + query_len
    chunk = _chunk_of_row(rows, row, num_rows, SIZE).to(tl.int64)

    VALUE: tl.constexpr = SIZES.VALUE
    STRIDE: tl.constexpr = SIZES.NUM_VALUES * VALUE
    STATE: tl.constexpr = STRIDE * SIZES.KEY
    MARKS: tl.constexpr = SIZES.MARKS
    shape: tl.constexpr = (SIZE, BLOCK_V)
    marks_M = (rows[6] + row * MARKS, rows[7] + row * MARKS)
    index_I, key_K = tl.arange(0, SIZE), tl.arange(0, SIZES.BLOCK_K)
    value_V = tl.program_id(0) * PART_V + tl.arange(0, PART_V)
    is_value_V = value_V < VALUE
    is_inside_KV = (key_K < SIZES.KEY)[:, None] & is_value_V[None, :]
    part_KV = (head * VALUE + value_V)[None, :] * SIZES.KEY + key_K[:, None]
    out_V = out_TV + head * VALUE + value_V
    state_at = state.state_SNVK + slot * STATE + part_KV
    state_KV = tl.load(state_at, mask=is_inside_KV & (state_len > 0), other=0.0)
    passed = start
    first = start
    for _ in range(MARKS + 1):
        # Whole chunks up to the one in which the next mark lies; without a mark, all of them.
        target = _next_mark(marks_M[0], passed, end, MARKS)
        stop = tl.where(target > end, end, first + (target - 1 - first) // SIZE * SIZE)
        for position in range(first, stop, SIZE):
            state_KV, out_IV = _apply_chunk(
                state_KV, chunks, chunk, head, value_V, shape, SIZES, PRECISION
            )
            entry_I = (row_start + position + index_I - start).to(tl.int64)
            out_at = out_V[None, :] + entry_I[:, None] * STRIDE
            is_out_IV = (position + index_I < end)[:, None] & is_value_V[None, :]
            tl.store(out_at, out_IV.to(out_TV.dtype.element_ty), mask=is_out_IV)
            chunk += 1
        if target <= end:
            count = target - stop
            there_KV = _state_within(
                state_KV, chunks, chunk, head, value_V, count, shape, SIZES, PRECISION
            )
            saved_at = state.saved_state_ENVK + _entry(*marks_M, target, MARKS) * STATE + part_KV
            tl.store(saved_at, there_KV, mask=is_inside_KV)
        first = stop
        passed = target
    tl.store(state_at, state_KV, mask=is_inside_KV)

    source = source_of(input_TP, input_stride, state.input_SRP, slot, row_start, start, SIZES)
    part = head * tl.num_programs(0) + tl.program_id(0)
    NUM_PARTS: tl.constexpr = SIZES.NUM_VALUES * (BLOCK_V // PART_V)
    marked = (source, state.saved_input_EJP, marks_M, state_len, end)
    save_inputs(*marked, part, NUM_PARTS, SIZES)
