"""From logits rows to tokens: argmax, thresholds, draws and distributions.

Never writes slot state but for the distributions of drafts. On CPU each row is handled alone, so
that its bits depend on nothing else in the batch. Shape letters: B rows, N logits rows, S slots,
K drafts, V vocabulary.
"""

from __future__ import annotations

from math import log
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.kernels import rng
from paceline.kernels.rows import WindowRows

Singles = npt.NDArray[np.float32]

# Chunks per row when looking for the largest values: see `_at_least_k`.
_CHUNK = 64
_FIRST_CANDIDATES = 128
# More than the logarithm's rounding at any logit that matters.
_SLACK = np.float32(1e-3)


class Knobs(NamedTuple):
    """How each row is turned into a distribution."""

    temperature_N: Tensor  # float32, 0 = greedy
    top_k_N: Tensor  # int32, 0 = off
    top_p_N: Tensor  # float32, 1 = off
    min_p_N: Tensor  # float32, 0 = off


class Noise(NamedTuple):
    """Which noise each row draws with."""

    seed_N2: Tensor  # int32
    position_N: Tensor  # int32
    domain_N: Tensor  # int32


class Drafts(NamedTuple):
    """What is already known of each row's draft, so that a draw nobody needs can be left out."""

    draft_N: Tensor  # int32, -1 = none
    offset_N: Tensor  # int64: position in the window; 0 begins one
    verdict_N: Tensor  # int8: 1 accepted, 0 rejected, -1 accepted if equal to the row's draw


class SlotKnobs(NamedTuple):
    """How the rows of each slot are drawn: what kernels at fixed shapes look up for themselves."""

    temperature_S: Tensor  # float32, 0 = greedy
    top_k_S: Tensor  # int32, 0 = off
    top_p_S: Tensor  # float32, 1 = off
    min_p_S: Tensor  # float32, 0 = off
    seed_S2: Tensor  # int32, strided

    def at(self, slot_N: Tensor) -> Knobs:
        return Knobs(*(table_S[slot_N] for table_S in self[:4]))


def greedy(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The best token of each row (int32, ties to the lowest id), and whether the row is unusable.

    A row is unusable when it holds NaN or +inf, or when nothing in it is allowed; its token is
    still a valid id.
    """
    # A row with a NaN has its argmax there, in numpy as in torch.
    if logits_NV.is_cpu:
        # CPU-only shortcut: numpy's argmax is vectorised, torch's is ten times slower.
        array_NV = logits_NV.numpy()
        index_N = array_NV.argmax(-1)
        bad_N = ~np.isfinite(array_NV[np.arange(len(index_N)), index_N])
        return torch.from_numpy(index_N.astype(np.int32)), torch.from_numpy(bad_N)
    token_N = logits_NV.argmax(-1)
    best_N = logits_NV.gather(1, token_N[:, None])[:, 0]
    return token_N.to(torch.int32), ~torch.isfinite(best_N)


def draw_windows(
    logits_NV: Tensor, knobs: Knobs, noise: Noise, drafts: Drafts
) -> tuple[Tensor, Tensor]:
    """Each row's token (int32) and whether the row is unusable.

    argmax(logit / T - log E) over the tokens that min_p, top_k and top_p leave; greedy rows take
    their argmax. A row whose verdict cannot matter may come back as -1.
    """
    if not logits_NV.is_cpu:
        return draw_windows_reference(logits_NV, knobs, noise)
    # CPU-only shortcut: a window's rows are drawn in order, and none after the first rejection.
    array_NV = logits_NV.numpy()
    key_N2 = rng.stream_keys_array(*(t.numpy() for t in noise))
    rows = zip(*(t.tolist() for t in (*drafts, *knobs)), strict=True)
    token_N = np.full(len(array_NV), -1, np.int32)
    bad_N = np.zeros(len(array_NV), np.bool_)
    alive = False
    for n, (draft, offset, verdict, *knob) in enumerate(rows):
        alive = alive or offset == 0
        if not alive or verdict == 1:
            continue
        token_N[n], bad_N[n] = _draw_row(array_NV[n], knob, key_N2[n])
        alive = verdict == -1 and draft >= 0 and token_N[n] == draft and not bad_N[n]
    return torch.from_numpy(token_N), torch.from_numpy(bad_N)


def draw_windows_reference(logits_NV: Tensor, knobs: Knobs, noise: Noise) -> tuple[Tensor, Tensor]:
    """`draw_windows` in torch operations on any device, for every row."""
    best_N, bad_N = greedy(logits_NV)
    scaled_NV = scale(logits_NV, knobs.temperature_N)
    kept_NV = scaled_NV >= thresholds_reference(scaled_NV, knobs)[:, None]
    noise_NV = rng.exponential(*noise, logits_NV.shape[1]).log()
    score_NV = (scaled_NV - noise_NV).masked_fill(~kept_NV, -torch.inf)
    drawn_N = score_NV.argmax(-1).to(torch.int32)
    return torch.where((knobs.temperature_N > 0) & ~bad_N, drawn_N, best_N), bad_N


def draw(logits_NV: Tensor, rows: WindowRows, knobs: SlotKnobs) -> tuple[Tensor, Tensor]:
    """`draw_windows` at fixed shapes: every window position is drawn, whatever became of earlier.

    Rows that nobody looks at give token 0. Any float type; the arithmetic is float32.
    """
    at = rows.logit_rows()
    position_N = (at.length_N + at.offset_N).to(torch.int32)
    noise = Noise(knobs.seed_S2[at.slot_N], position_N, torch.full_like(position_N, rng.SAMPLE))
    token_N, bad_N = draw_windows_reference(logits_NV.float(), knobs.at(at.slot_N), noise)
    used_N = rows.used_N()
    return torch.where(used_N, token_N, 0), bad_N & used_N


def draft(
    logits_BV: Tensor,
    slot_B: Tensor,
    position_B: Tensor,
    knobs: SlotKnobs,
    prob_SKV: Tensor,
    j: int,
) -> Tensor:
    """One draft per row (int32), and what it was drawn from in prob_SKV[slot, j].

    A broken row proposes its argmax for certain. Greedy rows leave their distribution unwritten:
    nobody reads it.
    """
    slot_B = slot_B.to(torch.int64)
    knobs_B = knobs.at(slot_B)
    position_B = position_B.to(torch.int32)
    noise = Noise(knobs.seed_S2[slot_B], position_B, torch.full_like(position_B, rng.DRAFT))
    logits_BV = logits_BV.float()
    token_B, bad_B1 = draw_windows_reference(logits_BV, knobs_B, noise)
    bad_B1 = bad_B1[:, None]
    place_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
    prob_BV = distributions(logits_BV.masked_fill(bad_B1, 0.0), knobs_B)
    prob_BV = torch.where(bad_B1, (place_V == token_B[:, None]).to(torch.float32), prob_BV)
    old_BV = prob_SKV[slot_B, j, : logits_BV.shape[1]]
    is_drawn_B1 = knobs_B.temperature_N[:, None] > 0
    prob_SKV[slot_B, j, : logits_BV.shape[1]] = torch.where(is_drawn_B1, prob_BV, old_BV)
    return token_B


def distributions(logits_NV: Tensor, knobs: Knobs) -> Tensor:
    """float32 [N, V]: what `draw_windows` draws from. Greedy rows are treated as temperature 1."""
    scaled_NV = scale(logits_NV, knobs.temperature_N)
    threshold_N = thresholds(scaled_NV, knobs)
    return scaled_NV.masked_fill(scaled_NV < threshold_N[:, None], -torch.inf).softmax(-1)


def scale(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    return logits_NV / torch.where(temperature_N > 0, temperature_N, 1.0)[:, None]


def thresholds(scaled_NV: Tensor, knobs: Knobs) -> Tensor:
    """float32 [N]: the tokens at or above it are those that min_p, top_k and top_p keep, in order.

    top_k keeps ties of the k-th value; top_p keeps the fewest tokens whose share of what min_p
    and top_k left is at least top_p, and ties of the last one.
    """
    if not scaled_NV.is_cpu:
        return thresholds_reference(scaled_NV, knobs)
    rows = zip(scaled_NV.numpy(), *(t.tolist() for t in knobs[1:]), strict=True)
    # CPU-only shortcut: looks at a few candidates instead of bisecting.
    return torch.tensor([_threshold_row(row, *knob) for row, *knob in rows], dtype=torch.float32)


def thresholds_reference(scaled_NV: Tensor, knobs: Knobs) -> Tensor:
    """`thresholds` by bisection over the ordered bit patterns of float32: no sort, no host read."""
    best_N = scaled_NV.amax(-1)
    vocab_size = scaled_NV.shape[1]
    ones_NV = torch.ones_like(scaled_NV)
    weight_NV = (scaled_NV - best_N[:, None]).exp()
    # A threshold must never pass the best token, whatever rounding did.
    low_N = torch.minimum(best_N + torch.log(knobs.min_p_N), best_N)
    limited_N = (knobs.top_k_N > 0) & (knobs.top_k_N < vocab_size)
    wanted_N = torch.where(limited_N, knobs.top_k_N, vocab_size).to(torch.float32)
    low_N = torch.maximum(low_N, _highest_covering(scaled_NV, ones_NV, wanted_N))
    weight_NV = weight_NV.masked_fill(scaled_NV < low_N[:, None], 0.0)
    wanted_N = knobs.top_p_N * weight_NV.sum(-1)
    covering_N = torch.maximum(low_N, _highest_covering(scaled_NV, weight_NV, wanted_N))
    return torch.where(knobs.top_p_N < 1, covering_N, low_N)


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


# CPU-only shortcuts below: one row at a time, through numpy.


def _draw_row(row_V: Singles, knob: list[Any], key_2: rng.Words) -> tuple[int, bool]:
    temperature, top_k, top_p, min_p = knob
    best = int(row_V.argmax())
    if not np.isfinite(row_V[best]):
        return best, True
    if temperature == 0:
        return best, False
    if temperature != 1:
        row_V = row_V / np.float32(temperature)
    threshold = _threshold_row(row_V, top_k, top_p, min_p)
    words_V = rng.token_words(len(row_V))
    if threshold == -np.inf:
        return _draw_any(row_V, words_V, key_2), False
    ids = np.flatnonzero(row_V >= threshold)
    return int(ids[_draw_any(row_V[ids], words_V[ids], key_2)]), False


def _draw_any(value: Singles, words: rng.Words, key_2: rng.Words) -> int:
    """argmax(logit - log E), but E only for a few: E >= u, so logit - log u bounds the score."""
    unit = rng.unit_interval_array(rng.hash_words_array(key_2[0], key_2[1], words))
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
    if not np.isfinite(best):  # unusable, which is somebody else's to report
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
