"""Triton twins of the processors: programs ask their slot first, and mostly exit.

They write logits in place. Penalties walk the history and count occurrences in tables of one int32
per token, as many as programs that count at a time: 64 tables, 31 MiB for 128256 tokens, whatever
the batch. The program that takes a token's count out of its table leaves 0 behind and is the only
one to change its logits, so tables are clean after use.

Shape letters: B rows, N logits rows, K drafts, V vocabulary, S slots, L length, E table entries, P
counting tables, X words of 32 bits.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.processors.reference import LateBits, Penalties, Stops
from paceline.kernels.rows import FeatureMask, WindowRows
from paceline.kernels.sampling.triton.chunks import kept_tensor

_CHUNK = 4096


def keep_allowed(
    logits_NV: Tensor, windows: WindowRows, mask: FeatureMask, bits_SX: Tensor
) -> None:
    _keep(logits_NV, windows, (*mask, bits_SX, bits_SX.stride(0), 0), is_late=False)


def keep_late(logits_NV: Tensor, windows: WindowRows, late: LateBits) -> None:
    strides = late.bits_RWX.stride()[:2]
    _keep(logits_NV, windows, (late.index_B, 0, late.bits_RWX, *strides), is_late=True)


def _keep(
    logits_NV: Tensor, windows: WindowRows, bits: tuple[object, ...], *, is_late: bool
) -> None:
    vocab_size = logits_NV.shape[1]
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    _allowed_kernel[(windows.num_positions * num_chunks,)](
        *(logits_NV, logits_NV.stride(0), vocab_size),
        *(windows.slot_B, windows.first_B, windows.width_B, windows.width, *bits),
        IS_LATE=is_late,
        NUM_CHUNKS=num_chunks,
        CHUNK=min(_CHUNK, triton.next_power_of_2(vocab_size)),
    )


def ban_early_stops(
    logits_NV: Tensor, windows: WindowRows, mask: FeatureMask, stops: Stops
) -> None:
    eos_SE, stop_SE = stops.eos_SE, stops.stop_SE
    _early_kernel[(windows.num_positions,)](
        *(logits_NV, logits_NV.stride(0)),
        *(windows.slot_B, windows.first_B, windows.width_B, windows.length_B, windows.width),
        *(*mask, stops.min_len_S),
        *(eos_SE, eos_SE.stride(0), eos_SE.shape[1], stop_SE, stop_SE.stride(0), stop_SE.shape[1]),
        IDS=triton.next_power_of_2(max(eos_SE.shape[1], stop_SE.shape[1])),
        num_warps=1,
    )


def add_bias(
    logits_NV: Tensor, windows: WindowRows, mask: FeatureMask, ids_SE: Tensor, values_SE: Tensor
) -> None:
    """The ids of a slot differ from one another: a mapping has no key twice."""
    _bias_kernel[(windows.num_positions,)](
        *(logits_NV, logits_NV.stride(0)),
        *(windows.slot_B, windows.first_B, windows.width_B, windows.width),
        *(*mask, ids_SE, ids_SE.stride(0), values_SE, values_SE.stride(0), ids_SE.shape[1]),
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
    first_B,
    width_B,
    width,
    choice_X,  # features by slot, or the row's entry of the late masks
    bit,
    bits_X,
    bits_stride,
    position_stride,
    IS_LATE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    at, chunk = tl.program_id(0) // NUM_CHUNKS, tl.program_id(0) % NUM_CHUNKS
    owner, j = at // width, at % width
    if IS_LATE:
        entry = tl.load(choice_X + owner)
        is_asked = entry >= 0
    else:
        entry = tl.load(slot_B + owner)
        is_asked = (tl.load(choice_X + entry) & bit) != 0
    if (is_asked == 0) | (j >= tl.load(width_B + owner)):
        return
    row = tl.load(first_B + owner) + j
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    bits = bits_X + entry.to(tl.int64) * bits_stride + j * position_stride
    word = tl.load(bits + place // 32, place < vocab_size, other=-1)
    is_forbidden = ((word >> (place % 32)) & 1) == 0
    logits_V = logits_NV + row.to(tl.int64) * row_stride
    tl.store(logits_V + place, float("-inf"), is_forbidden & (place < vocab_size))


@triton.jit(do_not_specialize=["width"])
def _early_kernel(  # noqa: PLR0913
    logits_NV,
    row_stride,
    slot_B,
    first_B,
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
    owner, j = tl.program_id(0) // width, tl.program_id(0) % width
    slot = tl.load(slot_B + owner)
    is_asked = (tl.load(features_S + slot) & bit) != 0
    if (is_asked == 0) | (j >= tl.load(width_B + owner)):
        return
    row = tl.load(first_B + owner) + j
    if tl.load(length_B + owner) + j >= tl.load(min_len_S + slot):
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
    first_B,
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
    owner, j = tl.program_id(0) // width, tl.program_id(0) % width
    slot = tl.load(slot_B + owner)
    is_asked = (tl.load(features_S + slot) & bit) != 0
    if (is_asked == 0) | (j >= tl.load(width_B + owner)):
        return
    row = tl.load(first_B + owner) + j
    entry = tl.arange(0, IDS)
    token = tl.load(ids_SE + slot * ids_stride + entry, entry < num_ids, other=-1)
    value = tl.load(values_SE + slot * values_stride + entry, token >= 0, other=0.0)
    logits_V = logits_NV + row.to(tl.int64) * row_stride
    logit = tl.load(logits_V + token, token >= 0, other=0.0)
    tl.store(logits_V + token, logit + value, token >= 0)


MOST_TABLES = 64
_BLOCK = 2048
_NUM_WARPS = 8
# A word of a table: output occurrences in the low bits, and where else the token was seen.
_IN_PROMPT = tl.constexpr(1 << 30)
_IN_DRAFTS = tl.constexpr(1 << 29)
_COUNT = tl.constexpr((1 << 29) - 1)


@cache
def tables(device: torch.device, vocab_size: int) -> Tensor:
    """int32 [P, V], zero between kernels: once for each device and vocabulary."""
    return kept_tensor(0, MOST_TABLES, vocab_size, device=device)


def apply_penalties(
    logits_NV: Tensor,
    windows: WindowRows,
    mask: FeatureMask,
    tokens_SL: Tensor,
    prompt_len_S: Tensor,
    penalties: Penalties,
) -> None:
    batch = len(windows.slot_B)
    table_PV = tables(logits_NV.device, logits_NV.shape[1])
    _penalty_kernel[(min(batch, MOST_TABLES),)](
        *(logits_NV, logits_NV.stride(0), table_PV, table_PV.stride(0), batch),
        *(windows.slot_B, windows.first_B, windows.width_B, windows.length_B),
        *(windows.draft_BK, windows.draft_BK.stride(0), windows.width, *mask),
        *(tokens_SL, tokens_SL.stride(0), prompt_len_S, *penalties),
        BLOCK=min(_BLOCK, triton.next_power_of_2(tokens_SL.shape[1])),
        DRAFTS=max(16, triton.next_power_of_2(windows.width)),
        num_warps=_NUM_WARPS,
        # The same bits as separate operations give.
        enable_fp_fusion=False,
    )


def ban_bad_words(
    logits_NV: Tensor,
    windows: WindowRows,
    mask: FeatureMask,
    tokens_SL: Tensor,
    bad_words_SEC: Tensor,
) -> None:
    num_words, length = bad_words_SEC.shape[1:]
    _words_kernel[(windows.num_positions,)](
        *(logits_NV, logits_NV.stride(0)),
        *(windows.slot_B, windows.first_B, windows.width_B, windows.length_B),
        *(windows.draft_BK, windows.draft_BK.stride(0), windows.width, *mask),
        *(tokens_SL, tokens_SL.stride(0), bad_words_SEC, bad_words_SEC.stride(0), num_words),
        WORDS=triton.next_power_of_2(num_words),
        LENGTH=length,
        PADDED=triton.next_power_of_2(length),
    )


@triton.jit(do_not_specialize=["batch", "width", "draft_stride"])
def _penalty_kernel(  # noqa: PLR0913
    logits_NV,
    row_stride,
    table_PV,
    table_stride,
    batch,
    slot_B,
    first_B,
    width_B,
    length_B,
    draft_BK,
    draft_stride,
    width,
    features_S,
    bit,
    tokens_SL,
    tokens_stride,
    prompt_len_S,
    repetition_S,
    presence_S,
    frequency_S,
    BLOCK: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    table_V = table_PV + tl.program_id(0) * table_stride
    batch_row = tl.program_id(0)
    while batch_row < batch:
        slot = tl.load(slot_B + batch_row)
        used = tl.load(width_B + batch_row)
        if ((tl.load(features_S + slot) & bit) != 0) & (used > 0):
            length = tl.load(length_B + batch_row)
            drafts = (draft_BK + batch_row * draft_stride, tl.minimum(used, width) - 1)
            history = (tokens_SL + slot.to(tl.int64) * tokens_stride, length)
            strength = (
                tl.load(repetition_S + slot),
                tl.load(presence_S + slot),
                tl.load(frequency_S + slot),
            )
            _count(table_V, history, drafts, tl.load(prompt_len_S + slot), BLOCK, DRAFTS)
            tl.debug_barrier()
            first = tl.load(first_B + batch_row)
            logits_V = logits_NV + first.to(tl.int64) * row_stride
            windows = (logits_V, row_stride, used)
            start = 0
            while start < length:
                place = start + tl.arange(0, BLOCK)
                token = tl.load(history[0] + place, place < length, other=-1)
                _penalise(table_V, token, windows, drafts, strength)
                start += BLOCK
            entry = tl.arange(0, DRAFTS)
            drafted = tl.load(drafts[0] + entry, entry < drafts[1], other=-1)
            _penalise(table_V, drafted, windows, drafts, strength)
            tl.debug_barrier()
        batch_row += tl.num_programs(0)


@triton.jit
def _count(table_V, history, drafts, prompt_len, BLOCK: tl.constexpr, DRAFTS: tl.constexpr):
    tokens_L, length = history
    start = 0
    while start < length:
        place = start + tl.arange(0, BLOCK)
        token = tl.load(tokens_L + place, place < length, other=0)
        is_output = place >= prompt_len
        tl.atomic_add(table_V + token, 1, is_output & (place < length), sem="relaxed")
        is_prompt = (place < prompt_len) & (place < length)
        tl.atomic_or(table_V + token, _IN_PROMPT, is_prompt, sem="relaxed")
        start += BLOCK
    draft_K, num_drafts = drafts
    entry = tl.arange(0, DRAFTS)
    drafted = tl.load(draft_K + entry, entry < num_drafts, other=-1)
    tl.atomic_or(table_V + drafted, _IN_DRAFTS, drafted >= 0, sem="relaxed")


@triton.jit
def _penalise(table_V, token, windows, drafts, strength):
    """Change the logits of the tokens whose count this call takes, in every window position."""
    logits_V, row_stride, used = windows
    draft_K, num_drafts = drafts
    repetition, presence, frequency = strength
    seen = tl.atomic_xchg(table_V + token, 0, token >= 0, sem="relaxed")
    is_mine = (token >= 0) & (seen != 0)
    count = seen & _COUNT
    is_seen = (count > 0) | ((seen & _IN_PROMPT) != 0)
    j = 0
    while j < used:
        # The draft before this position is history too; before the first there is none.
        last = tl.load(draft_K + j - 1, (j > 0) & (j <= num_drafts), other=-2)
        count += (token == last).to(tl.int32)
        is_seen = is_seen | (token == last)
        place = logits_V + j * row_stride.to(tl.int64) + token
        logit = tl.load(place, is_mine & is_seen, other=0.0)
        logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
        logit -= frequency * count.to(tl.float32)
        logit -= tl.where(count > 0, presence, 0.0)
        tl.store(place, logit, is_mine & is_seen)
        j += 1


@triton.jit(do_not_specialize=["width", "draft_stride"])
def _words_kernel(  # noqa: PLR0913
    logits_NV,
    row_stride,
    slot_B,
    first_B,
    width_B,
    length_B,
    draft_BK,
    draft_stride,
    width,
    features_S,
    bit,
    tokens_SL,
    tokens_stride,
    words_SEC,
    words_stride,
    num_words,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    batch_row, j = tl.program_id(0) // width, tl.program_id(0) % width
    slot = tl.load(slot_B + batch_row)
    is_asked = (tl.load(features_S + slot) & bit) != 0
    if (is_asked == 0) | (j >= tl.load(width_B + batch_row)):
        return
    row = tl.load(first_B + batch_row) + j
    length = tl.load(length_B + batch_row)
    # What comes before this row, the latest last; -2 is no token and matches none.
    column = tl.arange(0, PADDED)
    is_prefix = column < LENGTH - 1
    place = length + j + column - (LENGTH - 1)
    tokens_L = tokens_SL + slot.to(tl.int64) * tokens_stride
    committed = tl.load(tokens_L + place, is_prefix & (place >= 0) & (place < length), other=-2)
    draft_K = draft_BK + batch_row * draft_stride
    drafted = tl.load(draft_K + place - length, is_prefix & (place >= length), other=-2)
    tail = tl.where(place >= length, drafted, committed)
    tail = tl.where(tail < 0, -2, tail)
    entry = tl.arange(0, WORDS)
    words = words_SEC + slot.to(tl.int64) * words_stride + entry * LENGTH
    is_word = entry < num_words
    prefix = tl.load(
        words[:, None] + column[None, :], is_word[:, None] & is_prefix[None, :], other=-1
    )
    differs = (prefix != tail[None, :]) & (prefix != -1)
    is_complete = tl.sum(differs.to(tl.int32), 1) == 0
    last = tl.load(words + LENGTH - 1, is_word, other=-1)
    forbid(logits_NV + row.to(tl.int64) * row_stride, last, is_complete & (last >= 0))
