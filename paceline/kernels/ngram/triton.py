"""n-gram proposal on the GPU: programs scan chunks of a row, the best match of all wins.

A match is one number, its length before its place, so the order of programs changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # positions that a program looks at in one go
_CHUNK = 16384  # positions of a program; longer rows are shared among several


def ngram_propose(
    tokens_SL: Tensor, num_tokens_S: Tensor, slot_B: Tensor, k: int, min_n: int, max_n: int
) -> Tensor:
    num_rows, longest = len(slot_B), tokens_SL.shape[1]
    draft_BK = tokens_SL.new_empty(num_rows, k)
    num_chunks = triton.cdiv(longest, _CHUNK)
    # One program for each chunk, then one to take the best; a single chunk needs no second launch.
    best_BC = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=tokens_SL.device)
    tensors = (tokens_SL, num_tokens_S, slot_B, best_BC, draft_BK)
    sizes = (k, min_n, max_n, longest, tokens_SL.stride(0))
    drafts = triton.next_power_of_2(max(k, 1))
    _scan_kernel[(num_rows, num_chunks)](
        *tensors,
        *sizes,
        CHUNK=_CHUNK,
        BLOCK=_BLOCK,
        IS_WHOLE=num_chunks == 1,
        DRAFTS=drafts,
        num_warps=8,
    )
    if num_chunks > 1:
        _best_kernel[(num_rows,)](
            *tensors,
            *sizes,
            num_chunks,
            CHUNKS=triton.next_power_of_2(num_chunks),
            DRAFTS=drafts,
            num_warps=1,
        )
    return draft_BK


@triton.jit
def _copy(tokens, length, best, longest, draft_K, k, DRAFTS: tl.constexpr):
    """Drafts that follow the match, repeated with its period; -1 without a match."""
    source = (best % longest).to(tl.int32) + 1
    period = tl.maximum(length - source, 1)
    step = tl.arange(0, DRAFTS)
    draft = tl.load(tokens + source + step % period, mask=(step < k) & (best >= 0), other=-1)
    tl.store(draft_K + step, draft, mask=step < k)


@triton.jit
def _score(tokens, length, first, min_n, max_n, longest, BLOCK: tl.constexpr):
    """The best score of the positions first ... first + BLOCK; negative when none matches."""
    end = first + tl.arange(0, BLOCK)
    last = tl.load(tokens + length - 1)
    goes_on = tl.load(tokens + end, mask=end < length - 1, other=-1) == last
    matches = goes_on.to(tl.int32)
    back = 1
    # All candidates failed: skip the load. Most blocks end at the first token.
    while (back < max_n) & (tl.max(goes_on.to(tl.int32)) > 0):
        tail = tl.load(tokens + length - 1 - back, mask=back < length, other=-2)
        goes_on &= end >= back
        goes_on &= tl.load(tokens + end - back, mask=goes_on, other=-1) == tail
        matches += goes_on.to(tl.int32)
        back += 1
    score = matches.to(tl.int64) * longest + end
    return tl.max(tl.where(matches >= min_n, score, -1))


@triton.jit(do_not_specialize=["k", "min_n", "max_n"])
def _scan_kernel(  # noqa: PLR0913
    tokens_SL,
    num_tokens_S,
    slot_B,
    best_BC,
    draft_BK,
    k,
    min_n,
    max_n,
    longest,
    tokens_stride,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = tl.load(slot_B + row).to(tl.int64)
    length = tl.load(num_tokens_S + slot)
    tokens = tokens_SL + slot * tokens_stride
    chunk_end = tl.minimum((chunk + 1) * CHUNK, length - 1)
    best = tl.full([], -1, tl.int64)
    first = chunk * CHUNK
    while first < chunk_end:
        best = tl.maximum(best, _score(tokens, length, first, min_n, max_n, longest, BLOCK))
        first += BLOCK
    if IS_WHOLE:
        _copy(tokens, length, best, longest, draft_BK + row * k, k, DRAFTS)
    else:
        tl.store(best_BC + row * tl.num_programs(1) + chunk, best)


@triton.jit(do_not_specialize=["k", "min_n", "max_n", "num_chunks"])
def _best_kernel(  # noqa: PLR0913
    tokens_SL,
    num_tokens_S,
    slot_B,
    best_BC,
    draft_BK,
    k,
    min_n,
    max_n,
    longest,
    tokens_stride,
    num_chunks,
    CHUNKS: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slot_B + row).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    best = tl.load(best_BC + row * num_chunks + chunk, mask=chunk < num_chunks, other=-1)
    tokens = tokens_SL + slot * tokens_stride
    length = tl.load(num_tokens_S + slot)
    _copy(tokens, length, tl.max(best), longest, draft_BK + row * k, k, DRAFTS)
