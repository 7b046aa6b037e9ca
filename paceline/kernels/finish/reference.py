"""The end of a step: windows are settled, slots advance, results and their stamp go to the host.

Owns the contract and its reference, which runs on CPU tensors; never draws a token.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from paceline.kernels.rows import Integers, WindowRows
from paceline.kernels.step_rows import PACKET_STEP, RESULT_TOKENS, Ring, SlotTensors, StepRows
from paceline.kernels.verify.reference import Limits, Settled, Verdicts, settle


def running_entry(ring: Ring) -> int:
    """The entry of the running step."""
    arrays = ring.arrays
    return int(arrays.turn_1[0]) % len(arrays.stamp_E)


def end_step(ring: Ring) -> None:
    """Note the time and count the step, so that the next one reads the next packet."""
    arrays = ring.arrays
    time_2 = arrays.time_E2[running_entry(ring)]
    time_2[1] = time.perf_counter_ns() if time_2[0] else 0
    arrays.turn_1[0] += 1


def note_late(ring: Ring, place: int) -> None:
    """Note the time of a step whose halves run apart: 0: A has ended; 1: B begins."""
    arrays = ring.arrays
    arrays.late_time_E2[running_entry(ring), place] = time.perf_counter_ns()


def finish_step(verdicts: Verdicts, rows: StepRows, state: SlotTensors, ring: Ring) -> None:
    """Emit each row's window, move its slot, write its result; then stamp the ring's entry.

    Rows that sample nothing emit nothing; of those, live chunks have computed query_len more
    positions, and done rows and padding change nothing.
    """
    slots = state.arrays
    limits = Limits(slots.eos_ids_SE, slots.stop_ids_SE, slots.min_len_S, slots.max_len_S)
    settled = settle(verdicts, rows.windows, limits)
    query_len_B, start_B = rows.query_len_B.numpy(), rows.start_B.numpy()
    _advance(settled, rows.windows, start_B, query_len_B, slots)
    if rows.count_B is not None and rows.last_B is not None:
        _, _, width_B, length_B, _ = rows.windows.arrays
        newest_B = length_B + settled.count_B - 2 - start_B
        entry_B = rows.row_start_B.numpy() + np.where(width_B > 0, newest_B, query_len_B - 1)
        rows.last_B.numpy()[:] = np.where(query_len_B > 0, entry_B, 0)
        rows.count_B.numpy()[:] = settled.count_B

    entry, arrays = running_entry(ring), ring.arrays
    row_B = slice(len(start_B)) if rows.plan_row_B is None else rows.plan_row_B.numpy()
    result_BR = arrays.result_EBR[entry]
    result_BR[row_B, :RESULT_TOKENS] = np.stack((settled.count_B, *settled[2:]), 1)
    result_BR[row_B, RESULT_TOKENS : RESULT_TOKENS + rows.windows.width] = settled.token_BW
    arrays.stamp_E[entry] = arrays.packet_EP[entry, PACKET_STEP]


def publish_drafts(ring: Ring, rows: StepRows, state: SlotTensors) -> None:
    """Write the drafts that each row's slot holds; then stamp them. Rows that were done have none.

    For steps whose host computes masks from the drafts, before `end_step`.
    """
    entry, arrays = running_entry(ring), ring.arrays
    row_B = slice(len(rows.start_B)) if rows.plan_row_B is None else rows.plan_row_B.numpy()
    draft_BK = arrays.draft_EBK[entry]
    draft_BK[:] = -1
    draft_BK[row_B] = state.arrays.drafts_SK[rows.windows.slot_B.numpy()]
    arrays.draft_stamp_E[entry] = arrays.packet_EP[entry, PACKET_STEP]


def _advance(
    settled: Settled, windows: WindowRows, start_B: Integers, query_len_B: Integers, slots: Any
) -> None:
    """Append what each row emitted to its slot's history, and move the slot's numbers.

    The drafts of a row that sampled are over, also those that it did not verify.
    """
    slot_B, _, width_B, length_B, _ = windows.arrays
    row, offset = np.nonzero(settled.token_BW >= 0)
    position = length_B[row] + offset
    if position.max(initial=0) >= slots.tokens_SL.shape[1]:
        is_inside = position < slots.tokens_SL.shape[1]
        row, offset, position = row[is_inside], offset[is_inside], position[is_inside]
    slots.tokens_SL[slot_B[row], position] = settled.token_BW[row, offset]
    samples_B, length_B = width_B > 0, length_B + settled.count_B
    # The newest token has no KV yet.
    computed_B = np.where(samples_B, length_B - 1, start_B + query_len_B)
    is_live_B = query_len_B > 0
    slots.num_computed_S[slot_B[is_live_B]] = computed_B[is_live_B]
    slots.num_tokens_S[slot_B[samples_B]] = length_B[samples_B]
    slots.done_S[slot_B[samples_B]] = settled.done_B[samples_B]
    slots.drafts_SK[slot_B[samples_B]] = -1
