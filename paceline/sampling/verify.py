"""Verification, of which sampling is the case K = 0: logits and drafts in, one verdict each out.

Reads slot state by slot, never writes it. Where a window ends is `kernels/finish`.

Shape letters: B rows of the step, N logits rows, K drafts, W = K + 1, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.kernels import table
from paceline.kernels.logprobs.reference import LogprobResults
from paceline.kernels.processors.reference import LateBits
from paceline.kernels.rows import FeatureMask, WindowRows
from paceline.kernels.sampling.reference import SlotKnobs
from paceline.kernels.verify.reference import SampledDrafts, Verdicts
from paceline.layers.vocab import WHOLE, VocabShards
from paceline.sampling.custom import CustomProcessors
from paceline.sampling.processors import PROCESSORS
from paceline.state.slots import CUSTOM, LOGPROBS, Slots
from paceline.step import Floats


class SamplingMode(IntEnum):
    """How much of verification a step needs; a step's mode is the largest of its rows'."""

    GREEDY = 0
    SAMPLE = 1
    FULL = 2  # any processor, logprobs or sampled drafts in the batch


class Synthetic(NamedTuple):
    """Synthetic acceptance, for benchmarks and tests: by chance instead of by the tokens."""

    # float32 [S, K]: chance of each draft, given those before it. A table of `Slots`, because a
    # request may bring its own.
    rates_SK: Tensor
    usual: tuple[float, ...] = ()  # of requests without their own

    def row(self, own: Sequence[float] | None) -> Floats:
        """The row of a request, whose chances to accept the first 1, 2, ... drafts are `own`."""
        rates = self.usual if own is None else conditional_rates(tuple(own))
        return np.array(rates, np.float32)


class Extras(NamedTuple):
    """What few steps bring along."""

    custom: CustomProcessors | None = None
    late: LateBits | None = None  # masks for some rows of this step
    results: LogprobResults | None = None  # where logprobs go, if a row asks for them


NO_EXTRAS = Extras()


def synthetic_rates(length: float, k: int) -> tuple[float, ...]:
    """Chances that the first 1, 2, ... k drafts are all accepted, `length - 1` on average.

    Always accept floor(length - 1) drafts, one more with the fractional probability. So requests of
    a batch need nearly the same number of steps.
    """
    return tuple(min(max(length - 1 - i, 0.0), 1.0) for i in range(k))


def conditional_rates(rates: tuple[float, ...]) -> tuple[float, ...]:
    """The chance of each draft given those before it, out of the chances to get so far."""
    return tuple(rate / before if before else 0.0 for before, rate in pairwise((1.0, *rates)))


def verify(
    logits_NV: Tensor,
    windows: WindowRows,
    slots: Slots,
    *,
    mode: SamplingMode,
    synthetic: Synthetic | None = None,
    is_block: bool = False,
    extras: Extras = NO_EXTRAS,
    vocab: VocabShards = WHOLE,
) -> Verdicts:
    """What each window position says. `logits_NV` may be overwritten.

    `vocab` says which part of the vocabulary the logits are of. `is_block`: sampled drafts are
    accepted by block verification.
    """
    num_logits = len(logits_NV)
    ok_N = None
    if synthetic is not None:
        ok_N = table.accept_by_rate(windows, slots.seed_S2, synthetic.rates_SK, num_logits)
    if mode is SamplingMode.GREEDY:
        return Verdicts(*vocab.greedy(logits_NV), ok_N)
    logits_NV = vocab.gather(logits_NV)
    knobs = knobs_of(slots)
    if mode is SamplingMode.SAMPLE:
        return Verdicts(*table.draw(logits_NV, windows, knobs, ok_N), ok_N)
    present = _features(windows, slots)
    # Logprobs are of the raw logits. A captured step cannot ask for features: it keeps them.
    keeps_raw = not logits_NV.is_cpu or bool(present & LOGPROBS)
    work_NV = logits_NV.to(torch.float32, copy=keeps_raw)
    process_logits(work_NV, windows, slots, present, extras)
    if slots.draft_probs_SKV is None or synthetic is not None:
        verdicts = Verdicts(*table.draw(work_NV, windows, knobs, ok_N), ok_N)
    else:
        drafts = SampledDrafts(slots.drafts_onehot_S, slots.draft_probs_SKV)
        verdicts = table.judge(work_NV, windows, knobs, drafts, is_block)
    if present & LOGPROBS and extras.results is not None:
        mask = FeatureMask(slots.features_S, LOGPROBS)
        places = (slots.num_logprobs_S, extras.results)
        table.write_logprobs(logits_NV, verdicts, windows, mask, *places)
    return verdicts


def process_logits(
    logits_NV: Tensor, windows: WindowRows, slots: Slots, present: int, extras: Extras
) -> None:
    """Everything between the model's logits and the temperature, in its one order."""
    for processor in PROCESSORS:
        if present & processor.bit:
            mask = FeatureMask(slots.features_S, processor.bit)
            processor.apply((logits_NV, windows, mask), slots)
    if extras.custom is not None and present & CUSTOM:
        extras.custom.apply(logits_NV, windows, slots)
    if extras.late is not None:
        table.keep_late(logits_NV, windows, extras.late)


def knobs_of(slots: Slots) -> SlotKnobs:
    return SlotKnobs(
        slots.temperature_S, slots.top_k_S, slots.top_p_S, slots.min_p_S, slots.seed_S2
    )


def scratch_bytes(num_logits: int, vocab_size: int) -> int:
    """Device memory that the costliest mode needs beside the logits, of `num_logits` rows at most.

    A float32 copy of them, what each row leaves between the kernels, and tables that count tokens.
    """
    chunks = -(-vocab_size // 4096)
    row_bytes = 4 * vocab_size + (16 << 10) + 416 * chunks + 128
    return num_logits * row_bytes + 64 * 4 * vocab_size + (1 << 20)


def _features(windows: WindowRows, slots: Slots) -> int:
    """Features that a row of the step uses. A captured step cannot ask: all of them."""
    features_S = slots.features_S
    if not features_S.is_cpu:
        return -1
    slot_B = windows.slot_B.numpy()[windows.width_B.numpy() > 0]
    return int(np.bitwise_or.reduce(features_S.numpy()[slot_B]))
