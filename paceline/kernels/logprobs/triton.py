"""Triton twin of kernels/logprobs.write_logprobs: rows without the feature exit at once.

One pass over the raw logits of a row that asks, spread over programs; nothing of the vocabulary's
width is kept. Scratch is 8 bytes per chunk and top token. Shape letters: E ring entries, B rows,
W window positions, N logits rows, C chunks of a row, M top tokens, T = 1 + M, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.logprobs import reference as logprobs
from paceline.kernels.logprobs.reference import LogprobResults
from paceline.kernels.rows import FeatureMask, WindowRows
from paceline.kernels.sampling.triton.chunks import (
    NUM_WARPS,
    Logits,
    Split,
    is_last,
    is_used,
    logits_row,
    own_draft,
    row_at,
    tickets,
)
from paceline.kernels.verify.reference import Verdicts

_LOWEST = tl.constexpr(logprobs._LOWEST)


def write_logprobs(
    logits_NV: Tensor,
    verdicts: Verdicts,
    windows: WindowRows,
    mask: FeatureMask,
    num_top_S: Tensor,
    results: LogprobResults,
) -> None:
    num_rows, vocab_size = windows.num_positions, logits_NV.shape[1]
    split = Split.of(vocab_size)
    ids, values, rank = results[:3]
    assert results.place_B is None, "row b has place b"
    assert ids.stride() == values.stride()
    assert rank.stride(2) == 1
    most = min(ids.shape[3] - 1, vocab_size)
    top = triton.next_power_of_2(max(most, 1))

    def parts(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(
            (num_rows, split.num_chunks, *shape), dtype=dtype, device=logits_NV.device
        )

    scratch = _Scratch(
        ticket_N=tickets(logits_NV.device),
        part_NC4=parts(4),
        rank_NC=parts(dtype=torch.int32),
        top_value_NCM=parts(top),
        top_id_NCM=parts(top, dtype=torch.int32),
    )
    _logprob_kernel[(num_rows * split.num_chunks,)](
        *(Logits.of(logits_NV), verdicts, windows, windows.width, mask, num_top_S, most),
        *(scratch, results, len(ids), *ids.stride()[:3], *rank.stride()[:2]),
        CHUNK=split.chunk,
        NUM_CHUNKS=split.num_chunks,
        PARTS=split.parts,
        TOP=top,
        num_warps=NUM_WARPS,
    )


class _Scratch(NamedTuple):
    """What the programs of a row leave for the last of them."""

    ticket_N: Tensor
    part_NC4: Tensor  # the best raw logit, the best cleaned one, the sum of exp
    rank_NC: Tensor  # tokens better than the chosen one
    top_value_NCM: Tensor
    top_id_NCM: Tensor


@triton.jit(
    do_not_specialize=[
        *("width", "ids_stride_E", "ids_stride_B", "ids_stride_W"),
        *("rank_stride_E", "rank_stride_B"),
    ]
)
def _logprob_kernel(  # noqa: PLR0913
    logits,
    verdicts,
    windows,
    width,
    mask,
    num_top_S,
    most,
    scratch,
    results,
    num_entries,
    ids_stride_E,
    ids_stride_B,
    ids_stride_W,
    rank_stride_E,
    rank_stride_B,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    TOP: tl.constexpr,
):
    ticket_N, part_NC4, rank_NC, top_value_NCM, top_id_NCM = scratch
    row, chunk = tl.program_id(0) // NUM_CHUNKS, tl.program_id(0) % NUM_CHUNKS
    batch_row, j = row // width, row % width
    slot = tl.load(windows.slot_B + batch_row)
    if not is_used(windows, batch_row, j, slot, mask):
        return
    at_logits = logits_row(windows, row, width)
    num_top = tl.minimum(tl.load(num_top_S + slot), most)
    token = tl.load(verdicts.token_N + at_logits)
    if verdicts.ok_N is not None:
        is_accepted = tl.load(verdicts.ok_N + at_logits) != 0
        token = tl.where(is_accepted, own_draft(windows, batch_row, j, width), token)
    logits_V, vocab_size = row_at(logits, at_logits), logits.vocab_size
    own = _cleaned(tl.load(logits_V + token).to(tl.float32))
    step = tl.arange(0, CHUNK)
    place = chunk * CHUNK + step
    logit = tl.load(logits_V + place, place < vocab_size, other=float("-inf")).to(tl.float32)
    raw_best = tl.max(tl.where(logit == logit, logit, float("inf")), 0)
    logit = tl.where(place < vocab_size, _cleaned(logit), float("-inf"))
    best = tl.max(logit, 0)
    part = row * NUM_CHUNKS + chunk
    tl.store(part_NC4 + part * 4, raw_best)
    tl.store(part_NC4 + part * 4 + 1, best)
    tl.store(part_NC4 + part * 4 + 2, tl.sum(tl.exp(logit - best), 0))
    tl.store(rank_NC + part, tl.sum((logit > own).to(tl.int32), 0))
    i = 0
    while i < num_top:
        value, at = tl.max(logit, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(top_value_NCM + part * TOP + i, value)
        tl.store(top_id_NCM + part * TOP + i, chunk * CHUNK + at)
        logit = tl.where(step == at, float("-inf"), logit)
        i += 1
    if is_last(ticket_N, row, NUM_CHUNKS):
        # With a single chunk `is_last` has not waited for this program's own stores.
        tl.debug_barrier()
        entry = (tl.load(results.turn_1) % num_entries).to(tl.int64)
        place_T = entry * ids_stride_E + batch_row * ids_stride_B + j * ids_stride_W
        ids_T, values_T = results.ids_EBWT + place_T, results.values_EBWT + place_T
        is_part = tl.arange(0, PARTS) < NUM_CHUNKS
        parts = row * NUM_CHUNKS + tl.arange(0, PARTS)
        raw = tl.load(part_NC4 + parts * 4, is_part, float("-inf"), cache_modifier=".cg")
        bests = tl.load(part_NC4 + parts * 4 + 1, is_part, float("-inf"), cache_modifier=".cg")
        total = tl.load(part_NC4 + parts * 4 + 2, is_part, 0.0, cache_modifier=".cg")
        rank = tl.load(rank_NC + parts, is_part, 0, cache_modifier=".cg")
        raw_best = tl.max(raw, 0)
        is_usable = (raw_best != float("inf")) & (raw_best != float("-inf"))
        best = tl.max(bests, 0)
        log_total = best + tl.log(tl.sum(total * tl.exp(bests - best), 0))
        tl.store(ids_T, token)
        tl.store(values_T, _logprob(own, log_total, is_usable))
        rank_W = results.rank_EBW + entry * rank_stride_E + batch_row * rank_stride_B
        tl.store(rank_W + j, 1 + tl.sum(rank, 0))

        spot = tl.arange(0, PARTS * TOP)
        is_spot = (spot // TOP < NUM_CHUNKS) & (spot % TOP < num_top)
        spots = row * NUM_CHUNKS * TOP + spot
        values = tl.load(top_value_NCM + spots, is_spot, float("-inf"), cache_modifier=".cg")
        ids = tl.load(top_id_NCM + spots, is_spot, 0, cache_modifier=".cg")
        _write_top(ids_T + 1, values_T + 1, ids, values, spot, num_top, log_total, is_usable)


@triton.jit
def _write_top(ids_T, values_T, ids, values, spot, num_top, log_total, is_usable):
    """The best of all chunks in order, ties to the lowest id."""
    i = 0
    while i < num_top:
        found, where = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(ids_T + i, tl.sum(tl.where(spot == where, ids, 0), 0))
        tl.store(values_T + i, _logprob(found, log_total, is_usable))
        values = tl.where(spot == where, float("-inf"), values)
        i += 1


@triton.jit
def _cleaned(logit):
    """NaN and infinities replaced by finite numbers."""
    logit = tl.where(logit == logit, logit, _LOWEST)
    return tl.minimum(tl.maximum(logit, _LOWEST), -_LOWEST)


@triton.jit
def _logprob(logit, log_total, is_usable):
    """-inf for a forbidden token of a usable row."""
    return tl.where(is_usable & (logit <= _LOWEST), float("-inf"), logit - log_total)
