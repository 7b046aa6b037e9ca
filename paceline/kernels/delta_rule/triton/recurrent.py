"""The gated delta rule token by token: rows of few positions, rows with drafts.

A program has some values of one head of one row. It reads its part of the state once, replays what
was accepted, and writes the state once, after the committed positions; drafts stay in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.delta_rule.triton.parts import (
    gates,
    is_chunked,
    keep_inputs,
    load_row,
    query_and_key,
    save_inputs,
    source_of,
    values,
)
from paceline.kernels.gpu.triton import wait_for_input


@triton.jit(do_not_specialize=["num_rows", "num_entries"])
def recurrent_kernel(  # noqa: PLR0913
    input_TP,
    weights,
    state,
    rows,
    out_TV,
    input_stride,
    num_rows,
    num_entries,
    SIZES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr,
    KEEPS_INPUTS: tl.constexpr,
    HAS_CHUNKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """`rows`: the tensors of DeltaRows."""
    wait_for_input(IS_DEPENDENT)
    head = tl.program_id(1)
    row = tl.program_id(2)
    VALUE: tl.constexpr = SIZES.VALUE
    STRIDE: tl.constexpr = SIZES.NUM_VALUES * VALUE
    value_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value_V = value_V < VALUE
    index_P = tl.arange(0, BLOCK_P)
    out_V = out_TV + head * VALUE + value_V
    row_start, query_len, start, committed, state_len = load_row(rows, row)
    next_start = tl.load(rows[1] + row + 1, mask=row + 1 < num_rows, other=num_entries)
    gap = (row_start + query_len, next_start.to(tl.int32))
    _clear(out_V, is_value_V, gap, STRIDE, BLOCK_P)
    if (query_len == 0) | (is_chunked(query_len, committed, start, state_len) & HAS_CHUNKS):
        return
    slot = tl.load(rows[0] + row).to(tl.int64)
    num_final = start + committed
    end = start + query_len

    STATE: tl.constexpr = STRIDE * SIZES.KEY
    source = source_of(input_TP, input_stride, state.input_SRP, slot, row_start, start, SIZES)
    marks_M = (rows[6] + row * SIZES.MARKS, rows[7] + row * SIZES.MARKS)
    key_K = tl.arange(0, SIZES.BLOCK_K)
    is_inside_VK = is_value_V[:, None] & (key_K < SIZES.KEY)[None, :]
    part_VK = (head * VALUE + value_V)[:, None] * SIZES.KEY + key_K[None, :]
    state_at = state.state_SNVK + slot * STATE + part_VK
    state_VK = tl.load(state_at, mask=is_inside_VK & (state_len > 0), other=0.0)
    for first in range(state_len, end, BLOCK_P):
        heads_P = _load_heads(source, weights, first + index_P, end, head, value_V, SIZES)
        for i in range(tl.minimum(end - first, BLOCK_P)):
            state_VK, found_V = _apply_token(state_VK, heads_P, index_P == i)
            length = first + i + 1
            at = out_V + (row_start + length - 1 - start).to(tl.int64) * STRIDE
            found_V = found_V.to(out_TV.dtype.element_ty)
            tl.store(at, found_V, mask=is_value_V & (length > start))
            if length == num_final:
                tl.store(state_at, state_VK, mask=is_inside_VK)
            if length <= num_final:
                saved = (state.saved_state_ENVK, STATE, part_VK, is_inside_VK)
                _save_state(state_VK, saved, marks_M, length, SIZES.MARKS)

    # Inputs of marks and of its positions: each program of the row takes a share of the columns.
    part = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    NUM_PARTS: tl.constexpr = SIZES.NUM_VALUES * ((VALUE + BLOCK_V - 1) // BLOCK_V)
    marked = (source, state.saved_input_EJP, marks_M, state_len, num_final)
    save_inputs(*marked, part, NUM_PARTS, SIZES)
    if KEEPS_INPUTS:
        keep_inputs(source, num_final, end, part, NUM_PARTS, SIZES)


@triton.jit
def _clear(out_V, is_value_V, gap, STRIDE: tl.constexpr, BLOCK_P: tl.constexpr):
    """Entries between this row and the next are not computed: zeros."""
    zeros_PV = tl.zeros((BLOCK_P, is_value_V.shape[0]), dtype=out_V.dtype.element_ty)
    for first in range(gap[0], gap[1], BLOCK_P):
        entry_P = (first + tl.arange(0, BLOCK_P)).to(tl.int64)
        at = out_V[None, :] + entry_P[:, None] * STRIDE
        tl.store(at, zeros_PV, mask=(entry_P < gap[1])[:, None] & is_value_V[None, :])


@triton.jit
def _load_heads(source, weights, position_P, end, head, value_V, SIZES: tl.constexpr):
    """Query, key, value, log decay and beta of some positions."""
    at_P = (position_P, position_P < end)
    query_PK, key_PK = query_and_key(source, weights.conv_CJ, at_P, head, SIZES)
    value_PV = values(source, weights.conv_CJ, at_P, head, value_V, SIZES)
    log_decay_P, beta_P = gates(source, weights, at_P, head, SIZES)
    return query_PK, key_PK, value_PV, log_decay_P, beta_P


@triton.jit
def _apply_token(state_VK, heads_P, is_now_P):
    """The state after one of the positions, and what it reads."""
    query_PK, key_PK, value_PV, log_decay_P, beta_P = heads_P
    query_K = tl.sum(tl.where(is_now_P[:, None], query_PK, 0.0), axis=0)
    key_K = tl.sum(tl.where(is_now_P[:, None], key_PK, 0.0), axis=0)
    value_V = tl.sum(tl.where(is_now_P[:, None], value_PV, 0.0), axis=0)
    beta = tl.sum(tl.where(is_now_P, beta_P, 0.0), axis=0)
    state_VK *= tl.exp(tl.sum(tl.where(is_now_P, log_decay_P, 0.0), axis=0))
    read_V = tl.sum(state_VK * key_K[None, :], axis=1)
    state_VK += ((value_V - read_V) * beta)[:, None] * key_K[None, :]
    return state_VK, tl.sum(state_VK * query_K[None, :], axis=1)


@triton.jit
def _save_state(state_VK, saved, marks_M, length, MARKS: tl.constexpr):
    """Into the snapshots of marks at this length."""
    saved_state_ENVK, STATE, part_VK, is_inside_VK = saved
    for mark in range(MARKS):
        if tl.load(marks_M[0] + mark) == length:
            entry = tl.load(marks_M[1] + mark).to(tl.int64)
            tl.store(saved_state_ENVK + entry * STATE + part_VK, state_VK, mask=is_inside_VK)
