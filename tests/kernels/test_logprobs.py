"""Log probabilities and ranks: the shortcut, the reference and a plain softmax agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.logprobs.reference import token_logprobs, token_logprobs_reference


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.integers(2, 300), st.integers(0, 30), st.integers(0, 2**31))
def test_shortcut_and_reference_agree_with_softmax(
    rows: int, vocab_size: int, top: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab_size, generator=generator) * 6).round() / 2  # with ties
    token = torch.randint(-1, vocab_size, (rows,), generator=generator).to(torch.int32)
    top = min(top, vocab_size)
    ids, values, rank = token_logprobs(logits, token, top)
    for mine, other in zip(
        (ids, values, rank), token_logprobs_reference(logits, token, top), strict=True
    ):
        assert mine.dtype == other.dtype
        assert torch.allclose(mine, other, atol=1e-5)
    logprobs = logits.double().log_softmax(-1)
    for n, chosen in enumerate(token.tolist()):
        if chosen < 0:
            assert ids[n].eq(-1).all()
            continue
        order = sorted(range(vocab_size), key=lambda v: (-float(logits[n, v]), v))
        assert ids[n].tolist() == [chosen, *order[:top]]
        assert torch.allclose(values[n].double(), logprobs[n, ids[n].long()], atol=1e-5)
        assert rank[n] == 1 + int((logits[n] > logits[n, chosen]).sum())


def test_more_top_tokens_than_the_vocabulary_gives_all_of_it() -> None:
    ids, _, _ = token_logprobs(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0]), 20)
    assert ids.tolist() == [[0, 1, 2, 0]]


@pytest.mark.trap("E7")
@pytest.mark.parametrize("top", [0, 3])
def test_unusable_row_gives_valid_ids_and_finite_numbers(top: int) -> None:
    logits = torch.zeros(3, 10)
    logits[0, 4] = float("nan")
    logits[1, 5] = float("inf")
    logits[2] = float("-inf")
    token = torch.tensor([4, 5, 0], dtype=torch.int32)
    for found in (token_logprobs, token_logprobs_reference):
        ids, values, _ = found(logits, token, top)
        assert ((ids >= 0) & (ids < 10)).all()
        assert torch.isfinite(values).all()
