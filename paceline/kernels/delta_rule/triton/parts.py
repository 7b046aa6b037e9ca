"""What the kernels of the gated delta rule share: raw inputs, the convolution, heads and gates."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

# A row of more queries is computed in chunks, unless it has drafts or accepted drafts to replay.
SHORT: tl.constexpr = tl.constexpr(8)
_NORM_EPS: tl.constexpr = tl.constexpr(1e-6)


class Sizes(NamedTuple):
    """Of one rank's heads and one layer's state; a tl.constexpr of the kernels."""

    NUM_KEYS: int
    NUM_VALUES: int
    KEY: int
    VALUE: int
    TAPS: int
    KEPT: int  # positions whose inputs a slot keeps
    WIDTH: int  # columns of an input
    BLOCK_K: int  # KEY, padded
    MARKS: int


@triton.jit
def is_chunked(query_len, committed, start, state_len):
    """Elementwise: which of the kernels computes a row."""
    return (query_len > SHORT) & (committed == query_len) & (start == state_len)


@triton.jit
def load_row(rows, row):
    """First entry, queries, first position, final positions and length of the state."""
    _, row_start_B, query_len_B, start_B, committed_B, state_len_B, _, _ = rows
    row_start = tl.load(row_start_B + row).to(tl.int32)
    query_len = tl.load(query_len_B + row).to(tl.int32)
    start = tl.load(start_B + row).to(tl.int32)
    committed = tl.load(committed_B + row).to(tl.int32)
    return row_start, query_len, start, committed, tl.load(state_len_B + row).to(tl.int32)


@triton.jit
def source_of(input_TP, input_stride, input_SRP, slot, row_start, start, SIZES: tl.constexpr):
    """Where the inputs of a row's positions are: see `raw_inputs`."""
    kept_RP = input_SRP + slot * (SIZES.KEPT * SIZES.WIDTH)
    return input_TP, input_stride, kept_RP, row_start, start


@triton.jit
def raw_inputs(source, position, is_valid, column, SIZES: tl.constexpr):
    """Columns of inputs by position: from the slot before `start`, else the row's own; else 0.

    `is_valid` has the shape of the result; `position` and `column` broadcast to it.
    """
    input_TP, input_stride, kept_RP, row_start, start = source
    is_valid = is_valid & (position >= 0)
    is_own = position >= start
    own_at = input_TP + (row_start + position - start).to(tl.int64) * input_stride + column
    kept_at = kept_RP + position % SIZES.KEPT * SIZES.WIDTH + column
    own = tl.load(own_at, mask=is_valid & is_own, other=0.0)
    kept = tl.load(kept_at, mask=is_valid & (position < start), other=0.0)
    return tl.where(is_own, own, kept)


@triton.jit
def convolved(source, conv_CJ, at_P, column_W, is_inside_W, SIZES: tl.constexpr):
    """silu(convolution) of channels, in fp32. `at_P`: positions, and which of them are valid; the
    others get 0."""
    position_P, is_valid_P = at_P
    TAPS: tl.constexpr = SIZES.TAPS
    is_valid_PW = is_valid_P[:, None] & is_inside_W[None, :]
    sums_PW = tl.zeros(is_valid_PW.shape, dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        tap_P = position_P - (TAPS - 1 - tap)
        raw_PW = raw_inputs(source, tap_P[:, None], is_valid_PW, column_W[None, :], SIZES)
        weight_W = tl.load(conv_CJ + column_W * TAPS + tap, mask=is_inside_W, other=0.0)
        sums_PW += raw_PW.to(tl.float32) * weight_W.to(tl.float32)[None, :]
    return sums_PW / (1.0 + tl.exp(-sums_PW))


@triton.jit
def unit(x_PK):
    return x_PK * tl.rsqrt(tl.sum(x_PK * x_PK, axis=1) + _NORM_EPS)[:, None]


@triton.jit
def query_and_key(source, conv_CJ, at_P, head, SIZES: tl.constexpr):
    """Of a value head: of unit length, the query scaled."""
    KEY: tl.constexpr = SIZES.KEY
    key_K = tl.arange(0, SIZES.BLOCK_K)
    column_K = head // (SIZES.NUM_VALUES // SIZES.NUM_KEYS) * KEY + key_K
    query_PK = convolved(source, conv_CJ, at_P, column_K, key_K < KEY, SIZES)
    column_K += SIZES.NUM_KEYS * KEY
    key_PK = convolved(source, conv_CJ, at_P, column_K, key_K < KEY, SIZES)
    return unit(query_PK) * (KEY**-0.5), unit(key_PK)


@triton.jit
def values(source, conv_CJ, at_P, head, value_V, SIZES: tl.constexpr):
    column_V = 2 * SIZES.NUM_KEYS * SIZES.KEY + head * SIZES.VALUE + value_V
    return convolved(source, conv_CJ, at_P, column_V, value_V < SIZES.VALUE, SIZES)


@triton.jit
def gates(source, weights, at_P, head, SIZES: tl.constexpr):
    """Log decay and beta; both 0 where a position is not valid."""
    position_P, is_valid_P = at_P
    column = SIZES.WIDTH - 2 * SIZES.NUM_VALUES + head
    b_P = raw_inputs(source, position_P, is_valid_P, column, SIZES)
    a_P = raw_inputs(source, position_P, is_valid_P, column + SIZES.NUM_VALUES, SIZES)
    x_P = a_P.to(tl.float32) + tl.load(weights.bias_N + head).to(tl.float32)
    softplus_P = tl.where(x_P > 20.0, x_P, tl.log(1.0 + tl.exp(tl.minimum(x_P, 20.0))))
    log_decay_P = tl.load(weights.decay_N + head).to(tl.float32) * softplus_P
    beta_P = 1.0 / (1.0 + tl.exp(-b_P.to(tl.float32)))
    return tl.where(is_valid_P, log_decay_P, 0.0), tl.where(is_valid_P, beta_P, 0.0)


@triton.jit
def keep_inputs(source, num_final, end, part, NUM_PARTS: tl.constexpr, SIZES: tl.constexpr):
    """A share of the columns of a row's own inputs: its drafts, and the taps before them."""
    input_TP, input_stride, kept_RP, row_start, start = source
    WIDTH: tl.constexpr = SIZES.WIDTH
    SHARE: tl.constexpr = triton.next_power_of_2(triton.cdiv(WIDTH, NUM_PARTS))
    column_W = part * SHARE + tl.arange(0, SHARE)
    for position in range(tl.maximum(start, num_final - (SIZES.TAPS - 1)), end):
        entry = (row_start + position - start).to(tl.int64)
        own_W = tl.load(input_TP + entry * input_stride + column_W, mask=column_W < WIDTH)
        kept_at = kept_RP + position % SIZES.KEPT * WIDTH + column_W
        tl.store(kept_at, own_W, mask=column_W < WIDTH)


@triton.jit
def save_inputs(
    source,
    saved_input_EJP,
    marks_M,
    state_len,
    num_final,
    part,
    NUM_PARTS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """A share of the columns of the TAPS - 1 inputs before each mark that the row has passed."""
    WIDTH: tl.constexpr = SIZES.WIDTH
    TAPS: tl.constexpr = SIZES.TAPS
    SHARE: tl.constexpr = triton.next_power_of_2(triton.cdiv(WIDTH, NUM_PARTS))
    column_W = part * SHARE + tl.arange(0, SHARE)
    for mark in range(SIZES.MARKS):
        length = tl.load(marks_M[0] + mark).to(tl.int32)
        if (length > state_len) & (length <= num_final):
            entry = tl.load(marks_M[1] + mark).to(tl.int64)
            for tap in tl.static_range(TAPS - 1):
                position = length - (TAPS - 1) + tap
                raw_W = raw_inputs(source, position, column_W < WIDTH, column_W, SIZES)
                at = saved_input_EJP + (entry * (TAPS - 1) + tap) * WIDTH + column_W
                tl.store(at, raw_W, mask=column_W < WIDTH)
