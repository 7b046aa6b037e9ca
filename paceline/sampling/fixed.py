"""Verification at fixed shapes: logits of every window position in, one verdict each out.

Reads slot state by slot, never writes it, and reads nothing on the host unless custom processors
or late masks came along. CUDA tensors take the Triton twins, all others the torch references.

Shape letters: B rows, K drafts, W = K + 1, N = B * W logits rows, V vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.kernels import logprobs, masks, penalties, rng, sampling
from paceline.kernels import verify as verification
from paceline.kernels.logprobs import LogprobResults
from paceline.kernels.masks import Stops
from paceline.kernels.penalties import Penalties
from paceline.kernels.rows import Asking, LogitRows, WindowRows
from paceline.kernels.sampling import SlotKnobs
from paceline.kernels.step_rows import StepRows
from paceline.kernels.verify import SampledDrafts, Verdicts
from paceline.layers.vocab import WHOLE, VocabShards
from paceline.sampling.custom import CustomProcessors
from paceline.sampling.verify import Tail
from paceline.state.slots import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    LOGPROBS,
    MIN_TOKENS,
    PENALTIES,
    Slots,
)


class Twins(NamedTuple):
    """The kernels of a tail: the torch references, or their Triton twins."""

    draw: Callable[..., tuple[Tensor, Tensor]]
    draft: Callable[..., Tensor]
    judge: Callable[..., Verdicts]
    keep_allowed_by_slot: Callable[..., None]
    keep_allowed_by_row: Callable[..., None]
    ban_bad_words_by_slot: Callable[..., None]
    ban_early_stops_by_slot: Callable[..., None]
    add_bias_by_slot: Callable[..., None]
    apply_penalties_by_slot: Callable[..., None]
    write_logprobs: Callable[..., None]


@cache
def twins(is_cuda: bool) -> Twins:
    modules: tuple[Any, ...] = (sampling, verification, masks, penalties, logprobs)
    if is_cuda:
        from paceline.kernels import (
            logprobs_triton,
            masks_triton,
            penalties_triton,
            sampling_triton,
            verify_triton,
        )

        modules = (sampling_triton, verify_triton, masks_triton, penalties_triton, logprobs_triton)
    found = {name: getattr(m, name) for m in modules for name in Twins._fields if hasattr(m, name)}
    return Twins(**found)


def verify(
    logits_NV: Tensor,
    rows: StepRows,
    slots: Slots,
    *,
    tail: Tail,
    custom: CustomProcessors | None = None,
    late_bits_NV: Tensor | None = None,
    is_forced: bool = False,
    vocab: VocabShards = WHOLE,
) -> Verdicts:
    """What each window position says. `logits_NV` is left as it is, of any float type.

    `vocab` says which part of the vocabulary the logits are of.

    `late_bits_NV` masks every logits row when given; rows without a mask of their own carry ones.
    With `is_forced` acceptance is somebody else's coin: drafts are not judged by what they were
    drawn from.
    """
    if tail is Tail.GREEDY:
        return Verdicts(*vocab.greedy(logits_NV), None)
    logits_NV = vocab.gather(logits_NV)
    if tail is Tail.SAMPLE:
        drawn = twins(logits_NV.is_cuda).draw(logits_NV, windows(rows), knobs_of(slots))
        return Verdicts(*drawn, None)
    work_NV = processed(logits_NV, windows(rows), slots, custom, late_bits_NV)
    if slots.draft_probs_SKV is None or is_forced:
        drawn = twins(logits_NV.is_cuda).draw(work_NV, windows(rows), knobs_of(slots))
        return Verdicts(*drawn, None)
    drafts = SampledDrafts(slots.drafts_onehot_S, slots.draft_probs_SKV)
    return twins(logits_NV.is_cuda).judge(work_NV, windows(rows), knobs_of(slots), drafts)


def scratch_bytes(num_logits: int, vocab_size: int) -> int:
    """Device memory of the costliest tail beside the logits, of `num_logits` rows at most.

    A float32 copy of them, what each row leaves between the kernels, and tables that count tokens.
    """
    chunks = -(-vocab_size // 4096)
    row_bytes = 4 * vocab_size + (16 << 10) + 416 * chunks + 128
    return num_logits * row_bytes + 64 * 4 * vocab_size + (1 << 20)


def windows(rows: StepRows) -> WindowRows:
    return WindowRows(rows.batch.slot_B, rows.width_B, rows.num_tokens_B, rows.draft_BK)


def knobs_of(slots: Slots) -> SlotKnobs:
    return SlotKnobs(
        slots.temperature_S, slots.top_k_S, slots.top_p_S, slots.min_p_S, slots.seed_S2
    )


def processed(
    logits_NV: Tensor,
    rows: WindowRows,
    slots: Slots,
    custom: CustomProcessors | None,
    late_bits_NV: Tensor | None,
) -> Tensor:
    """A float32 copy of the logits with every processor run, in their one order."""
    kernels = twins(logits_NV.is_cuda)
    # Also a copy where the type is the same: logprobs are taken from the raw logits, later.
    work_NV = logits_NV.to(torch.float32, copy=True)

    def asking(bit: int) -> Asking:
        return Asking(slots.features_S, bit)

    kernels.keep_allowed_by_slot(work_NV, rows, asking(ALLOWED), slots.allowed_bits_SV)
    history = (slots.tokens_SL, slots.bad_words_SEE)
    kernels.ban_bad_words_by_slot(work_NV, rows, asking(BAD_WORDS), *history)
    stops = Stops(slots.min_len_S, slots.eos_ids_SE, slots.stop_ids_SE)
    kernels.ban_early_stops_by_slot(work_NV, rows, asking(MIN_TOKENS), stops)
    bias = (slots.bias_ids_SE, slots.bias_values_SE)
    kernels.add_bias_by_slot(work_NV, rows, asking(BIAS), *bias)
    wanted = Penalties(slots.repetition_S, slots.presence_S, slots.frequency_S)
    kernels.apply_penalties_by_slot(
        work_NV, rows, asking(PENALTIES), slots.tokens_SL, slots.prompt_len_S, wanted
    )
    if custom is not None:
        # Foreign code runs eagerly, row by row, so reading which rows there are costs nothing more.
        custom.apply(work_NV, _looked_at(rows), slots)
    if late_bits_NV is not None:
        kernels.keep_allowed_by_row(work_NV, late_bits_NV)
    return work_NV


def write_logprobs(
    logits_NV: Tensor,
    verdicts: Verdicts,
    rows: StepRows,
    slots: Slots,
    results: LogprobResults,
    rates_K: Tensor | None = None,
) -> None:
    """Logprobs of what each window position emits if the window gets there, for those who asked.

    Comes before the step is finished, so that its stamp covers them. `logits_NV` are the raw ones;
    `rates_K` is given where acceptance is forced.
    """
    token_N = verdicts.token_N
    if rates_K is not None and rows.shape.k:
        token_N = _forced_tokens(token_N, windows(rows), slots.seed_S2, rates_K)
    twins(logits_NV.is_cuda).write_logprobs(
        logits_NV,
        token_N,
        windows(rows),
        Asking(slots.features_S, LOGPROBS),
        slots.num_logprobs_S,
        results,
    )


def _forced_tokens(token_N: Tensor, rows: WindowRows, seed_S2: Tensor, rates_K: Tensor) -> Tensor:
    """The draft where the coin accepts it."""
    at, draft_N = rows.logit_rows(), rows.draft_N()
    unit_N = rng.uniform(seed_S2[at.slot_N], at.length_N + at.offset_N, rng.ACCEPT)
    rate_N = torch.nn.functional.pad(rates_K, (0, 1))[at.offset_N.clamp(max=len(rates_K))]
    return torch.where((unit_N < rate_N) & (draft_N >= 0), draft_N, token_N)


def _looked_at(rows: WindowRows) -> LogitRows:
    return rows.logit_rows().where(rows.used_N())
