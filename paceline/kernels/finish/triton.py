"""The end of a step on the GPU: one program per row; the last one to finish stamps the result.

Results go straight to the host's memory. Never waits for another program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.step_rows import PACKET_STEP, RESULT_TOKENS, Ring, SlotTensors, StepRows
from paceline.kernels.verify import reference as verify
from paceline.kernels.verify.reference import Verdicts

_EOS = tl.constexpr(verify.DONE_EOS)
_STOP_TOKEN = tl.constexpr(verify.DONE_STOP_TOKEN)
_LENGTH = tl.constexpr(verify.DONE_LENGTH)
_ERROR = tl.constexpr(verify.DONE_ERROR)
_STEP = tl.constexpr(PACKET_STEP)
_LEAD = tl.constexpr(RESULT_TOKENS)
_NO_TOKEN = tl.constexpr(-2)  # equal to no id, nor to the -1 of an unused table entry


def finish_step(verdicts: Verdicts, rows: StepRows, state: SlotTensors, ring: Ring) -> None:
    sizes = state.sizes
    _finish_kernel[(len(rows.start_B),)](
        *(verdicts, rows, state, sizes, ring),
        *(rows.windows.width - 1, len(ring.stamp_E), ring.packet_EP.stride(0)),
        *ring.result_EBR.stride()[:2],
        WORDS=triton.next_power_of_2(RESULT_TOKENS + sizes.num_drafts + 1),
        EOS_IDS=triton.next_power_of_2(sizes.num_eos),
        STOP_IDS=triton.next_power_of_2(sizes.num_stop),
        num_warps=1,
    )


def publish_drafts(ring: Ring, rows: StepRows, state: SlotTensors) -> None:
    _drafts_kernel[(len(rows.start_B),)](
        *(ring, rows.windows, state, state.sizes, len(ring.stamp_E), ring.packet_EP.stride(0)),
        *ring.draft_EBK.stride()[:2],
        DRAFTS=triton.next_power_of_2(state.sizes.num_drafts),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["ring_size", "packet_stride"])
def _drafts_kernel(  # noqa: PLR0913
    ring,
    windows,
    state,
    sizes,
    ring_size,
    packet_stride,
    entry_stride,
    row_stride,
    DRAFTS: tl.constexpr,
):
    row, step = tl.program_id(0), tl.arange(0, DRAFTS)
    ring_entry = tl.load(ring.turn_1) % ring_size
    step_number = tl.load(ring.packet_EP + ring_entry * packet_stride + _STEP)
    slot = tl.load(windows.slot_B + row).to(tl.int64)
    is_draft = step < sizes.num_drafts
    draft = tl.load(state.drafts_SK + slot * sizes.drafts_stride + step, mask=is_draft, other=-1)
    draft_at = ring.draft_EBK + ring_entry * entry_stride + row * row_stride + step
    tl.store(draft_at, draft, mask=is_draft)
    _publish(ring.ticket_1, ring.draft_stamp_E + ring_entry, step_number)


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


def note_late(ring: Ring, place: int) -> None:
    _late_kernel[(1,)](
        *(ring.late_time_E2, ring.turn_1, len(ring.stamp_E), place),
        HAS_CLOCK=ring.turn_1.is_cuda,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["ring_size", "place"])
def _late_kernel(time_E2, turn_1, ring_size, place, HAS_CLOCK: tl.constexpr):
    if HAS_CLOCK:
        entry = tl.load(turn_1) % ring_size
        tl.store(time_E2 + entry * 2 + place, tl.extra.cuda.globaltimer())


@triton.jit
def _is_among(token, ids, num_ids, IDS: tl.constexpr):
    """For each of the tokens: is it one of the ids?"""
    index = tl.arange(0, IDS)
    id_of = tl.load(ids + index, mask=index < num_ids, other=_NO_TOKEN)
    is_equal = token[:, None] == id_of[None, :]
    return tl.max(is_equal.to(tl.int32), axis=1) > 0


@triton.jit
def _stop_codes(token, place, slot, state, sizes, EOS_IDS: tl.constexpr, STOP_IDS: tl.constexpr):
    """How a request would end with each of these tokens at these places; 0: it would not."""
    may_stop = place >= tl.load(state.min_len_S + slot)
    code = tl.where(place + 1 >= tl.load(state.max_len_S + slot), _LENGTH, 0)
    stop_ids = state.stop_ids_SE + slot * sizes.stop_stride
    is_stop = _is_among(token, stop_ids, sizes.num_stop, STOP_IDS)
    code = tl.where(is_stop & may_stop, _STOP_TOKEN, code)
    eos_ids = state.eos_ids_SE + slot * sizes.eos_stride
    is_eos = _is_among(token, eos_ids, sizes.num_eos, EOS_IDS)
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
    verdicts,
    rows,
    state,
    sizes,
    ring,
    num_shape_drafts,
    ring_size,
    packet_stride,
    result_entry_stride,
    result_row_stride,
    WORDS: tl.constexpr,
    EOS_IDS: tl.constexpr,
    STOP_IDS: tl.constexpr,
):
    row = tl.program_id(0)
    windows = rows.windows
    ring_entry = tl.load(ring.turn_1) % ring_size
    step_number = tl.load(ring.packet_EP + ring_entry * packet_stride + _STEP)
    slot = tl.load(windows.slot_B + row).to(tl.int64)
    width = tl.load(windows.width_B + row)
    length = tl.load(windows.length_B + row)
    # Lanes are the words of a result row, so that it leaves in one store; tokens come last.
    word = tl.arange(0, WORDS)
    step = word - _LEAD
    verdict_at = tl.load(windows.first_B + row) + step
    in_window = (step >= 0) & (step < width)
    has_draft = in_window & (step < width - 1)
    token = tl.load(verdicts.token_N + verdict_at, mask=in_window, other=-1).to(tl.int32)
    is_bad = tl.load(verdicts.bad_N + verdict_at, mask=in_window, other=0) != 0
    draft_at = windows.draft_BK + row * num_shape_drafts + step
    draft = tl.load(draft_at, mask=has_draft, other=-1)
    is_real = draft >= 0
    if verdicts.ok_N is None:
        goes_on = token == draft
    else:
        goes_on = tl.load(verdicts.ok_N + verdict_at, mask=in_window, other=0) != 0
    goes_on = goes_on & is_real & ~is_bad
    num_ok = tl.min(tl.where((step >= 0) & ~goes_on, step, WORDS))
    is_closing = step == num_ok
    closing = tl.sum(tl.where(is_closing, token, 0))
    token = tl.where(step < num_ok, draft, closing)

    code = _stop_codes(token, length + step, slot, state, sizes, EOS_IDS, STOP_IDS)
    code = tl.where(is_closing & is_bad, _ERROR, code)
    first_stop = tl.min(tl.where((step >= 0) & (code != 0), step, WORDS))
    samples = width > 0
    count = tl.where(samples, tl.minimum(num_ok, first_stop) + 1, 0)
    done = tl.sum(tl.where(samples & (step == count - 1), code, 0))
    num_drafts = tl.sum(is_real.to(tl.int32))

    _advance(rows, state, row, slot, samples, length, count, done)
    stored_at = state.drafts_SK + slot * sizes.drafts_stride + step
    tl.store(stored_at, -1, mask=samples & (step >= 0) & (step < sizes.num_drafts))
    is_emitted = (step >= 0) & (step < count)
    place = length + step
    token_at = state.tokens_SL + slot * sizes.tokens_stride + place
    tl.store(token_at, token, mask=is_emitted & (place < sizes.max_model_len))
    token = tl.where(is_emitted, token, -1)
    result = _result_words(word, count, done, num_drafts, tl.minimum(num_ok, count), token)
    result_at = ring.result_EBR + ring_entry * result_entry_stride + row * result_row_stride
    tl.store(result_at + word, result, mask=step <= num_shape_drafts)
    _publish(ring.ticket_1, ring.stamp_E + ring_entry, step_number)


@triton.jit
def _advance(rows, state, row, slot, samples, length, count, done):
    """Move the slot's numbers by what its row emitted or computed."""
    start = tl.load(rows.start_B + row)
    row_start = tl.load(rows.row_start_B + row)
    query_len = tl.load(rows.query_len_B + row)
    is_live = query_len > 0
    length += count
    # The newest token has no KV yet.
    computed = tl.where(samples, length - 1, start + query_len)
    tl.store(state.num_tokens_S + slot, length, mask=samples)
    tl.store(state.num_computed_S + slot, computed, mask=is_live)
    tl.store(state.done_S + slot, done, mask=samples)
    tl.store(rows.count_B + row, count)
    last = tl.where(samples, row_start + length - 2 - start, row_start + query_len - 1)
    tl.store(rows.last_B + row, tl.where(is_live, last, 0))
