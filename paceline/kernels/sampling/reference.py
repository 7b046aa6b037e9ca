"""From logits rows to tokens: argmax, thresholds, draws and distributions.

Never writes slot state but for the distributions of drafts. On CPU each row is handled alone, so
that its bits depend on nothing else in the batch. Shape letters: B rows, N logits rows, M some of
them, S slots, K drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.kernels.rng import numpy as np_rng
from paceline.kernels.rng import reference as rng
from paceline.kernels.rows import LogitRows, WindowRows

Singles = npt.NDArray[np.float32]

# What is known of a row's draft before the row is drawn.
BY_EQUALITY, REJECTED, ACCEPTED = -1, 0, 1
# Chunks per row when looking for the largest values: see `_at_least_k`.
_CHUNK = 64
_FIRST_CANDIDATES = 128
# More than the logarithm's rounding at any logit that matters.
_SLACK = np.float32(1e-3)


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
    row_M, slot_M, offset_M, length_M, draft_MK, _ = windows.logit_arrays
    own_draft_M = np.full(len(row_M), -1, np.int64)
    has_draft_M = offset_M < draft_MK.shape[1]
    own_draft_M[has_draft_M] = draft_MK[has_draft_M, offset_M[has_draft_M]]
    verdict_M = np.full(len(row_M), BY_EQUALITY) if ok_N is None else ok_N.numpy()[row_M]
    position_M = (length_M + offset_M).astype(np.int32)
    seed_M2, domain_M = knobs.seed_S2.numpy()[slot_M], np.full_like(position_M, rng.SAMPLE)
    columns = [row_M, own_draft_M, offset_M, verdict_M]
    columns += [table_S.numpy()[slot_M] for table_S in knobs[:4]]
    drawn = _draw_in_order(logits_NV, np_rng.stream_keys(seed_M2, position_M, domain_M), columns)
    token_N, bad_N = np.zeros(len(logits_NV), np.int32), np.zeros(len(logits_NV), np.bool_)
    token_N[row_M], bad_N[row_M] = drawn
    return torch.from_numpy(token_N), torch.from_numpy(bad_N)


def draw_windows(
    logits_NV: Tensor, rows: LogitRows, knobs: Knobs, noise: Noise, verdict_M: Tensor
) -> tuple[Tensor, Tensor]:
    """`draw` of given rows, each with its own knobs and noise."""
    known = (rows.row_M, rows.own_draft_M, rows.offset_M, verdict_M)
    key_M2 = np_rng.stream_keys(*(t.numpy() for t in noise))
    drawn = _draw_in_order(logits_NV, key_M2, [t.numpy() for t in (*known, *knobs)])
    return torch.from_numpy(drawn[0]), torch.from_numpy(drawn[1])


def _draw_in_order(
    logits_NV: Tensor, key_M2: np_rng.Words, columns: Sequence[npt.NDArray[Any]]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """A window's rows in order, and none after its first rejection."""
    array_NV = logits_NV.float().numpy()
    token_M = np.full(len(key_M2), -1, np.int32)
    bad_M = np.zeros(len(key_M2), np.bool_)
    is_reached = False
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for m, (row, draft, offset, verdict, *knob) in enumerate(rows):
        is_reached = is_reached or offset == 0
        if not is_reached or verdict == ACCEPTED:
            continue
        token_M[m], bad_M[m] = _draw_row(array_NV[row], knob, key_M2[m])
        is_equal = draft >= 0 and token_M[m] == draft and not bad_M[m]
        is_reached = verdict == BY_EQUALITY and is_equal
    return token_M, bad_M


def draw_reference(
    logits_NV: Tensor, windows: WindowRows, knobs: SlotKnobs, ok_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`draw` of every row of a window, in a few tensor operations: what the twins must equal."""
    rows = windows.logit_rows
    noise = knobs.noise(rows.slot_M, rows.position_M, rng.SAMPLE)
    logits_MV = logits_NV.index_select(0, rows.row_M).float()
    token_M, bad_M = draw_rows_reference(logits_MV, knobs.at(rows.slot_M), noise)
    num_logits = len(logits_NV)
    return rows.spread(token_M, num_logits), rows.spread(bad_M, num_logits)


def draw_rows_reference(logits_MV: Tensor, knobs: Knobs, noise: Noise) -> tuple[Tensor, Tensor]:
    best_M, bad_M = greedy(logits_MV)
    scaled_MV = scale(logits_MV, knobs.temperature_M)
    kept_MV = scaled_MV >= thresholds_reference(scaled_MV, knobs)[:, None]
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
    """One draft per row (int32), and what it was drawn from in prob_SKV[slot, j].

    A broken row proposes its argmax for certain: verification needs its q to say so. Greedy rows
    leave their distribution unwritten: it is not read.
    """
    slot_B, position_B = slot_B.to(torch.int64), position_B.to(torch.int32)
    logits_BV = logits_BV.float()
    none_B0 = torch.empty((len(slot_B), 0), dtype=torch.int32)
    row_B = torch.arange(len(slot_B))
    rows = LogitRows(row_B, slot_B, torch.zeros_like(slot_B), position_B, none_B0, row_B)
    knobs_B = knobs.at(slot_B)
    noise = knobs.noise(slot_B, position_B, rng.DRAFT)
    by_equality_B = torch.full_like(slot_B, BY_EQUALITY, dtype=torch.int8)
    token_B, bad_B = draw_windows(logits_BV, rows, knobs_B, noise, by_equality_B)
    row_D = (knobs_B.temperature_M > 0).nonzero()[:, 0]
    bad_D1, vocab_size = bad_B[row_D][:, None], logits_BV.shape[1]
    usable_DV = logits_BV[row_D].masked_fill(bad_D1, 0.0)
    prob_DV = distributions(usable_DV, Knobs(*(knob_B[row_D] for knob_B in knobs_B)))
    is_token_DV = torch.arange(vocab_size) == token_B[row_D][:, None]
    prob_SKV[slot_B[row_D], j, :vocab_size] = torch.where(bad_D1, is_token_DV.float(), prob_DV)
    return token_B


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
    """
    rows = zip(scaled_NV.numpy(), *(t.tolist() for t in knobs[1:]), strict=True)
    # Looks at a few candidates instead of bisecting.
    return torch.tensor([_threshold_row(row, *knob) for row, *knob in rows], dtype=torch.float32)


def thresholds_reference(scaled_NV: Tensor, knobs: Knobs) -> Tensor:
    """`thresholds` by bisection over the ordered bit patterns of float32: no sort."""
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


# One row at a time, through numpy.


def _draw_row(row_V: Singles, knob: list[Any], key_2: np_rng.Words) -> tuple[int, bool]:
    temperature, top_k, top_p, min_p = knob
    best = int(row_V.argmax())
    if not np.isfinite(row_V[best]):
        return best, True
    if temperature == 0:
        return best, False
    if temperature != 1:
        row_V = row_V / np.float32(temperature)
    threshold = _threshold_row(row_V, top_k, top_p, min_p)
    words_V = np_rng.token_words(len(row_V))
    if threshold == -np.inf:
        return _draw_any(row_V, words_V, key_2), False
    ids = np.flatnonzero(row_V >= threshold)
    return int(ids[_draw_any(row_V[ids], words_V[ids], key_2)]), False


def _draw_any(value: Singles, words: np_rng.Words, key_2: np_rng.Words) -> int:
    """argmax(logit - log E), but E only for a few: E >= u, so logit - log u bounds the score."""
    unit = np_rng.unit_interval(np_rng.hash_words(key_2[0], key_2[1], words))
    bound = np.log(unit)
    np.subtract(value, bound, out=bound)
    first = bound.argmax()
    reached = _exact_scores(value[[first]], unit[[first]])[0] - _SLACK
    ids = np.flatnonzero(bound >= reached)
    return int(ids[_exact_scores(value[ids], unit[ids]).argmax()])


def _exact_scores(value: Singles, unit: Singles) -> Singles:
    scores: Singles = value - np.log(-np.log1p(-unit))
    return scores


def _threshold_row(row_V: Singles, top_k: int, top_p: float, min_p: float) -> float:
    if min_p <= 0 and top_p >= 1 and not 0 < top_k < len(row_V):
        return -np.inf
    best = row_V.max()
    if not np.isfinite(best):  # unusable: the draw reports it
        return -np.inf
    threshold = np.float32(-np.inf)
    if min_p > 0:
        threshold = min(best + np.float32(log(min_p)), best)
    if 0 < top_k < len(row_V):
        threshold = max(threshold, np.partition(_at_least_k(row_V, top_k), -top_k)[-top_k])
    if top_p >= 1:
        return float(threshold)
    if threshold > -np.inf:
        return _covering(row_V[row_V >= threshold], best, top_p, None)
    total = float(np.exp(row_V - best).sum())
    count = _FIRST_CANDIDATES
    while count < len(row_V):
        found = _covering(_at_least_k(row_V, count), best, top_p, total)
        if found > -np.inf:
            return found
        count *= 8
    return _covering(row_V, best, top_p, None)


def _covering(values: Singles, best: np.float32, top_p: float, total: float | None) -> float:
    """The value that completes top_p of `total` (of all values if None); -inf: they are too few."""
    values = np.sort(values)[::-1]
    mass = np.exp(values - best).cumsum(dtype=np.float64)
    index = int(np.searchsorted(mass, top_p * (mass[-1] if total is None else total)))
    if index < len(values):
        return float(values[index])
    return float(values[-1]) if total is None else -np.inf


def _at_least_k(row_V: Singles, k: int) -> Singles:
    """A few values of the row, the k largest among them, in any order."""
    num_chunks = len(row_V) // _CHUNK
    if 4 * k > num_chunks:
        largest: Singles = np.partition(row_V, -k)[-k:]
        return largest
    # k chunks reach the k-th largest chunk maximum, so at least k values do.
    maxima = row_V[: num_chunks * _CHUNK].reshape(_CHUNK, num_chunks).max(0)
    some: Singles = row_V[row_V >= np.partition(maxima, -k)[-k]]
    return some
