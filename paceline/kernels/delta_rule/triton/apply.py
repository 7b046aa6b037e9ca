"""The gated delta rule on the GPU: chooses kernels by the shape of a pass, and launches them."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.delta_rule.reference import DeltaRows, DeltaSizes, DeltaState, DeltaWeights
from paceline.kernels.delta_rule.triton.chunked import (
    CHUNK,
    Chunks,
    padded,
    pass_kernel,
    prepare_kernel,
)
from paceline.kernels.delta_rule.triton.parts import SHORT, Sizes, keep_inputs, load_row, source_of
from paceline.kernels.delta_rule.triton.recurrent import recurrent_kernel
from paceline.kernels.gpu.triton import dependent, wait_for_input

# Values of a head that a program of the recurrent kernel has, positions that it loads at once.
RECURRENT_VALUES, RECURRENT_WARPS, POSITIONS = 32, 4, 8
# Values of a head that a program passes from chunk to chunk.
PASSED_VALUES, PASS_WARPS, PASS_STAGES = 32, 4, 2
PREPARE_WARPS = 8
_KEPT_COLUMNS = 1024
# Compiled by Triton 3.6 for half precision and heads of 128, `pass_kernel` wrote wrong states on an
# H200 (the interpreted kernel is right). Until that is found, GPUs compute prompts token by token.
USES_CHUNKS: bool = triton.knobs.runtime.interpret


def delta_rule(
    input_TP: Tensor, weights: DeltaWeights, sizes: DeltaSizes, state: DeltaState, rows: DeltaRows
) -> Tensor:
    """Rows are in the order of their entries, the first at entry 0: gaps behind them get zeros."""
    assert input_TP.dtype == state.input_SRP.dtype
    assert input_TP.stride(1) == 1
    out_TV = input_TP.new_empty(len(input_TP), sizes.num_value_heads * sizes.value_size)
    num_kept = state.input_SRP.shape[1]
    # A window of drafts does not reach the kept inputs that other programs of its row may read:
    # they are stored by the kernel that reads them. Longer rows need a kernel behind it.
    most_in_window = (num_kept - sizes.conv_size) // 2 + 1
    is_window = rows.max_query_len <= most_in_window
    has_chunks = USES_CHUNKS and rows.max_query_len > max(SHORT.value, most_in_window)
    _apply_recurrent(input_TP, weights, sizes, state, rows, out_TV, (is_window, has_chunks))
    if has_chunks:
        _apply_chunked(input_TP, weights, sizes, state, rows, out_TV)
    if not is_window:
        _keep_inputs(input_TP, sizes, state, rows)
    return out_TV


def _sizes(sizes: DeltaSizes, state: DeltaState, rows: DeltaRows, block_k: int) -> Sizes:
    num_kept, width = state.input_SRP.shape[1:]
    return Sizes(*sizes, num_kept, width, block_k, rows.mark_len_BM.shape[1])


def _apply_recurrent(
    input_TP: Tensor,
    weights: DeltaWeights,
    sizes: DeltaSizes,
    state: DeltaState,
    rows: DeltaRows,
    out_TV: Tensor,
    kind: tuple[bool, bool],
) -> None:
    is_window, has_chunks = kind
    num_rows = len(rows.slot_B)
    block_v = min(triton.next_power_of_2(sizes.value_size), RECURRENT_VALUES)
    most_positions = state.input_SRP.shape[1] - sizes.conv_size + 1 if is_window else POSITIONS
    grid = (triton.cdiv(sizes.value_size, block_v), sizes.num_value_heads, num_rows)
    recurrent_kernel[grid](
        *(input_TP, weights, state, rows[:-1], out_TV),
        *(input_TP.stride(0), num_rows, len(input_TP)),
        SIZES=_sizes(sizes, state, rows, triton.next_power_of_2(sizes.key_size)),
        BLOCK_V=block_v,
        BLOCK_P=min(triton.next_power_of_2(most_positions), POSITIONS),
        KEEPS_INPUTS=is_window,
        HAS_CHUNKS=has_chunks,
        num_warps=RECURRENT_WARPS,
        **dependent(),
    )


def prepare_chunks(
    input_TP: Tensor, weights: DeltaWeights, sizes: DeltaSizes, state: DeltaState, rows: DeltaRows
) -> Chunks:
    num_rows = len(rows.slot_B)
    num_chunks = triton.cdiv(len(input_TP), CHUNK) + num_rows  # at most
    chunks = Chunks.empty(num_chunks, sizes, input_TP)
    prepare_kernel[(sizes.num_value_heads, num_chunks)](
        *(input_TP, weights, state.input_SRP, chunks, rows[:-1]),
        *(input_TP.stride(0), num_rows),
        EXACT="ieee" if input_TP.dtype.itemsize == 4 else "tf32x3",
        num_warps=PREPARE_WARPS,
        **_chunk_options(input_TP, sizes, state, rows),
    )
    return chunks


def _apply_chunked(
    input_TP: Tensor,
    weights: DeltaWeights,
    sizes: DeltaSizes,
    state: DeltaState,
    rows: DeltaRows,
    out_TV: Tensor,
) -> None:
    num_rows = len(rows.slot_B)
    chunks = prepare_chunks(input_TP, weights, sizes, state, rows)
    options = _chunk_options(input_TP, sizes, state, rows)
    part_v = min(options["BLOCK_V"], PASSED_VALUES)
    pass_kernel[(options["BLOCK_V"] // part_v, sizes.num_value_heads, num_rows)](
        *(input_TP, state, chunks, rows[:-1], out_TV),
        *(input_TP.stride(0), num_rows),
        PART_V=part_v,
        num_warps=PASS_WARPS,
        num_stages=PASS_STAGES,
        **options,
    )


def _chunk_options(
    input_TP: Tensor, sizes: DeltaSizes, state: DeltaState, rows: DeltaRows
) -> dict[str, Any]:
    return {
        "SIZES": _sizes(sizes, state, rows, padded(sizes.key_size)),
        "SIZE": CHUNK,
        "BLOCK_V": padded(sizes.value_size),
        "PRECISION": "ieee" if input_TP.dtype.itemsize == 4 else "tf32",
        **dependent(),
    }


def _keep_inputs(input_TP: Tensor, sizes: DeltaSizes, state: DeltaState, rows: DeltaRows) -> None:
    num_parts = triton.cdiv(state.input_SRP.shape[2], _KEPT_COLUMNS)
    _keep_kernel[(num_parts, len(rows.slot_B))](
        *(input_TP, state.input_SRP, rows[:-1], input_TP.stride(0)),
        NUM_PARTS=num_parts,
        SIZES=_sizes(sizes, state, rows, 0),
        num_warps=4,
        **dependent(),
    )


@triton.jit
def _keep_kernel(
    input_TP,
    input_SRP,
    rows,
    input_stride,
    NUM_PARTS: tl.constexpr,
    SIZES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_input(IS_DEPENDENT)
    row = tl.program_id(1)
    row_start, query_len, start, committed, _ = load_row(rows, row)
    slot = tl.load(rows[0] + row).to(tl.int64)
    source = source_of(input_TP, input_stride, input_SRP, slot, row_start, start, SIZES)
    part = tl.program_id(0)
    keep_inputs(source, start + committed, start + query_len, part, NUM_PARTS, SIZES)
