"""Draws and thresholds: the CPU shortcuts agree with the tensor reference, and both with theory."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from paceline.kernels.processors.reference import forbid
from paceline.kernels.rng import reference as rng
from paceline.kernels.rows import LogitRows
from paceline.kernels.sampling import reference
from paceline.kernels.sampling.numpy import BY_EQUALITY, distributions, draw_windows, thresholds
from paceline.kernels.sampling.reference import Knobs, Noise, greedy
from tests.kernels.cases.pairs import TritonCase, all_triton_cases, check


def knobs_of(rows: list[tuple[float, int, float, float]]) -> Knobs:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return Knobs(
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p, dtype=torch.float32),
        torch.tensor(min_p, dtype=torch.float32),
    )


def noise_of(count: int, seed: int = 3) -> Noise:
    return Noise(
        torch.tensor([[seed, 0]], dtype=torch.int32).repeat(count, 1),
        torch.arange(count, dtype=torch.int32),
        torch.full((count,), rng.SAMPLE, dtype=torch.int32),
    )


def drawn(
    logits: Tensor,
    knobs: Knobs,
    noise: Noise,
    *,
    offset: list[int] | None = None,
    draft: list[list[int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Windows of one row each, without drafts, unless they are given."""
    row, count = torch.arange(len(logits)), len(logits)
    rows = LogitRows(
        row_M=row,
        slot_M=row,
        offset_M=torch.zeros_like(row) if offset is None else torch.tensor(offset),
        length_M=torch.zeros(count, dtype=torch.int32),
        draft_MK=torch.tensor(draft or [[]] * count, dtype=torch.int32).reshape(count, -1),
        owner_M=row,
    )
    verdict = torch.full((count,), BY_EQUALITY, dtype=torch.int8)
    return draw_windows(logits, rows, knobs, noise, verdict)


def kept_by_sorting(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, on a full sort in float64."""
    row = row.astype(np.float64)
    weight = np.exp(row - row.max())
    kept = np.ones(len(row), bool)
    if min_p > 0:
        kept &= weight >= min_p * (1 - 1e-6)
    if 0 < top_k < len(row):
        kept &= row >= np.sort(row)[-top_k]
    if top_p < 1:
        weight = np.where(kept, weight, 0)
        order = np.argsort(-row, kind="stable")
        mass = np.cumsum(weight[order])
        last = order[np.searchsorted(mass, top_p * mass[-1] * (1 - 1e-6))]
        kept &= row >= row[last]
    return set(np.flatnonzero(kept).tolist())


KNOB = st.tuples(
    st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    st.sampled_from([0, 1, 2, 5, 40, 1000]),
    st.sampled_from([0.05, 0.5, 0.9, 0.995, 1.0]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(KNOB, min_size=1, max_size=6), st.integers(2, 3000), st.integers(0, 2**32 - 1))
def test_thresholds_keep_what_sorting_keeps(
    rows: list[tuple[float, int, float, float]], vocab_size: int, seed: int
) -> None:
    logits = torch.from_numpy(
        np.random.default_rng(seed).normal(0, 3, (len(rows), vocab_size)).astype(np.float32)
    )
    knobs = knobs_of(rows)
    for found in (thresholds(logits, knobs), reference.thresholds(logits, knobs)):
        for row, knob, threshold in zip(logits.numpy(), rows, found.numpy(), strict=True):
            kept = set(np.flatnonzero(row >= threshold).tolist())
            assert_kept(row, kept, knob[1:])


def assert_kept(row: np.ndarray[Any, Any], kept: set[int], knob: tuple[int, float, float]) -> None:
    """What sorting keeps; one token more or less only where the sum of the rest equals top_p."""
    wanted = kept_by_sorting(row, *knob)
    if kept == wanted:
        return
    top_k, top_p, min_p = knob
    fewer, more = sorted((kept, wanted), key=len)
    assert fewer < more
    assert len(more) == len(fewer) + 1
    weight = np.exp(row.astype(np.float64) - row.max())
    total = weight[sorted(kept_by_sorting(row, top_k, 1.0, min_p))].sum()
    assert abs(weight[sorted(fewer)].sum() / total - top_p) < 2e-6


@settings(max_examples=40, deadline=None)
@given(st.lists(KNOB, min_size=1, max_size=5), st.integers(2, 600), st.integers(0, 2**31 - 1))
def test_shortcut_draws_what_the_reference_draws(
    rows: list[tuple[float, int, float, float]], vocab_size: int, seed: int
) -> None:
    rows = [*rows, (0.0, 0, 1.0, 0.0)] * 8
    normal = np.random.default_rng(seed).normal(0, 3, (len(rows), vocab_size))
    logits = torch.from_numpy(normal.astype(np.float32))
    logits[:, vocab_size // 2] = -torch.inf
    knobs, noise = knobs_of(rows), noise_of(len(rows), seed)
    token, bad = drawn(logits, knobs, noise)
    expected, expected_bad = reference.draw_rows(logits, knobs, noise)
    assert torch.equal(token, expected)
    assert torch.equal(bad, expected_bad)


def chi_square(token: Tensor, probability: Tensor) -> float:
    expected = probability.double().numpy() * len(token)
    counts = np.bincount(token.numpy(), minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    used = expected > 0
    scaled = expected[used] * counts.sum() / expected.sum()
    return float(stats.chisquare(counts[used], scaled).pvalue)


@pytest.mark.parametrize(
    "knob",
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (1.0, 4, 1.0, 0.0),
        (1.3, 0, 0.8, 0.0),
        (1.0, 6, 0.9, 0.05),
    ],
)
def test_draws_follow_the_distribution(knob: tuple[float, int, float, float]) -> None:
    count = 30_000
    row = torch.linspace(-2, 1.5, 12)[
        torch.randperm(12, generator=torch.Generator().manual_seed(1))
    ]
    logits = row.expand(count, 12)
    knobs = knobs_of([knob])
    token, _ = drawn(logits, Knobs(*(t.expand(count) for t in knobs)), noise_of(count))
    assert chi_square(token, distributions(row[None], knobs)[0]) > 1e-4


@pytest.mark.trap("E6")
def test_tokens_with_a_chance_of_one_in_a_hundred_thousand_come_that_often() -> None:
    rare = torch.tensor([1e-5, 2e-5, 5e-5, 1e-4])
    probability = torch.cat((torch.tensor([1 - float(rare.sum())]), rare))
    count, rounds = 500_000, 4
    counts = np.zeros(5)
    for seed in range(rounds):
        noise = noise_of(count, seed)
        # Only rows in which a rare token can win are drawn: elsewhere the first would have to meet
        # noise above 10, once in 20,000 times.
        is_open = (rng.exponential(*noise, 5)[:, 1:] < 1e-3).any(1)
        num_open = int(is_open.sum())
        token, _ = drawn(
            probability.log().expand(num_open, 5),
            knobs_of([(1.0, 0, 1.0, 0.0)] * num_open),
            Noise(*(t[is_open] for t in noise)),
        )
        counts += np.bincount(token.numpy(), minlength=5)
        counts[0] += count - num_open
    expected = probability.double().numpy()
    expected *= counts.sum() / expected.sum()
    assert stats.chisquare(counts, expected).pvalue > 1e-4


def test_shortcut_follows_the_distribution_of_a_large_vocabulary() -> None:
    # One likely token and a flat tail of half the mass: a tail that lost precision would show.
    count, vocab_size = 1500, 20_000
    row = torch.zeros(vocab_size)
    row[123] = float(np.log(vocab_size - 1))
    logits = row.repeat(50, 1)
    found = []
    knobs = Knobs(*(t.expand(50) for t in knobs_of([(1.0, 0, 1.0, 0.0)])))
    for seed in range(count // 50):
        found.append(drawn(logits, knobs, noise_of(50, seed))[0])
    token = torch.cat(found)
    share = float((token == 123).float().mean())
    assert abs(share - 0.5) < 4 * (0.25 / count) ** 0.5
    tail = token[token != 123]
    assert len(tail.unique()) > 0.97 * len(tail)
    assert stats.kstest(tail.numpy() / vocab_size, "uniform").pvalue > 1e-4


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 100)
    logits[1, [7, 50]] = 2.0
    logits[2, 99] = 1.0
    assert greedy(logits)[0].tolist() == [0, 7, 99]


def test_rows_after_a_rejection_are_not_drawn_and_a_window_begins_anew() -> None:
    logits = torch.zeros(6, 8)
    logits[torch.arange(6), torch.tensor([1, 2, 3, 4, 5, 6])] = 5.0
    knobs = knobs_of([(0.0, 0, 1.0, 0.0)] * 6)
    draft = [[1, 7]] * 3 + [[4, 5]] * 3
    token, _ = drawn(logits, knobs, noise_of(6), offset=[0, 1, 2] * 2, draft=draft)
    assert token.tolist() == [1, 2, -1, 4, 5, 6]


@pytest.mark.trap("E7")
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_row_is_reported_with_a_valid_token(poison: float, temperature: float) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    knobs, noise = knobs_of([(temperature, 5, 0.9, 0.1)] * 4), noise_of(4)
    clean, _ = drawn(logits, knobs, noise)
    logits[1, 20] = poison
    logits[2] = -torch.inf
    for draw in (
        drawn(logits, knobs, noise),
        reference.draw_rows(logits, knobs, noise),
    ):
        token, bad = draw
        assert bad.tolist() == [False, True, True, False]
        assert ((token >= 0) & (token < 50)).all()
        assert token[[0, 3]].tolist() == clean[[0, 3]].tolist()


@pytest.mark.trap("E8")
def test_rows_times_vocabulary_beyond_31_bits() -> None:
    # Only the last row's pages are ever touched, so the 8 GiB stay an address range.
    vocab_size = 131_072
    count = ceil(2**31 / vocab_size) + 3
    try:
        logits = torch.empty(count, vocab_size)
    except RuntimeError as error:
        pytest.skip(f"this machine reserves no 8 GiB of addresses: {error}")
    logits[-1] = 0.0
    logits[-1, -2:] = torch.tensor([8.0, 9.0])
    last = torch.tensor([count - 1])
    forbid(logits, last, torch.tensor([[vocab_size - 1, -1]], dtype=torch.int32))
    assert float(logits[-1, -1]) == -torch.inf
    offset = [1] * (count - 1) + [0]  # no window begins there, so no row is drawn
    knobs = knobs_of([(0.0, 0, 1.0, 0.0)] * count)
    draft = [[-1]] * count
    token, bad = drawn(logits, knobs, noise_of(count), offset=offset, draft=draft)
    assert token[-1] == vocab_size - 2
    assert not bad.any()
    assert (token[:-1] == -1).all()


@pytest.mark.trap("E15")
def test_tokens_are_int32_and_flags_bool_on_both_paths() -> None:
    logits, knobs = torch.randn(3, 9), knobs_of([(1.0, 0, 1.0, 0.0)] * 3)
    paths = (
        greedy(logits),
        drawn(logits, knobs, noise_of(3)),
        reference.draw_rows(logits, knobs, noise_of(3)),
    )
    for token, bad in paths:
        assert token.dtype == torch.int32
        assert bad.dtype == torch.bool


DRAFTS = [c for c in all_triton_cases() if c.operation == "draft" and not c.is_large]


@pytest.mark.parametrize("case", DRAFTS, ids=str)
def test_drafts_of_the_cpu_are_those_of_the_reference(case: TritonCase) -> None:
    """And so are the distributions that they were drawn from."""
    check(replace(case, backend="numpy"), torch.device("cpu"), torch.float32)
