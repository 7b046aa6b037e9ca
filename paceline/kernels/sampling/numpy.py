"""Draws and thresholds on the CPU: rows one at a time through numpy, with early exits.

A row's bits depend on nothing else in the batch. A window's rows after its first rejection are not
drawn; a threshold comes from a few candidates instead of a bisection; noise is computed only for
tokens that may win.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.kernels.rng import numpy as np_rng
from paceline.kernels.rng import reference as rng
from paceline.kernels.rows import LogitRows, WindowRows
from paceline.kernels.sampling.reference import (
    Knobs,
    Noise,
    SlotKnobs,
    keep_distributions,
    scale,
)

Singles = npt.NDArray[np.float32]

# What is known of a row's draft before the row is drawn.
BY_EQUALITY, REJECTED, ACCEPTED = -1, 0, 1
# Chunks per row when looking for the largest values: see `_at_least_k`.
_CHUNK = 64
_FIRST_CANDIDATES = 128
# More than the logarithm's rounding at any logit that matters.
_SLACK = np.float32(1e-3)


def draw(
    logits_NV: Tensor, windows: WindowRows, knobs: SlotKnobs, ok_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
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


def draft(
    logits_BV: Tensor,
    slot_B: Tensor,
    position_B: Tensor,
    knobs: SlotKnobs,
    prob_SKV: Tensor,
    j: int,
) -> Tensor:
    slot_B, position_B = slot_B.to(torch.int64), position_B.to(torch.int32)
    logits_BV = logits_BV.float()
    none_B0 = torch.empty((len(slot_B), 0), dtype=torch.int32)
    row_B = torch.arange(len(slot_B))
    rows = LogitRows(row_B, slot_B, torch.zeros_like(slot_B), position_B, none_B0, row_B)
    knobs_B = knobs.at(slot_B)
    noise = knobs.noise(slot_B, position_B - j, rng.DRAFT + j * rng.PER_DRAFT)
    by_equality_B = torch.full_like(slot_B, BY_EQUALITY, dtype=torch.int8)
    drawn = draw_windows(logits_BV, rows, knobs_B, noise, by_equality_B)
    keep_distributions(prob_SKV[:, j], slot_B, drawn, logits_BV, knobs_B, distributions)
    return drawn[0]


def distributions(logits_NV: Tensor, knobs: Knobs) -> Tensor:
    scaled_NV = scale(logits_NV, knobs.temperature_M)
    threshold_N = thresholds(scaled_NV, knobs)
    return scaled_NV.masked_fill(scaled_NV < threshold_N[:, None], -torch.inf).softmax(-1)


def thresholds(scaled_NV: Tensor, knobs: Knobs) -> Tensor:
    rows = zip(scaled_NV.numpy(), *(t.tolist() for t in knobs[1:]), strict=True)
    return torch.tensor([_threshold_row(row, *knob) for row, *knob in rows], dtype=torch.float32)


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
