"""The end of a step on the GPU: one program per row; the last one to finish stamps the result.

Results go straight to the host's memory. Never waits for another program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kernels.step_rows import RESULT_TOKENS, PacketLayout, Ring, SlotTensors, StepRows
from paceline.kernels.verify import reference as verify
from paceline.kernels.verify.reference import Verdicts

_EOS = tl.constexpr(verify.DONE_EOS)
_STOP_TOKEN = tl.constexpr(verify.DONE_STOP_TOKEN)
_LENGTH = tl.constexpr(verify.DONE_LENGTH)
_ERROR = tl.constexpr(verify.DONE_ERROR)
_STEP = tl.constexpr(PacketLayout.STEP)
_LEAD = tl.constexpr(RESULT_TOKENS)
_NO_TOKEN = tl.constexpr(-2)  # equal to no id, nor to the -1 of an unused table entry


def finish_step(verdicts: Verdicts, rows: StepRows, state: SlotTensors, ring: Ring) -> None:
    windows, bad_N = rows.windows, verdicts.bad_N
    # Without verdicts any pointer will do: it is not read.
    ok_N = bad_N if verdicts.ok_N is None else verdicts.ok_N
    num_eos, num_stop = state.eos_ids_SE.shape[1], state.stop_ids_SE.shape[1]
    _finish_kernel[(len(windows.slot_B),)](
        *(verdicts.token_N, bad_N.view(torch.int8), ok_N.view(torch.int8)),
        *(windows.slot_B, windows.first_B, windows.width_B, windows.length_B, windows.draft_BK),
        *(rows.start_B, rows.row_start_B, rows.query_len_B, rows.count_B, rows.last_B),
        *(state.tokens_SL, state.num_tokens_S, state.num_computed_S, state.done_S),
        *(state.max_len_S, state.min_len_S, state.eos_ids_SE, state.stop_ids_SE),
        *(ring.packet_EP, ring.result_EBR, ring.stamp_E, ring.turn_1, ring.ticket_1),
        *(windows.width - 1, state.tokens_SL.shape[1], num_eos, num_stop),
        *(len(ring.stamp_E), ring.packet_EP.stride(0)),
        *(ring.result_EBR.stride(0), ring.result_EBR.stride(1), state.tokens_SL.stride(0)),
        *(state.eos_ids_SE.stride(0), state.stop_ids_SE.stride(0)),
        BY_VERDICT=verdicts.ok_N is not None,
        WORDS=triton.next_power_of_2(RESULT_TOKENS + state.drafts_SK.shape[1] + 1),
        EOS_IDS=triton.next_power_of_2(num_eos),
        STOP_IDS=triton.next_power_of_2(num_stop),
        num_warps=1,
    )


def end_step(ring: Ring) -> None:
    _end_kernel[(1,)](
        *(ring.time_E2, ring.turn_1, len(ring.stamp_E)),
        HAS_CLOCK=ring.turn_1.is_cuda,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["ring_size"])
def _end_kernel(time_E2, turn_1, ring_size, HAS_CLOCK: tl.constexpr):
    turn = tl.load(turn_1)
    if HAS_CLOCK:
        tl.store(time_E2 + (turn % ring_size) * 2 + 1, tl.extra.cuda.globaltimer())
    tl.store(turn_1, turn + 1)


@triton.jit
def _is_among(token, ids, num_ids, IDS: tl.constexpr):
    """For each of the tokens: is it one of the ids?"""
    index = tl.arange(0, IDS)
    id_of = tl.load(ids + index, mask=index < num_ids, other=_NO_TOKEN)
    is_equal = token[:, None] == id_of[None, :]
    return tl.max(is_equal.to(tl.int32), axis=1) > 0


@triton.jit
def _stop_codes(  # noqa: PLR0913
    token,
    place,
    min_len,
    max_len,
    eos_ids,
    num_eos,
    EOS_IDS: tl.constexpr,
    stop_ids,
    num_stop,
    STOP_IDS: tl.constexpr,
):
    """How a request would end with each of these tokens at these places; 0: it would not."""
    may_stop = place >= min_len
    code = tl.where(place + 1 >= max_len, _LENGTH, 0)
    is_stop = _is_among(token, stop_ids, num_stop, STOP_IDS)
    code = tl.where(is_stop & may_stop, _STOP_TOKEN, code)
    is_eos = _is_among(token, eos_ids, num_eos, EOS_IDS)
    return tl.where(is_eos & may_stop, _EOS, code)


@triton.jit
def _result_words(word, count, done, num_drafts, num_accepted, token):
    result = tl.where(word == 0, count, tl.where(word == 1, done, token))
    result = tl.where(word == 2, num_drafts, result)
    return tl.where(word == 3, num_accepted, result)


@triton.jit
def _publish(ticket_1, stamp, step_number):
    """Stamp the entry once every program has written its row."""
    tl.debug_barrier()  # the row is written by all threads, the ticket taken by one
    arrived = tl.atomic_add(ticket_1, 1, sem="acq_rel", scope="sys")
    if arrived == tl.num_programs(0) - 1:
        tl.store(ticket_1, 0)
        tl.atomic_xchg(stamp, step_number, sem="release", scope="sys")


@triton.jit(do_not_specialize=["num_shape_drafts", "ring_size", "packet_stride"])
def _finish_kernel(  # noqa: PLR0913
    token_N,
    bad_N,
    ok_N,
    slot_B,
    first_B,
    width_B,
    num_tokens_B,
    draft_BK,
    start_B,
    row_start_B,
    query_len_B,
    count_B,
    last_B,
    tokens_SL,
    num_tokens_S,
    num_computed_S,
    done_S,
    max_len_S,
    min_len_S,
    eos_ids_SE,
    stop_ids_SE,
    packet_EP,
    result_EBR,
    stamp_E,
    turn_1,
    ticket_1,
    num_shape_drafts,
    max_model_len,
    num_eos,
    num_stop,
    ring_size,
    packet_stride,
    result_entry_stride,
    result_row_stride,
    tokens_stride,
    eos_stride,
    stop_stride,
    BY_VERDICT: tl.constexpr,
    WORDS: tl.constexpr,
    EOS_IDS: tl.constexpr,
    STOP_IDS: tl.constexpr,
):
    row = tl.program_id(0)
    ring_entry = tl.load(turn_1) % ring_size
    step_number = tl.load(packet_EP + ring_entry * packet_stride + _STEP)
    slot = tl.load(slot_B + row).to(tl.int64)
    width = tl.load(width_B + row)
    length = tl.load(num_tokens_B + row)
    shape_width = num_shape_drafts + 1
    # Lanes are the words of a result row, so that it leaves in one store; tokens come last.
    word = tl.arange(0, WORDS)
    step = word - _LEAD
    verdict_at = tl.load(first_B + row) + step
    in_window = (step >= 0) & (step < width)
    has_draft = in_window & (step < width - 1)
    token = tl.load(token_N + verdict_at, mask=in_window, other=-1).to(tl.int32)
    is_bad = tl.load(bad_N + verdict_at, mask=in_window, other=0) != 0
    draft = tl.load(draft_BK + row * num_shape_drafts + step, mask=has_draft, other=-1)
    is_real = draft >= 0
    if BY_VERDICT:
        goes_on = tl.load(ok_N + verdict_at, mask=in_window, other=0) != 0
    else:
        goes_on = token == draft
    goes_on = goes_on & is_real & ~is_bad
    num_ok = tl.min(tl.where((step >= 0) & ~goes_on, step, WORDS))
    is_closing = step == num_ok
    closing = tl.sum(tl.where(is_closing, token, 0))
    token = tl.where(step < num_ok, draft, closing)

    code = _stop_codes(
        *(token, length + step, tl.load(min_len_S + slot), tl.load(max_len_S + slot)),
        *(eos_ids_SE + slot * eos_stride, num_eos, EOS_IDS),
        *(stop_ids_SE + slot * stop_stride, num_stop, STOP_IDS),
    )
    code = tl.where(is_closing & is_bad, _ERROR, code)
    first_stop = tl.min(tl.where((step >= 0) & (code != 0), step, WORDS))
    samples = width > 0
    count = tl.where(samples, tl.minimum(num_ok, first_stop) + 1, 0)
    done = tl.sum(tl.where(samples & (step == count - 1), code, 0))
    num_drafts = tl.sum(is_real.to(tl.int32))

    _advance(
        *(row, samples, slot, length, count, done, start_B, row_start_B, query_len_B),
        *(num_tokens_S, num_computed_S, done_S, count_B, last_B),
    )
    is_emitted = (step >= 0) & (step < count)
    place = length + step
    token_at = tokens_SL + slot * tokens_stride + place
    tl.store(token_at, token, mask=is_emitted & (place < max_model_len))
    token = tl.where(is_emitted, token, -1)
    result = _result_words(word, count, done, num_drafts, tl.minimum(num_ok, count), token)
    result_at = result_EBR + ring_entry * result_entry_stride + row * result_row_stride + word
    tl.store(result_at, result, mask=step < shape_width)
    _publish(ticket_1, stamp_E + ring_entry, step_number)


@triton.jit
def _advance(  # noqa: PLR0913
    row,
    samples,
    slot,
    length,
    count,
    done,
    start_B,
    row_start_B,
    query_len_B,
    num_tokens_S,
    num_computed_S,
    done_S,
    count_B,
    last_B,
):
    """Move the slot's numbers by what its row emitted or computed."""
    start = tl.load(start_B + row)
    row_start = tl.load(row_start_B + row)
    query_len = tl.load(query_len_B + row)
    is_live = query_len > 0
    length += count
    # The newest token has no KV yet.
    computed = tl.where(samples, length - 1, start + query_len)
    tl.store(num_tokens_S + slot, length, mask=samples)
    tl.store(num_computed_S + slot, computed, mask=is_live)
    tl.store(done_S + slot, done, mask=samples)
    tl.store(count_B + row, count)
    last = tl.where(samples, row_start + length - 2 - start, row_start + query_len - 1)
    tl.store(last_B + row, tl.where(is_live, last, 0))
