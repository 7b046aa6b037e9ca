"""Draft tokens: greedy or drawn, with the distribution they were drawn from kept in the slot."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.rows import WindowRows
from paceline.kernels.sampling.reference import Knobs, distributions
from paceline.sampling.draft import propose_tokens
from paceline.sampling.verify import SamplingMode
from paceline.state.slots import Slots
from tests.sampling.verifying import accept

VOCAB = 24


def draft_slots(count: int, draft_vocab_size: int = VOCAB) -> Slots:
    slots = Slots(count, 32, 3, VOCAB, torch.device("cpu"), draft_vocab_size=draft_vocab_size)
    slots.seed_S2[:, 0] = torch.arange(count + 1, dtype=torch.int32) * 7
    slots.max_len_S.fill_(30)
    return slots


def some_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(2)) * 2


def test_greedy_drafts_are_the_best_tokens() -> None:
    logits = some_logits(5)
    slots = Slots(5, 32, 3, VOCAB, torch.device("cpu"))  # keeps no distributions
    ids = propose_tokens(logits, torch.arange(5), None, 0, slots)
    assert ids.dtype == torch.int32
    assert ids.tolist() == logits.argmax(-1).tolist()


def test_sampled_drafts_come_from_the_distribution_that_is_stored() -> None:
    slots = draft_slots(4)
    slots.temperature_S[:4] = torch.tensor([0.0, 1.0, 0.5, 1.0])
    slots.top_k_S[2] = 3
    slots.top_p_S[3] = 0.5
    logits = some_logits(4)
    slot = torch.arange(4)
    ids = propose_tokens(logits, slot, torch.full((4,), 9), 1, slots)
    assert slots.draft_probs_SKV is not None
    stored = slots.draft_probs_SKV[:4, 1]
    knobs = Knobs(
        *(t[:4] for t in (slots.temperature_S, slots.top_k_S, slots.top_p_S, slots.min_p_S))
    )
    assert torch.allclose(stored[1:], distributions(logits, knobs)[1:])
    assert (stored.gather(1, ids[:, None].long())[1:] > 0).all()
    assert ids[0] == logits[0].argmax()
    assert (stored[2] > 0).sum() == 3
    assert slots.draft_probs_SKV[:, [0, 2]].sum() == 0


@pytest.mark.trap("I31")
def test_a_reduced_vocabulary_gives_the_targets_ids_and_no_chance_to_the_rest() -> None:
    """Greedy or sampled, tokens and distributions are the target's; the logits are the head's."""
    slots = draft_slots(4)
    slots.temperature_S[:4] = torch.tensor([0.0, 1.0, 0.5, 1.0])
    token_of = torch.tensor([1, 4, 5, 9, 12])
    narrow = some_logits(4)[:, :5].contiguous()
    slot, position = torch.arange(4), torch.full((4,), 9)
    ids = propose_tokens(narrow, slot, None, 0, slots, draft_to_target_ids=token_of)
    assert ids.dtype == torch.int32
    assert ids.tolist() == token_of[narrow.argmax(-1)].tolist()
    drawn = propose_tokens(narrow, slot, position, 1, slots, draft_to_target_ids=token_of)
    assert set(drawn.tolist()) <= set(token_of.tolist())
    assert slots.draft_probs_SKV is not None
    stored = slots.draft_probs_SKV[:4, 1]
    knobs = Knobs(
        *(t[:4] for t in (slots.temperature_S, slots.top_k_S, slots.top_p_S, slots.min_p_S))
    )
    torch.testing.assert_close(stored[1:, token_of], distributions(narrow, knobs)[1:])
    torch.testing.assert_close(stored[1:].sum(-1), torch.ones(3))  # a greedy row has none


def test_drafts_differ_by_position_and_from_the_targets_own_noise() -> None:
    slots = draft_slots(1)
    slots.temperature_S.fill_(1.0)
    flat = torch.zeros(200, VOCAB)
    slot, position = torch.zeros(200, dtype=torch.int64), torch.arange(200)
    drafts = propose_tokens(flat, slot, position, 0, slots)
    window = WindowRows.packed(
        slot,
        torch.ones(200, dtype=torch.int64),
        torch.empty((200, 0), dtype=torch.int32),
        position.to(torch.int32),
    )
    slots.max_len_S.fill_(1000)
    target = accept(flat, window, slots, mode=SamplingMode.SAMPLE).token_BW[:, 0]
    assert len(drafts.unique()) == VOCAB
    assert int((drafts == target).sum()) < 30  # 8 expected; equal noise would give 200


def test_coupled_drafts_are_the_targets_own_draws_where_both_say_the_same() -> None:
    """By the target's ids, also from a smaller vocabulary, and every draft of a window."""
    slots = Slots(4, 4000, 3, VOCAB, torch.device("cpu"))  # keeps no distributions
    slots.seed_S2[:, 0] = torch.arange(5, dtype=torch.int32) * 7
    slots.max_len_S.fill_(4000)
    slots.temperature_S[:4] = torch.tensor([0.0, 1.0, 0.7, 1.0])
    slots.top_p_S[2] = 0.8
    slots.top_k_S[3] = 5
    slot, position = torch.arange(4).repeat(500), torch.arange(2000, dtype=torch.int32)
    logits = some_logits(2000)
    kept = torch.arange(0, VOCAB, 2)
    logits[:, 1::2] = -torch.inf  # the target too says only what the draft can
    width, none = torch.ones(2000, dtype=torch.int64), torch.empty((2000, 0), dtype=torch.int32)
    window = WindowRows.packed(slot, width, none, position)
    target = accept(logits, window, slots, mode=SamplingMode.SAMPLE).token_BW[:, 0]
    for j in (0, 2):
        drafts = propose_tokens(logits, slot, position, j, slots)
        assert drafts.dtype == torch.int32
        assert torch.equal(drafts, target)
        narrow = logits[:, kept].contiguous()
        mapped = propose_tokens(narrow, slot, position, j, slots, draft_to_target_ids=kept)
        assert torch.equal(mapped, target)
    # Of another opinion, they agree more often than independent draws would: the sum of p * q.
    other = some_logits(2000).roll(1, 0)
    drafts = propose_tokens(other, slot, position, 0, slots)
    is_drawn = slot == 1
    p, q = logits[is_drawn].softmax(-1), other[is_drawn].softmax(-1)
    assert float((drafts == target)[is_drawn].double().mean()) > float((p * q).sum(-1).mean()) * 1.2


@pytest.mark.trap("E7")
def test_broken_draft_logits_harm_no_request() -> None:
    slots = draft_slots(2)
    slots.temperature_S.fill_(1.0)
    slots.drafts_onehot_S.fill_(False)
    logits = some_logits(2)
    logits[0, 3] = float("nan")
    slot, position = torch.arange(2), torch.full((2,), 9)
    ids = propose_tokens(logits, slot, position, 0, slots)
    assert ((ids >= 0) & (ids < VOCAB)).all()
    window = WindowRows.packed(slot, torch.tensor([2, 2]), ids[:, None], position.to(torch.int32))
    accepted = accept(some_logits(4), window, slots, mode=SamplingMode.FULL)
    assert accepted.done_B.tolist() == [0, 0]


@pytest.mark.trap("E5")
def test_draft_row_may_be_stored_wider_than_the_drafters_logits() -> None:
    slots = draft_slots(1, draft_vocab_size=VOCAB + 8)
    slots.temperature_S.fill_(1.0)
    propose_tokens(some_logits(1), torch.tensor([0]), torch.tensor([4]), 0, slots)
    assert slots.draft_probs_SKV is not None
    assert float(slots.draft_probs_SKV[0, 0].sum()) == pytest.approx(1.0, abs=1e-5)
    assert slots.draft_probs_SKV[0, 0, VOCAB:].sum() == 0
