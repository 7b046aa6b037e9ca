"""Penalties, bad words, masks and bias, each against a loop that spells it out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.kernels.processors.reference import (
    Penalties,
    Stops,
    add_bias,
    apply_penalties,
    ban_bad_words,
    ban_early_stops,
    forbid,
    keep_allowed,
)
from paceline.kernels.rows import FeatureMask, WindowRows

VOCAB = 40


def windows_of(*rows: tuple[int, int, list[int]], first: tuple[int, ...] = ()) -> WindowRows:
    """(slot, length, drafts) of each window, which is as wide as its drafts allow."""
    slot, length, drafts = zip(*rows, strict=True)
    draft_BK = torch.tensor(drafts, dtype=torch.int32).reshape(len(rows), -1)
    width_B = torch.full((len(rows),), draft_BK.shape[1] + 1, dtype=torch.int32)
    packed = WindowRows.packed(torch.tensor(slot), width_B, draft_BK, torch.tensor(length))
    return packed._replace(first_B=torch.tensor(first, dtype=torch.int32)) if first else packed


def everywhere(num_slots: int = 2) -> FeatureMask:
    return FeatureMask(torch.ones(num_slots, dtype=torch.int32), 1)


def tokens_of(*sequences: list[int]) -> Tensor:
    tokens = torch.full((len(sequences), 16), 39, dtype=torch.int32)  # stale tokens behind the end
    for s, sequence in enumerate(sequences):
        tokens[s, : len(sequence)] = torch.tensor(sequence)
    return tokens


def some_logits(rows: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(4)) * 2


def test_penalties_count_prompt_output_and_drafts_before_the_row() -> None:
    logits = some_logits(3)
    logits[:, 5], logits[:, 6] = 2.0, -2.0
    before = logits.clone()
    # prompt 5 6, output 6 7 7; the window drafts 7 8.
    windows = windows_of((0, 5, [7, 8]))
    penalties = Penalties(torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([0.25]))
    tokens = tokens_of([5, 6, 6, 7, 7])
    prompt_len = torch.tensor([2], dtype=torch.int32)
    apply_penalties(logits, windows, everywhere(), tokens, prompt_len, penalties)
    for j, counts in enumerate([{6: 1, 7: 2}, {6: 1, 7: 3}, {6: 1, 7: 3, 8: 1}]):
        for token in range(VOCAB):
            value = float(before[j, token])
            if token in {5, *counts}:
                value = value / 2 if value > 0 else value * 2
            if token in counts:
                value -= 0.5 + 0.25 * counts[token]
            assert float(logits[j, token]) == pytest.approx(value, abs=1e-6), (j, token)


def test_penalties_leave_other_rows_alone() -> None:
    logits = some_logits(4)
    before = logits.clone()
    windows = windows_of((0, 2, []), (1, 3, []), first=(1, 3))
    penalties = Penalties(torch.tensor([1.0, 3.0]), torch.zeros(2), torch.tensor([1.0, 0.0]))
    tokens = tokens_of([4, 4], [1, 2, 3])
    prompt_len = torch.tensor([1, 3], dtype=torch.int32)
    apply_penalties(logits, windows, everywhere(), tokens, prompt_len, penalties)
    changed = [(int(r), int(t)) for r, t in (logits != before).nonzero()]
    assert changed == [(1, 4), (3, 1), (3, 2), (3, 3)]
    assert float(logits[1, 4]) == pytest.approx(float(before[1, 4]) - 1)


def words_of(*words: list[int]) -> Tensor:
    table = torch.full((1, 6, 4), -1, dtype=torch.int32)
    for e, word in enumerate(words):
        table[0, e, -len(word) :] = torch.tensor(word)
    return table


@pytest.mark.parametrize(
    ("length", "offset", "drafts", "banned"),
    [
        (3, 0, [], {9, 12}),  # ... 1 2 3 then 2 3 12
        (3, 0, [4, 5], {9, 12}),
        (3, 1, [4, 5], {9, 10}),  # 3 4 10 crosses into the drafts
        (3, 2, [4, 5], {9, 11}),  # 3 4 5 11
        (2, 0, [3, 4], {9, 12}),  # the prefix 2 is not enough for 2 3 12; 1 2 12 is its own word
        (1, 0, [], {9}),
    ],
)
def test_bad_words_match_across_committed_tokens_and_drafts(
    length: int, offset: int, drafts: list[int], banned: set[int]
) -> None:
    logits = some_logits(len(drafts) + 1)
    before = logits.clone()
    words = words_of([9], [3, 4, 10], [3, 4, 5, 11], [2, 3, 12], [1, 2, 12])
    windows = windows_of((0, length, drafts))
    ban_bad_words(logits, windows, everywhere(), tokens_of([1, 2, 3]), words)
    gone = set(torch.isneginf(logits[offset]).nonzero()[:, 0].tolist())
    assert gone == banned
    kept = ~torch.isneginf(logits)
    assert torch.equal(logits[kept], before[kept])


def test_word_longer_than_the_history_does_not_match() -> None:
    logits = some_logits(1)
    windows = windows_of((0, 1, []))
    ban_bad_words(logits, windows, everywhere(), tokens_of([3]), words_of([3, 3, 7]))
    assert torch.isfinite(logits).all()


def test_unused_entry_cannot_undo_a_ban() -> None:
    logits = some_logits(1)
    forbid(logits, torch.tensor([0]), torch.tensor([[0, -1, -1, 5]], dtype=torch.int32))
    assert torch.isneginf(logits[0]).nonzero()[:, 0].tolist() == [0, 5]


@pytest.mark.trap("E11")
@pytest.mark.parametrize(("offset", "banned"), [(0, True), (1, True), (2, False)])
def test_stop_tokens_are_impossible_until_the_minimum_within_a_window(
    offset: int, banned: bool
) -> None:
    logits = some_logits(3)
    windows = windows_of((0, 6, [1, 1]))
    eos = torch.tensor([[2, -1]], dtype=torch.int32)
    stop = torch.tensor([[-1, 0, 39]], dtype=torch.int32)
    stops = Stops(torch.tensor([8], dtype=torch.int32), eos, stop)
    ban_early_stops(logits, windows, everywhere(), stops)
    gone = torch.isneginf(logits[offset]).nonzero()[:, 0].tolist()
    assert gone == ([0, 2, 39] if banned else [])


def test_bias_is_added_once_and_unused_entries_do_nothing() -> None:
    logits = some_logits(2)
    before = logits.clone()
    ids = torch.tensor([[0, 7, -1, -1]], dtype=torch.int32)
    values = torch.tensor([[1.5, -100.0, 9.0, 9.0]])
    add_bias(logits, windows_of((0, 3, [])), everywhere(), ids, values)
    before[0, 0] += 1.5
    before[0, 7] -= 100.0
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 40, 100])
def test_allowed_bits_keep_exactly_their_tokens(vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    allowed = generator.random((2, vocab_size)) < 0.3
    bits = np.zeros((2, (vocab_size + 31) // 32), np.uint32)
    for r, v in np.argwhere(allowed):
        bits[r, v // 32] |= np.uint32(1 << (v % 32))
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    windows = windows_of((1, 5, []), (0, 5, []), first=(1, 3))
    keep_allowed(logits, windows, everywhere(), torch.from_numpy(bits.view(np.int32)))
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert torch.equal(torch.isfinite(logits[[3, 1]]), torch.from_numpy(allowed))
