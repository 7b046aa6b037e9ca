"""Triton twins of kernels/masks at fixed shapes: programs ask their slot first, and mostly exit.

They write logits in place and need no memory of their own. Shape letters: B rows, N logits rows,
V vocabulary, S slots, E table entries, B words of 32 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.masks import Stops
from paceline.kernels.rows import Asking, WindowRows

_CHUNK = 4096


def keep_allowed_by_slot(
    logits_NV: Tensor, rows: WindowRows, asking: Asking, bits_SB: Tensor
) -> None:
    _keep_allowed(logits_NV, rows, asking, bits_SB)


def keep_allowed_by_row(logits_NV: Tensor, bits_NB: Tensor) -> None:
    _keep_allowed(logits_NV, None, None, bits_NB)


def _keep_allowed(
    logits_NV: Tensor, rows: WindowRows | None, asking: Asking | None, bits_XB: Tensor
) -> None:
    num_rows, vocab_size = logits_NV.shape
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    # Where every row has a mask of its own nobody asks slots, and any pointer will do.
    of_slot = (bits_XB, bits_XB, 1, bits_XB, 0)
    if rows is not None and asking is not None:
        of_slot = (rows.slot_B, rows.width_B, rows.width, *asking)
    _allowed_kernel[(num_rows * num_chunks,)](
        *(logits_NV, logits_NV.stride(0), vocab_size, *of_slot, bits_XB, bits_XB.stride(0)),
        BY_SLOT=rows is not None,
        NUM_CHUNKS=num_chunks,
        CHUNK=min(_CHUNK, triton.next_power_of_2(vocab_size)),
    )


def ban_early_stops_by_slot(
    logits_NV: Tensor, rows: WindowRows, asking: Asking, stops: Stops
) -> None:
    eos_SE, stop_SE = stops.eos_SE, stops.stop_SE
    _early_kernel[(len(logits_NV),)](
        *(logits_NV, logits_NV.stride(0), rows.slot_B, rows.width_B, rows.length_B, rows.width),
        *(*asking, stops.min_len_S),
        *(eos_SE, eos_SE.stride(0), eos_SE.shape[1], stop_SE, stop_SE.stride(0), stop_SE.shape[1]),
        IDS=triton.next_power_of_2(max(eos_SE.shape[1], stop_SE.shape[1])),
        num_warps=1,
    )


def add_bias_by_slot(
    logits_NV: Tensor, rows: WindowRows, asking: Asking, ids_SE: Tensor, values_SE: Tensor
) -> None:
    """The ids of a slot differ from one another: a mapping has no key twice."""
    _bias_kernel[(len(logits_NV),)](
        *(logits_NV, logits_NV.stride(0), rows.slot_B, rows.width_B, rows.width),
        *(*asking, ids_SE, ids_SE.stride(0), values_SE, values_SE.stride(0), ids_SE.shape[1]),
        IDS=triton.next_power_of_2(ids_SE.shape[1]),
    )


@triton.jit
def forbid(logits_V, token, is_meant):
    """Make tokens impossible. Added, not assigned: a broken row must stay one."""
    logit = tl.load(logits_V + token, is_meant, 0.0)
    tl.store(logits_V + token, logit + float("-inf"), is_meant)


@triton.jit(do_not_specialize=["width"])
def _allowed_kernel(  # noqa: PLR0913
    logits_NV,
    row_stride,
    vocab_size,
    slot_B,
    width_B,
    width,
    features_S,
    bit,
    bits_XB,
    bits_stride,
    BY_SLOT: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0) // NUM_CHUNKS, tl.program_id(0) % NUM_CHUNKS
    at = row
    if BY_SLOT:
        at = tl.load(slot_B + row // width)
        is_asked = (tl.load(features_S + at) & bit) != 0
        if (is_asked == 0) | (row % width >= tl.load(width_B + row // width)):
            return
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(
        bits_XB + at.to(tl.int64) * bits_stride + place // 32, place < vocab_size, other=-1
    )
    is_forbidden = ((word >> (place % 32)) & 1) == 0
    logits_V = logits_NV + row.to(tl.int64) * row_stride
    tl.store(logits_V + place, float("-inf"), is_forbidden & (place < vocab_size))


@triton.jit(do_not_specialize=["width"])
def _early_kernel(  # noqa: PLR0913
    logits_NV,
    row_stride,
    slot_B,
    width_B,
    length_B,
    width,
    features_S,
    bit,
    min_len_S,
    eos_SE,
    eos_stride,
    num_eos,
    stop_SE,
    stop_stride,
    num_stop,
    IDS: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slot_B + row // width)
    is_asked = (tl.load(features_S + slot) & bit) != 0
    if (is_asked == 0) | (row % width >= tl.load(width_B + row // width)):
        return
    if tl.load(length_B + row // width) + row % width >= tl.load(min_len_S + slot):
        return
    logits_V = logits_NV + row.to(tl.int64) * row_stride
    entry = tl.arange(0, IDS)
    token = tl.load(eos_SE + slot * eos_stride + entry, entry < num_eos, other=-1)
    forbid(logits_V, token, token >= 0)
    token = tl.load(stop_SE + slot * stop_stride + entry, entry < num_stop, other=-1)
    forbid(logits_V, token, token >= 0)


@triton.jit(do_not_specialize=["width"])
def _bias_kernel(  # noqa: PLR0913
    logits_NV,
    row_stride,
    slot_B,
    width_B,
    width,
    features_S,
    bit,
    ids_SE,
    ids_stride,
    values_SE,
    values_stride,
    num_ids,
    IDS: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slot_B + row // width)
    is_asked = (tl.load(features_S + slot) & bit) != 0
    if (is_asked == 0) | (row % width >= tl.load(width_B + row // width)):
        return
    entry = tl.arange(0, IDS)
    token = tl.load(ids_SE + slot * ids_stride + entry, entry < num_ids, other=-1)
    value = tl.load(values_SE + slot * values_stride + entry, token >= 0, other=0.0)
    logits_V = logits_NV + row.to(tl.int64) * row_stride
    logit = tl.load(logits_V + token, token >= 0, other=0.0)
    tl.store(logits_V + token, logit + value, token >= 0)
