"""n-gram proposals: the longest, then latest match; periods continue; nothing from nothing."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.kernels.table import ngram_propose


def propose(history: list[int], k: int = 4, min_n: int = 2, max_n: int = 4) -> list[int]:
    tokens_SL = torch.full((2, 64), 99, dtype=torch.int32)
    tokens_SL[1, : len(history)] = torch.tensor(history, dtype=torch.int32)
    num_tokens_S = torch.tensor([0, len(history)], dtype=torch.int32)
    drafts = ngram_propose(tokens_SL, num_tokens_S, torch.tensor([1]), k, min_n, max_n)
    assert drafts.dtype == torch.int32
    return [int(t) for t in drafts[0]]


def brute_force(history: list[int], k: int, min_n: int, max_n: int) -> list[int]:
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(history) - n - 1, -1, -1):
            if n <= len(history) - 1 and history[start : start + n] == history[-n:]:
                copy = list(history)
                for i in range(k):
                    copy.append(copy[start + n + i])
                return copy[len(history) :]
    return [-1] * k


def test_the_continuation_of_the_latest_match_is_copied() -> None:
    assert propose([1, 2, 3, 4, 9, 1, 2, 5, 6, 7, 8, 1, 2]) == [5, 6, 7, 8]


def test_a_longer_match_beats_a_later_one() -> None:
    assert propose([8, 1, 2, 3, 0, 1, 2, 4, 4, 8, 1, 2], k=2) == [3, 0]


def test_a_short_period_is_continued_through_its_own_drafts() -> None:
    assert propose([5, 6, 5, 6], k=5) == [5, 6, 5, 6, 5]


def test_no_match_gives_placeholders_and_never_reads_past_the_length() -> None:
    assert propose([1, 2, 3, 4]) == [-1] * 4
    assert propose([99]) == [-1] * 4
    assert propose([7, 99], min_n=1) == [-1] * 4


@pytest.mark.parametrize("seed", range(200))
def test_it_agrees_with_a_search_written_to_be_read(seed: int) -> None:
    rng = random.Random(seed)
    history = [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
    min_n = rng.randrange(1, 4)
    max_n = rng.randrange(min_n, 6)
    k = rng.randrange(1, 8)
    assert propose(history, k, min_n, max_n) == brute_force(history, k, min_n, max_n)
