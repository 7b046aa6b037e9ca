"""Verification, of which sampling is the case K = 0: logits and drafts in, emitted tokens out.

Reads slot state by slot, never writes it, and decides every stop that the device decides.

Shape letters: B rows that sample, N logits rows, M some of them, K drafts, W = K + 1, S slots,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import torch
from torch import Tensor

from paceline.kernels import rng
from paceline.kernels.rows import LogitRows
from paceline.kernels.sampling import Drafts, Knobs, Noise, distributions, draw_windows
from paceline.kernels.verify import (
    Limits,
    Verdicts,
    Windows,
    accept_sampled,
    residual_logits,
    settle_windows,
)
from paceline.layers.vocab import WHOLE, VocabShards
from paceline.sampling.custom import CustomProcessors
from paceline.sampling.logits import logit_rows, process_logits
from paceline.sampling.logprobs import Logprobs, RawRows
from paceline.sampling.window import Window
from paceline.state.slots import Slots

BY_EQUALITY, ACCEPTED = -1, 1  # 0 is rejected
# Whole distributions of p and q exist for so many rows at a time, whatever the batch and K.
ROWS_AT_ONCE = 64


class Tail(IntEnum):
    """How much of verification a step needs; a step's tail is the largest of its rows'."""

    GREEDY = 0
    SAMPLE = 1
    FULL = 2  # any processor, logprobs or sampled drafts in the batch


@dataclass(frozen=True, slots=True, eq=False)
class AcceptRules:
    """Standard verification, or acceptance forced with a rate per window position."""

    rates_K: Tensor | None = None  # float32: chance of each draft, given those before it

    @classmethod
    def synthetic(cls, rates: tuple[float, ...], device: torch.device) -> AcceptRules:
        """With `conditional_rates`."""
        return cls(torch.tensor(rates, dtype=torch.float32, device=device))


@dataclass(slots=True)
class Accepted:
    """What each row emits."""

    token_BW: Tensor  # int32, -1 after count
    count_B: Tensor  # int32
    done_B: Tensor  # int32: request.Done
    num_drafts_B: Tensor  # int32: real drafts verified
    num_accepted_B: Tensor  # int32: drafts among the emitted tokens, never the bonus
    logprobs: Logprobs | None = None


def synthetic_rates(length: float, k: int) -> tuple[float, ...]:
    """Chances that the first 1, 2, ... k drafts are all accepted, `length - 1` on average.

    What is accepted in a step varies as little as that mean allows: whole drafts are sure, the
    fraction is the chance of one more. So requests of a batch need nearly the same number of steps.
    """
    return tuple(min(max(length - 1 - i, 0.0), 1.0) for i in range(k))


def conditional_rates(rates: tuple[float, ...]) -> tuple[float, ...]:
    """The chance of each draft given those before it, out of the chances to get so far."""
    return tuple(rate / before if before else 0.0 for before, rate in pairwise((1.0, *rates)))


def verify(
    logits_NV: Tensor,
    window: Window,
    slots: Slots,
    *,
    tail: Tail,
    rules: AcceptRules,
    custom: CustomProcessors | None,
    late_bits_NV: Tensor | None,
    vocab: VocabShards = WHOLE,
) -> Accepted:
    """Accept drafts, draw what closes each window, cut it. `logits_NV` is overwritten.

    `late_bits_NV` masks every row when given; rows without a mask of their own carry ones.
    `vocab` says which part of the vocabulary the logits are of.
    """
    raw: RawRows | None = None
    if tail is Tail.GREEDY and rules.rates_K is None:
        verdicts = Verdicts(*vocab.greedy(logits_NV), None)
    else:
        rows, logits_NV = logit_rows(window), vocab.gather(logits_NV)
        if tail is Tail.FULL:
            raw = RawRows.of(logits_NV, window, slots)
            process_logits(logits_NV, rows, slots, custom=custom, late_bits_NV=late_bits_NV)
        verdicts = _Judge(logits_NV, rows, slots, tail).verdicts(rules)
    settled = settle_windows(
        verdicts,
        Windows(window.slot_B, window.start_B, window.width_B, window.draft_BK, window.length_B),
        Limits(slots.eos_ids_SE, slots.stop_ids_SE, slots.min_len_S, slots.max_len_S),
    )
    return Accepted(*settled, raw.collect(settled.token_BW) if raw is not None else None)


class _Judge:
    """Processed logits of one step and what each of their rows is drawn with."""

    def __init__(self, logits_NV: Tensor, rows: LogitRows, slots: Slots, tail: Tail) -> None:
        slot_N = rows.slot_N
        self.logits_NV = logits_NV
        self.slots = slots
        self.rows = rows
        self.tail = tail
        self.draft_N = _draft_of_rows(rows)
        self.knobs = Knobs(
            slots.temperature_S.index_select(0, slot_N),
            slots.top_k_S.index_select(0, slot_N),
            slots.top_p_S.index_select(0, slot_N),
            slots.min_p_S.index_select(0, slot_N),
        )
        position_N = (rows.length_N + rows.offset_N).to(torch.int32)
        self.noise = Noise(
            slots.seed_S2.index_select(0, slot_N),
            position_N,
            torch.full_like(position_N, rng.SAMPLE),
        )
        self.verdict_N = torch.full_like(position_N, BY_EQUALITY, dtype=torch.int8)
        self.has_sampled_drafts = False

    def verdicts(self, rules: AcceptRules) -> Verdicts:
        if rules.rates_K is not None:
            self._force(rules.rates_K)
        elif self.tail is Tail.FULL and self.slots.draft_probs_SKV is not None:
            self._reject_sampled_drafts(self.slots.draft_probs_SKV)
        token_N, bad_N = draw_windows(
            self.logits_NV,
            self.knobs,
            self.noise,
            Drafts(self.draft_N, self.rows.offset_N, self.verdict_N),
        )
        if rules.rates_K is None and not self.has_sampled_drafts:
            return Verdicts(token_N, bad_N, None)
        equal_N = (self.verdict_N == BY_EQUALITY) & (token_N == self.draft_N)
        return Verdicts(token_N, bad_N, (self.verdict_N == ACCEPTED) | equal_N)

    def _force(self, rates_K: Tensor) -> None:
        unit_N = rng.uniform(self.noise.seed_N2, self.noise.position_N, rng.ACCEPT)
        padded = torch.cat((rates_K, rates_K.new_zeros(1)))
        rate_N = padded[self.rows.offset_N.clamp(max=len(rates_K))]
        # -1 is no draft, so no rate can accept it.
        self.verdict_N.copy_((unit_N < rate_N) & (self.draft_N >= 0))

    def _reject_sampled_drafts(self, draft_probs_SKV: Tensor) -> None:
        """Rejection sampling for drafts drawn from q: exact for any q.

        A rejected row is prepared to be drawn from max(p - q, 0), with noise of its own domain.
        """
        is_sampled_N = (
            (self.slots.drafts_onehot_S[self.rows.slot_N] == 0)
            & (self.knobs.temperature_N > 0)
            & (self.draft_N >= 0)
        )
        row_M = is_sampled_N.nonzero()[:, 0]  # CPU-only shortcut: a kernel's programs exit early
        if len(row_M) == 0:
            return
        self.has_sampled_drafts = True
        for part_M in row_M.split(ROWS_AT_ONCE):
            self._judge_sampled_drafts(part_M, draft_probs_SKV)

    def _judge_sampled_drafts(self, row_M: Tensor, draft_probs_SKV: Tensor) -> None:
        slot_M, offset_M = self.rows.slot_N[row_M], self.rows.offset_N[row_M]
        prob_MV = distributions(self.logits_NV[row_M], Knobs(*(t[row_M] for t in self.knobs)))
        draft_prob_MV = draft_probs_SKV[slot_M, offset_M]
        unit_M = rng.uniform(self.noise.seed_N2[row_M], self.noise.position_N[row_M], rng.ACCEPT)
        ok_M = accept_sampled(prob_MV, draft_prob_MV, self.draft_N[row_M], unit_M)
        self.verdict_N[row_M] = ok_M.to(torch.int8)

        rejected_R = row_M[~ok_M]
        self.logits_NV[rejected_R] = residual_logits(prob_MV[~ok_M], draft_prob_MV[~ok_M])
        for knob_N, off in zip(self.knobs, (1.0, 0, 1.0, 0.0), strict=True):
            knob_N[rejected_R] = off
        self.noise.domain_N[rejected_R] = rng.RESAMPLE


def _draft_of_rows(rows: LogitRows) -> Tensor:
    """The draft that each logits row verifies; -1 for the bonus row and for padding."""
    if rows.draft_NK.shape[1] == 0:
        return torch.full_like(rows.length_N, -1)
    none_N1 = rows.draft_NK.new_full((len(rows.row_N), 1), -1)
    return torch.cat((rows.draft_NK, none_N1), 1).gather(1, rows.offset_N[:, None])[:, 0]
