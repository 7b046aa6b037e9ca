"""The end of a step: windows are settled, slots advance, results and their stamp go to the host.

Owns the contract and its torch reference; never draws a token. The rules of a window itself are
those of kernels/verify, how a slot moves is kernels/advance, here at fixed shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels import rng
from paceline.kernels.step_inputs import packet_of
from paceline.kernels.step_rows import RESULT_TOKENS, PacketLayout, Ring, SlotTensors, StepRows
from paceline.kernels.verify import Limits, Settled, Verdicts, Windows, settle_windows_reference


class Forced(NamedTuple):
    """Acceptance by chance instead of by equality, for benchmarks and tests."""

    rates_K: Tensor  # float32: chance of each draft, given those before it


def finish_step(
    token_N: Tensor,
    bad_N: Tensor,
    ok_N: Tensor | None,
    rows: StepRows,
    state: SlotTensors,
    ring: Ring,
    forced: Forced | None,
) -> None:
    """Emit each row's window, move its slot, write its result; then stamp the ring's entry.

    Verdicts are read at b * W + j for j < width. Rows that sample nothing emit nothing; of those,
    live chunks have computed query_len more positions, and done rows and padding change nothing.
    """
    if token_N.is_cuda:
        from paceline.kernels import finish_triton

        finish_triton.finish_step(token_N, bad_N, ok_N, rows, state, ring, forced)
    else:
        finish_step_reference(token_N, bad_N, ok_N, rows, state, ring, forced)


def end_step(ring: Ring) -> None:
    """The step's last act: note the time and give the turn to the next packet."""
    if ring.turn_1.is_cuda:
        from paceline.kernels import finish_triton

        finish_triton.end_step(ring)
    else:
        end_step_reference(ring)


def end_step_reference(ring: Ring) -> None:
    """`end_step` without its clock."""
    ring.turn_1.add_(1)


def finish_step_reference(
    token_N: Tensor,
    bad_N: Tensor,
    ok_N: Tensor | None,
    rows: StepRows,
    state: SlotTensors,
    ring: Ring,
    forced: Forced | None,
) -> None:
    """`finish_step` in torch operations on any device."""
    if forced is not None:
        ok_N = _forced_verdicts(forced.rates_K, rows, state)
    settled = _settle(Verdicts(token_N, bad_N.bool(), ok_N), rows, state)
    _advance(settled, rows, state)
    rows.token_BW.copy_(settled.token_BW)
    rows.count_B.copy_(settled.count_B)
    batch = rows.batch
    last_B = batch.row_start_B + batch.query_len_B - 1
    newest_B = rows.num_tokens_B + settled.count_B - 2
    last_B = (batch.row_start_B + newest_B - rows.start_B).where(rows.width_B > 0, last_B)
    rows.last_B.copy_(last_B.where(batch.query_len_B > 0, 0))

    numbers_4B = torch.stack((settled.count_B, *settled[2:]))
    result_BR = torch.cat((numbers_4B.T, settled.token_BW), 1)
    entry_1 = (ring.turn_1 % len(ring.stamp_E)).long()
    num_rows, num_words = result_BR.shape
    assert num_words == RESULT_TOKENS + rows.shape.width
    ring.result_EBR[entry_1, :num_rows, :num_words] = result_BR
    ring.stamp_E[entry_1] = packet_of(ring)[PacketLayout.STEP]


def _settle(verdicts: Verdicts, rows: StepRows, state: SlotTensors) -> Settled:
    """What each row emits; nothing where it samples nothing."""
    num_rows, width = rows.token_BW.shape
    samples_B = rows.width_B > 0
    first_B = torch.arange(num_rows, device=samples_B.device) * width
    slot_B, width_B = rows.batch.slot_B.long(), rows.width_B.long().clamp(min=1)
    settled = settle_windows_reference(
        verdicts,
        Windows(slot_B, first_B, width_B, rows.draft_BK, rows.num_tokens_B),
        Limits(state.eos_ids_SE, state.stop_ids_SE, state.min_len_S, state.max_len_S),
    )
    token_BW, *numbers = settled
    return Settled(
        token_BW.where(samples_B[:, None], -1), *(number.where(samples_B, 0) for number in numbers)
    )


def _forced_verdicts(rates_K: Tensor, rows: StepRows, state: SlotTensors) -> Tensor:
    """bool [N]: the coin of each window position falls below its rate."""
    width = rows.shape.width
    step_W = torch.arange(width, dtype=torch.int32, device=rates_K.device)
    position_N = (rows.num_tokens_B[:, None] + step_W).flatten()
    seed_N2 = state.seed_S2[rows.batch.slot_B.long()].repeat_interleave(width, 0)
    rate_W = rates_K.new_zeros(width)  # a position without a rate or a draft accepts nothing
    count = min(width, len(rates_K))
    rate_W[:count] = rates_K[:count]
    unit_BW = rng.uniform(seed_N2, position_N, rng.ACCEPT).view(-1, width)
    return (unit_BW < rate_W).flatten()


def _advance(settled: Settled, rows: StepRows, state: SlotTensors) -> None:
    slot_B = rows.batch.slot_B.long()
    samples_B, length_B = rows.width_B > 0, state.num_tokens_S[slot_B]
    step_W = torch.arange(rows.shape.width, device=slot_B.device)
    is_emitted_BW = step_W < settled.count_B[:, None]
    # What is not emitted goes to the last slot, which belongs to nobody.
    nobody = len(state.tokens_SL) - 1
    state.tokens_SL[
        slot_B[:, None].where(is_emitted_BW, nobody),
        (length_B[:, None] + step_W).where(is_emitted_BW, 0),
    ] = settled.token_BW.where(is_emitted_BW, 0)
    # The newest token has no KV yet. Rows that sample nothing write what is there already.
    computed_B = state.num_computed_S[slot_B] + rows.batch.query_len_B
    length_B = length_B + settled.count_B
    state.num_computed_S[slot_B] = (length_B - 1).where(samples_B, computed_B)
    state.num_tokens_S[slot_B] = length_B
    state.done_S[slot_B] = settled.done_B.where(samples_B, state.done_S[slot_B])
