"""Emitted tokens follow the target's distribution, whatever was drafted and beside whom.

All draws are those of the CPU runner, row by row. Every p-value is of fixed seeds, and so is the
noise: other rounding can move a few draws at ties, not the verdict.

Sequences start 16 positions apart, so that no two of them share noise. The target's distribution
depends on the position only, so every token has a known distribution and no memory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from torch import Tensor

from paceline.kernels.rows import LogitRows, WindowRows
from paceline.kernels.sampling import reference as sampling
from paceline.kernels.sampling.reference import (
    Knobs,
    Noise,
    distributions,
    draw_rows_reference,
    thresholds_reference,
)
from paceline.kernels.verify import reference as verify
from paceline.sampling.draft import propose_tokens
from paceline.state.slots import Slots
from tests.sampling.verifying import Accepted, accept

VOCAB = 6
STRIDE = 16
K = 2
# Modes by slot; each has its own seed.
GREEDY, ONE_HOT, SAMPLED, FILTERED, GREEDY_DRAFTED = range(5)


def target_logits() -> Tensor:
    """[position % STRIDE, V]: from flat to very peaked."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.linspace(0.3, 3.0, STRIDE)[:, None]
    return torch.randn(STRIDE, VOCAB, generator=generator) * scale


def mixed_slots() -> Slots:
    slots = Slots(5, 8, K, VOCAB, torch.device("cpu"), draft_vocab_size=VOCAB)
    slots.temperature_S[[ONE_HOT, SAMPLED, FILTERED]] = torch.tensor([1.0, 0.8, 1.0])
    slots.top_k_S[FILTERED] = 4
    slots.top_p_S[FILTERED] = 0.9
    slots.seed_S2[:, 0] = torch.arange(6, dtype=torch.int32)
    slots.drafts_onehot_S[[SAMPLED, FILTERED, GREEDY_DRAFTED]] = False
    slots.max_len_S.fill_(2**31 - 1)
    return slots


class Crowd:
    """Many sequences of each mode, drafting and verifying in one batch."""

    def __init__(self, slots: Slots, count: int, draft_logits: Tensor) -> None:
        self.slots, self.draft_logits = slots, draft_logits
        self.target = target_logits()
        # Greedy rows need no crowd of their own: they all say the same.
        counts = [count if slot in (ONE_HOT, SAMPLED, FILTERED) else 50 for slot in range(5)]
        self.slot_B = torch.arange(5).repeat_interleave(torch.tensor(counts))
        self.base_B = torch.cat([torch.arange(n, dtype=torch.int32) for n in counts]) * STRIDE
        self.length_B = self.base_B.clone()
        self.history: list[Accepted] = []
        self.emitted_BP = torch.full((len(self.slot_B), STRIDE), -1, dtype=torch.int32)

    def step(self) -> None:
        batch = len(self.slot_B)
        drafts = []
        for j in range(K):
            logits_BV = self.draft_logits[j].expand(batch, VOCAB).clone()
            position_B = self.length_B + j
            token_B = propose_tokens(logits_BV, self.slot_B, position_B, j, self.slots)
            # One-hot drafters propose something that varies, but not at random.
            fixed_B = (position_B // STRIDE + j) % VOCAB
            drafts.append(torch.where(self.slot_B == ONE_HOT, fixed_B, token_B))
        windows = WindowRows.packed(
            self.slot_B,
            torch.full((batch,), K + 1),
            torch.stack(drafts, 1).to(torch.int32),
            self.length_B,
        )
        position_N = windows.logit_rows.position_M
        accepted = accept(self.target[position_N % STRIDE], windows, self.slots)
        self._advance(accepted)
        self.history.append(accepted)

    def _advance(self, accepted: Accepted) -> None:
        for j in range(K + 1):
            row = (accepted.count_B > j).nonzero()[:, 0]
            place = (self.length_B[row] - self.base_B[row] + j).long()
            self.emitted_BP[row, place] = accepted.token_BW[row, j]
        self.length_B = self.length_B + accepted.count_B

    def wanted(self, slot: int) -> npt.NDArray[np.float64]:
        """[position, V]: what each position of a mode must follow."""
        s = torch.full((STRIDE,), slot)
        knobs = Knobs(
            self.slots.temperature_S[s],
            self.slots.top_k_S[s],
            self.slots.top_p_S[s],
            self.slots.min_p_S[s],
        )
        return distributions(self.target, knobs).double().numpy()


def pvalue(counts: npt.NDArray[np.int64], wanted: npt.NDArray[np.float64]) -> float:
    assert counts[wanted == 0].sum() == 0
    used = wanted > 0
    expected = wanted[used] / wanted.sum() * counts.sum()
    return float(stats.chisquare(counts[used], expected).pvalue)


@pytest.fixture(scope="module")
def crowd() -> Crowd:
    """It has gone three positions: 3 sampled modes x 3 positions x 12,000 sequences draw."""
    draft_logits = torch.tensor(
        [[2.0, 0.0, 1.0, -1.0, 0.5, -3.0], [-1.0, 1.5, 0.0, 0.3, -2.0, 1.0]]
    )
    crowd = Crowd(mixed_slots(), 12_000, draft_logits)
    while int((crowd.length_B - crowd.base_B).min()) < 3:
        crowd.step()
    return crowd


@pytest.mark.trap("E2")
def test_mixed_batch_emits_the_target_distribution_over_many_steps(crowd: Crowd) -> None:
    best = crowd.target.argmax(-1)
    for slot in (GREEDY, GREEDY_DRAFTED):
        emitted = crowd.emitted_BP[crowd.slot_B == slot, :3]
        assert torch.equal(emitted, best[:3].to(torch.int32).expand_as(emitted))
    for slot in (ONE_HOT, SAMPLED, FILTERED):
        tokens = crowd.emitted_BP[crowd.slot_B == slot].numpy()
        wanted = crowd.wanted(slot)
        for place in range(3):
            counts = np.bincount(tokens[:, place], minlength=VOCAB)
            assert pvalue(counts, wanted[place]) > 1e-4, (slot, place)
        for place in range(2):  # neighbours know nothing of each other
            pair = tokens[:, place] * VOCAB + tokens[:, place + 1]
            joint = np.outer(wanted[place], wanted[place + 1]).flatten()
            assert pvalue(np.bincount(pair, minlength=VOCAB**2), joint) > 1e-4, (slot, place)


@pytest.mark.trap("E3")
def test_acceptance_reaches_the_overlap_of_p_and_q(crowd: Crowd) -> None:
    accepted = crowd.history[0]
    count = int((crowd.slot_B == SAMPLED).sum())
    for slot in (SAMPLED, FILTERED):
        p = crowd.wanted(slot)[0]
        knobs = Knobs(
            *(
                table[slot : slot + 1]
                for table in (
                    crowd.slots.temperature_S,
                    crowd.slots.top_k_S,
                    crowd.slots.top_p_S,
                    crowd.slots.min_p_S,
                )
            )
        )
        q = distributions(crowd.draft_logits[:1], knobs)[0].double().numpy()
        overlap = np.minimum(p, q).sum()
        first = (accepted.num_accepted_B[crowd.slot_B == slot] > 0).double().mean()
        assert abs(float(first) - overlap) < 4 * (0.25 / count) ** 0.5
    # A one-hot draft is accepted as often as the target would have said it.
    first = (accepted.num_accepted_B[crowd.slot_B == ONE_HOT] > 0).double().mean()
    assert abs(float(first) - 1 / VOCAB) < 4 * (0.25 / count) ** 0.5


@pytest.mark.trap("E6")
def test_rare_tokens_survive_rejection() -> None:
    # The target gives three tokens about 1e-4; the draft proposes one of them far too often and
    # never another, so both the coin and the residual meet small numbers.
    count = 100_000
    slots = mixed_slots()
    slots.temperature_S[SAMPLED] = 1.0
    p = torch.tensor([0.6, 0.3, 0.09955, 2e-4, 1.5e-4, 1e-4], dtype=torch.float64)
    q = torch.tensor([0.3, 0.3, 0.15, 0.25, 1e-9, 1e-6])
    window_slots = torch.full((count,), SAMPLED)
    position_B = torch.arange(count, dtype=torch.int32)
    logits = q.log().expand(count, VOCAB).clone()
    draft_B = propose_tokens(logits, window_slots, position_B, 0, slots)
    width_B = torch.full((count,), 2)
    windows = WindowRows.packed(window_slots, width_B, draft_B[:, None], position_B)
    accepted = accept(p.float().log().repeat(2 * count, 1), windows, slots)
    total = np.bincount(accepted.token_BW[:, 0].numpy(), minlength=VOCAB)
    assert pvalue(total, p.numpy() / float(p.sum())) > 1e-4


def test_the_reference_emits_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor reference, which bisects its thresholds: what kernels of a GPU are compared to."""
    emitted = []
    for is_reference in (False, True):
        if is_reference:
            for module in (verify, sampling):
                monkeypatch.setattr(module, "draw_windows", draw_by_reference)
            monkeypatch.setattr(sampling, "thresholds", thresholds_reference)
        crowd = Crowd(mixed_slots(), 700, torch.tensor([[1.0, 0.0, 1.0, -1.0, 0.5, -3.0]] * 2))
        crowd.step()
        crowd.step()
        emitted.append(crowd.emitted_BP)
    assert torch.equal(*emitted)


def draw_by_reference(
    logits: Tensor, rows: LogitRows, knobs: Knobs, noise: Noise, verdict: Tensor
) -> tuple[Tensor, Tensor]:
    return draw_rows_reference(logits[rows.row_M], knobs, noise)
