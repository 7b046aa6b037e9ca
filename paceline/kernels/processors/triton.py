"""Triton twins of the processors: a program exits at once if its slot lacks the feature.

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
from paceline.kernels.sampling.triton.chunks import (
    Logits,
    is_used,
    kept_tensor,
    logits_row,
    row_at,
)

_CHUNK = 4096


def keep_allowed(
    logits_NV: Tensor, windows: WindowRows, mask: FeatureMask, bits_SX: Tensor
) -> None:
    _keep(logits_NV, windows, mask, (bits_SX, bits_SX.stride(0), 0), is_late=False)


def keep_late(logits_NV: Tensor, windows: WindowRows, late: LateBits) -> None:
    bits = (late.bits_RWX, late.bits_RWX.stride(0), late.bits_RWX.stride(1))
    _keep(logits_NV, windows, late.index_B, bits, is_late=True)


def _keep(
    logits_NV: Tensor,
    windows: WindowRows,
    choice: FeatureMask | Tensor,
    bits: tuple[Tensor, int, int],
    *,
    is_late: bool,
) -> None:
    vocab_size = logits_NV.shape[1]
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    _allowed_kernel[(windows.num_positions * num_chunks,)](
        *(Logits.of(logits_NV), windows, windows.width, choice, *bits),
        IS_LATE=is_late,
        NUM_CHUNKS=num_chunks,
        CHUNK=min(_CHUNK, triton.next_power_of_2(vocab_size)),
    )


def ban_early_stops(
    logits_NV: Tensor, windows: WindowRows, mask: FeatureMask, stops: Stops
) -> None:
    eos_SE, stop_SE = stops.eos_SE, stops.stop_SE
    _early_kernel[(windows.num_positions,)](
        *(Logits.of(logits_NV), windows, windows.width, mask, stops),
        *(eos_SE.stride(0), eos_SE.shape[1], stop_SE.stride(0), stop_SE.shape[1]),
        IDS=triton.next_power_of_2(max(eos_SE.shape[1], stop_SE.shape[1])),
        num_warps=1,
    )


def add_bias(
    logits_NV: Tensor, windows: WindowRows, mask: FeatureMask, ids_SE: Tensor, values_SE: Tensor
) -> None:
    """The ids of a slot differ from one another: a mapping has no key twice."""
    _bias_kernel[(windows.num_positions,)](
        *(Logits.of(logits_NV), windows, windows.width, mask),
        *((ids_SE, values_SE), ids_SE.stride(0), values_SE.stride(0), ids_SE.shape[1]),
        IDS=triton.next_power_of_2(ids_SE.shape[1]),
    )


@triton.jit
def forbid(logits_V, token, is_meant):
    """Make tokens impossible. Added, not assigned: a broken row must stay one."""
    logit = tl.load(logits_V + token, is_meant, 0.0)
    tl.store(logits_V + token, logit + float("-inf"), is_meant)


@triton.jit(do_not_specialize=["width"])
def _allowed_kernel(  # noqa: PLR0913
    logits,
    windows,
    width,
    choice,  # which slots have a mask; if late, the entry of each row or -1
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
        entry = tl.load(choice + owner)
        is_masked = (entry >= 0) & (j < tl.load(windows.width_B + owner))
    else:
        entry = tl.load(windows.slot_B + owner)
        is_masked = is_used(windows, owner, j, entry, choice)
    if not is_masked:
        return
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    is_token = place < logits.vocab_size
    bits = bits_X + entry.to(tl.int64) * bits_stride + j * position_stride
    word = tl.load(bits + place // 32, is_token, other=-1)
    is_forbidden = ((word >> (place % 32)) & 1) == 0
    logits_V = row_at(logits, logits_row(windows, at, width))
    tl.store(logits_V + place, float("-inf"), is_forbidden & is_token)


@triton.jit(do_not_specialize=["width"])
def _early_kernel(  # noqa: PLR0913
    logits,
    windows,
    width,
    mask,
    stops,
    eos_stride,
    num_eos,
    stop_stride,
    num_stop,
    IDS: tl.constexpr,
):
    at = tl.program_id(0)
    owner, j = at // width, at % width
    slot = tl.load(windows.slot_B + owner)
    if not is_used(windows, owner, j, slot, mask):
        return
    if tl.load(windows.length_B + owner) + j >= tl.load(stops.min_len_S + slot):
        return
    logits_V = row_at(logits, logits_row(windows, at, width))
    entry = tl.arange(0, IDS)
    token = tl.load(stops.eos_SE + slot * eos_stride + entry, entry < num_eos, other=-1)
    forbid(logits_V, token, token >= 0)
    token = tl.load(stops.stop_SE + slot * stop_stride + entry, entry < num_stop, other=-1)
    forbid(logits_V, token, token >= 0)


@triton.jit(do_not_specialize=["width"])
def _bias_kernel(  # noqa: PLR0913
    logits,
    windows,
    width,
    mask,
    bias,
    ids_stride,
    values_stride,
    num_ids,
    IDS: tl.constexpr,
):
    ids_SE, values_SE = bias
    at = tl.program_id(0)
    owner, j = at // width, at % width
    slot = tl.load(windows.slot_B + owner)
    if not is_used(windows, owner, j, slot, mask):
        return
    entry = tl.arange(0, IDS)
    token = tl.load(ids_SE + slot * ids_stride + entry, entry < num_ids, other=-1)
    value = tl.load(values_SE + slot * values_stride + entry, token >= 0, other=0.0)
    logits_V = row_at(logits, logits_row(windows, at, width))
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
        *(Logits.of(logits_NV), windows, windows.width, batch, mask, penalties),
        *(table_PV, table_PV.stride(0), tokens_SL, tokens_SL.stride(0), prompt_len_S),
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
        *(Logits.of(logits_NV), windows, windows.width, mask, tokens_SL, tokens_SL.stride(0)),
        *(bad_words_SEC, bad_words_SEC.stride(0), num_words),
        WORDS=triton.next_power_of_2(num_words),
        LENGTH=length,
        PADDED=triton.next_power_of_2(length),
    )


@triton.jit(do_not_specialize=["batch", "width"])
def _penalty_kernel(  # noqa: PLR0913
    logits,
    windows,
    width,
    batch,
    mask,
    penalties,
    table_PV,
    table_stride,
    tokens_SL,
    tokens_stride,
    prompt_len_S,
    BLOCK: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    table_V = table_PV + tl.program_id(0) * table_stride
    batch_row = tl.program_id(0)
    while batch_row < batch:
        slot = tl.load(windows.slot_B + batch_row)
        used = tl.load(windows.width_B + batch_row)
        if is_used(windows, batch_row, 0, slot, mask):
            length = tl.load(windows.length_B + batch_row)
            num_drafts = tl.minimum(used, width) - 1
            drafts = (windows.draft_BK + batch_row * (width - 1), num_drafts)
            history = (tokens_SL + slot.to(tl.int64) * tokens_stride, length)
            strength = (
                tl.load(penalties.repetition_S + slot),
                tl.load(penalties.presence_S + slot),
                tl.load(penalties.frequency_S + slot),
            )
            _count(table_V, history, drafts, tl.load(prompt_len_S + slot), BLOCK, DRAFTS)
            tl.debug_barrier()
            logits_V = row_at(logits, tl.load(windows.first_B + batch_row))
            window = (logits_V, logits.row_stride, used)
            start = 0
            while start < length:
                place = start + tl.arange(0, BLOCK)
                token = tl.load(history[0] + place, place < length, other=-1)
                _penalise(table_V, token, window, drafts, strength)
                start += BLOCK
            entry = tl.arange(0, DRAFTS)
            drafted = tl.load(drafts[0] + entry, entry < drafts[1], other=-1)
            _penalise(table_V, drafted, window, drafts, strength)
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
def _penalise(table_V, token, window, drafts, strength):
    """Change the logits of the tokens whose count this call takes, in every window position."""
    logits_V, row_stride, used = window
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
        place = logits_V + j.to(tl.int64) * row_stride + token
        logit = tl.load(place, is_mine & is_seen, other=0.0)
        logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
        logit -= frequency * count.to(tl.float32)
        logit -= tl.where(count > 0, presence, 0.0)
        tl.store(place, logit, is_mine & is_seen)
        j += 1


@triton.jit(do_not_specialize=["width"])
def _words_kernel(  # noqa: PLR0913
    logits,
    windows,
    width,
    mask,
    tokens_SL,
    tokens_stride,
    words_SEC,
    words_stride,
    num_words,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    at = tl.program_id(0)
    batch_row, j = at // width, at % width
    slot = tl.load(windows.slot_B + batch_row)
    if not is_used(windows, batch_row, j, slot, mask):
        return
    length = tl.load(windows.length_B + batch_row)
    # What comes before this row, the latest last; -2 is no token and matches none.
    column = tl.arange(0, PADDED)
    is_prefix = column < LENGTH - 1
    place = length + j + column - (LENGTH - 1)
    tokens_L = tokens_SL + slot.to(tl.int64) * tokens_stride
    committed = tl.load(tokens_L + place, is_prefix & (place >= 0) & (place < length), other=-2)
    draft_K = windows.draft_BK + batch_row * (width - 1)
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
    logits_V = row_at(logits, logits_row(windows, at, width))
    forbid(logits_V, last, is_complete & (last >= 0))
