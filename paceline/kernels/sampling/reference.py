"""From logits rows to tokens: argmax, thresholds, draws and distributions.

Never writes slot state but for the distributions of drafts. Shape letters: B rows, N logits rows, M
some of them, S slots, K drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.rng import reference as rng
from paceline.kernels.rows import WindowRows


class Knobs(NamedTuple):
    """How each row is turned into a distribution."""

    temperature_M: Tensor  # float32, 0 = greedy
    top_k_M: Tensor  # int32, 0 = off
    top_p_M: Tensor  # float32, 1 = off
    min_p_M: Tensor  # float32, 0 = off


class Noise(NamedTuple):
    """Which noise each row draws with."""

    seed_M2: Tensor  # int32
    position_M: Tensor  # int32
    domain_M: Tensor  # int32


class SlotKnobs(NamedTuple):
    """How the rows of each slot are drawn."""

    temperature_S: Tensor  # float32, 0 = greedy
    top_k_S: Tensor  # int32, 0 = off
    top_p_S: Tensor  # float32, 1 = off
    min_p_S: Tensor  # float32, 0 = off
    seed_S2: Tensor  # int32, strided

    def at(self, slot_M: Tensor) -> Knobs:
        return Knobs(*(table_S.index_select(0, slot_M) for table_S in self[:4]))

    def noise(self, slot_M: Tensor, position_M: Tensor, domain: int) -> Noise:
        seed_M2 = self.seed_S2.index_select(0, slot_M)
        return Noise(seed_M2, position_M, torch.full_like(position_M, domain))


def greedy(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The best token of each row (int32, ties to the lowest id), and whether the row is unusable.

    A row is unusable when it holds NaN or +inf, or when nothing in it is allowed; its token is
    still a valid id.
    """
    # A row with a NaN has its argmax there. numpy's argmax is vectorised, torch's is not.
    array_NV = logits_NV.float().numpy()
    index_N = array_NV.argmax(-1)
    bad_N = ~np.isfinite(array_NV[np.arange(len(index_N)), index_N])
    return torch.from_numpy(index_N.astype(np.int32)), torch.from_numpy(bad_N)


def draw(
    logits_NV: Tensor, windows: WindowRows, knobs: SlotKnobs, ok_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each logits row's token (int32) and whether the row is unusable.

    argmax(logit / T - log E) over the tokens that min_p, top_k and top_p leave; greedy rows take
    their argmax. `ok_N` says which drafts are accepted; None: those that equal their row's token.
    A row that its window cannot reach, or whose draft is accepted, may come back as -1.
    """
    rows = windows.logit_rows
    noise = knobs.noise(rows.slot_M, rows.position_M, rng.SAMPLE)
    logits_MV = logits_NV.index_select(0, rows.row_M).float()
    token_M, bad_M = draw_rows(logits_MV, knobs.at(rows.slot_M), noise)
    num_logits = len(logits_NV)
    return rows.spread(token_M, num_logits), rows.spread(bad_M, num_logits)


def draw_rows(logits_MV: Tensor, knobs: Knobs, noise: Noise) -> tuple[Tensor, Tensor]:
    """`draw` of given rows, each with its own knobs and noise."""
    best_M, bad_M = greedy(logits_MV)
    scaled_MV = scale(logits_MV, knobs.temperature_M)
    kept_MV = scaled_MV >= thresholds(scaled_MV, knobs)[:, None]
    noise_MV = rng.exponential(*noise, logits_MV.shape[1]).log()
    score_MV = (scaled_MV - noise_MV).masked_fill(~kept_MV, -torch.inf)
    drawn_M = score_MV.argmax(-1).to(torch.int32)
    return torch.where((knobs.temperature_M > 0) & ~bad_M, drawn_M, best_M), bad_M


def draft(
    logits_BV: Tensor,
    slot_B: Tensor,
    position_B: Tensor,
    knobs: SlotKnobs,
    prob_SKV: Tensor,
    j: int,
) -> Tensor:
    """Draft j of each row (int32), at `position_B`; what it was drawn from is in prob_SKV[slot, j].

    A broken row proposes its argmax for certain: verification needs its q to say so. Greedy rows
    leave their distribution unwritten: it is not read.
    """
    slot_B, logits_BV = slot_B.to(torch.int64), logits_BV.float()
    knobs_B = knobs.at(slot_B)
    start_B = position_B.to(torch.int32) - j
    noise = knobs.noise(slot_B, start_B, rng.DRAFT + j * rng.PER_DRAFT)
    drawn = draw_rows(logits_BV, knobs_B, noise)
    keep_distributions(prob_SKV[:, j], slot_B, drawn, logits_BV, knobs_B, distributions)
    return drawn[0]


def keep_distributions(
    prob_SV: Tensor,
    slot_B: Tensor,
    drawn: tuple[Tensor, Tensor],
    logits_BV: Tensor,
    knobs: Knobs,
    distributions: Callable[[Tensor, Knobs], Tensor],
) -> None:
    """Write what the drafts of rows with a temperature were drawn from."""
    row_D = (knobs.temperature_M > 0).nonzero()[:, 0]
    token_D1, bad_D1 = (t[row_D][:, None] for t in drawn)
    usable_DV = logits_BV[row_D].masked_fill(bad_D1, 0.0)
    prob_DV = distributions(usable_DV, Knobs(*(knob_B[row_D] for knob_B in knobs)))
    vocab_size = logits_BV.shape[1]
    is_token_DV = torch.arange(vocab_size) == token_D1
    prob_SV[slot_B[row_D], :vocab_size] = torch.where(bad_D1, is_token_DV.float(), prob_DV)


def distributions(logits_NV: Tensor, knobs: Knobs) -> Tensor:
    """float32 [N, V]: what `draw` draws from. Greedy rows are treated as temperature 1."""
    scaled_NV = scale(logits_NV, knobs.temperature_M)
    threshold_N = thresholds(scaled_NV, knobs)
    return scaled_NV.masked_fill(scaled_NV < threshold_N[:, None], -torch.inf).softmax(-1)


def scale(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    return logits_NV / torch.where(temperature_N > 0, temperature_N, 1.0)[:, None]


def thresholds(scaled_NV: Tensor, knobs: Knobs) -> Tensor:
    """float32 [N]: the tokens at or above it are those that min_p, top_k and top_p keep, in order.

    top_k keeps ties of the k-th value; top_p keeps the fewest tokens whose share of what min_p
    and top_k left is at least top_p, and ties of the last one.
    By bisection over the ordered bit patterns of float32: no sort.
    """
    best_N = scaled_NV.amax(-1)
    vocab_size = scaled_NV.shape[1]
    ones_NV = torch.ones_like(scaled_NV)
    weight_NV = (scaled_NV - best_N[:, None]).exp()
    # A threshold must never pass the best token, whatever rounding did.
    low_N = torch.minimum(best_N + torch.log(knobs.min_p_M), best_N)
    limited_N = (knobs.top_k_M > 0) & (knobs.top_k_M < vocab_size)
    wanted_N = torch.where(limited_N, knobs.top_k_M, vocab_size).to(torch.float32)
    low_N = torch.maximum(low_N, _highest_covering(scaled_NV, ones_NV, wanted_N))
    weight_NV = weight_NV.masked_fill(scaled_NV < low_N[:, None], 0.0)
    wanted_N = knobs.top_p_M * weight_NV.sum(-1)
    covering_N = torch.maximum(low_N, _highest_covering(scaled_NV, weight_NV, wanted_N))
    return torch.where(knobs.top_p_M < 1, covering_N, low_N)


def _highest_covering(value_NV: Tensor, weight_NV: Tensor, wanted_N: Tensor) -> Tensor:
    """The highest t such that the weights of values >= t sum to at least `wanted_N`."""
    key_NV = _ordered_bits(value_NV)
    low_N = torch.full_like(wanted_N, -(2**31), dtype=torch.int64)
    high_N = torch.full_like(low_N, 2**31 - 1)
    for _ in range(32):
        middle_N = (low_N + high_N + 1) >> 1
        mass_N = weight_NV.masked_fill(key_NV < middle_N[:, None], 0.0).sum(-1)
        covers_N = mass_N >= wanted_N
        low_N = torch.where(covers_N, middle_N, low_N)
        high_N = torch.where(covers_N, high_N, middle_N - 1)
    bits_N = low_N.to(torch.int32)
    value_N = (bits_N ^ ((bits_N >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return torch.where(low_N == -(2**31), -torch.inf, value_N)  # nothing covers: keep all


def _ordered_bits(value: Tensor) -> Tensor:
    # + 0.0 folds -0.0 into 0.0: they are equal, so their keys must be.
    bits = (value + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
