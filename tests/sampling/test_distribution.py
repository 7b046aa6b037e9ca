"""Emitted tokens follow the target's distribution, whatever was drafted and beside whom.

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

import paceline.kernels.sampling
import paceline.sampling.draft
import paceline.sampling.verify
from paceline.kernels.sampling import Drafts, Knobs, Noise, distributions
from paceline.sampling.draft import propose_tokens
from paceline.sampling.verify import Accepted, AcceptRules, Tail, verify
from paceline.sampling.window import Window
from paceline.state.slots import Slots

VOCAB = 6
STRIDE = 16
K = 2
# Modes by slot; each has its own seed.
GREEDY, ONE_HOT, SAMPLED, FILTERED, GREEDY_DRAFTED = range(5)


@pytest.fixture
def vectorised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor reference instead of the CPU shortcut: a million draws in seconds.

    Its bisection would take most of the time for six tokens, so thresholds come from a sort; and
    rows of six tokens are judged by the ten thousand, not by the few that a vocabulary allows.
    `tests/kernels/test_sampling.py` holds all of these against each other.
    """
    kernels = paceline.kernels.sampling

    def draw(logits: Tensor, knobs: Knobs, noise: Noise, drafts: Drafts) -> tuple[Tensor, Tensor]:
        return kernels.draw_windows_reference(logits, knobs, noise)

    monkeypatch.setattr(paceline.sampling.verify, "draw_windows", draw)
    monkeypatch.setattr(paceline.sampling.draft, "draw_windows", draw)
    monkeypatch.setattr(paceline.sampling.verify, "ROWS_AT_ONCE", 10_000)
    monkeypatch.setattr(kernels, "thresholds", sorted_thresholds)
    monkeypatch.setattr(kernels, "thresholds_reference", sorted_thresholds)


def sorted_thresholds(scaled_NV: Tensor, knobs: Knobs) -> Tensor:
    threshold_N = torch.full((len(scaled_NV),), -torch.inf)
    row_M = ((knobs.top_k_N > 0) | (knobs.top_p_N < 1)).nonzero()[:, 0]
    assert not (knobs.min_p_N > 0).any()
    value_MV = scaled_NV[row_M].sort(dim=-1, descending=True).values
    is_kept_MV = torch.arange(scaled_NV.shape[1]) < knobs.top_k_N[row_M][:, None]
    mass_MV = value_MV.exp().masked_fill(~is_kept_MV, 0.0).cumsum(-1)
    wanted_M1 = knobs.top_p_N[row_M][:, None] * mass_MV[:, -1:]
    last_M1 = (mass_MV < wanted_M1).sum(-1, keepdim=True)
    threshold_N[row_M] = value_MV.gather(1, last_M1)[:, 0]
    return threshold_N


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
        counts = [count if slot in (ONE_HOT, SAMPLED, FILTERED) else 2000 for slot in range(5)]
        self.slot_B = torch.arange(5).repeat_interleave(torch.tensor(counts))
        self.base_B = torch.cat([torch.arange(n, dtype=torch.int32) for n in counts]) * STRIDE
        self.length_B = self.base_B.clone()
        self.history: list[Accepted] = []
        self.emitted_BP = torch.full((len(self.slot_B), STRIDE), -1, dtype=torch.int32)

    def step(self) -> Accepted:
        batch = len(self.slot_B)
        drafts = []
        for j in range(K):
            logits_BV = self.draft_logits[j].expand(batch, VOCAB).clone()
            position_B = self.length_B + j
            token_B = propose_tokens(logits_BV, self.slot_B, position_B, j, self.slots)
            # One-hot drafters propose something that varies, but not at random.
            fixed_B = (position_B // STRIDE + j) % VOCAB
            drafts.append(torch.where(self.slot_B == ONE_HOT, fixed_B, token_B))
        window = Window.packed(
            self.slot_B,
            torch.full((batch,), K + 1),
            torch.stack(drafts, 1).to(torch.int32),
            self.length_B,
        )
        position_N = self.length_B[window.row_N] + window.offset_N
        accepted = verify(
            self.target[position_N % STRIDE],
            window,
            self.slots,
            tail=Tail.FULL,
            rules=AcceptRules(),
            custom=None,
            late_bits_NV=None,
        )
        self._advance(accepted)
        self.history.append(accepted)
        return accepted

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


@pytest.mark.trap("E2")
@pytest.mark.usefixtures("vectorised")
def test_mixed_batch_emits_the_target_distribution_over_many_steps() -> None:
    # 3 sampled modes x 3 positions x 120,000 sequences: a million draws.
    draft_logits = torch.tensor(
        [[2.0, 0.0, 1.0, -1.0, 0.5, -3.0], [-1.0, 1.5, 0.0, 0.3, -2.0, 1.0]]
    )
    crowd = Crowd(mixed_slots(), 120_000, draft_logits)
    while int((crowd.length_B - crowd.base_B).min()) < 3:
        crowd.step()
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
@pytest.mark.usefixtures("vectorised")
def test_acceptance_reaches_the_overlap_of_p_and_q() -> None:
    count = 100_000
    draft_logits = torch.tensor([[2.0, 0.0, 1.0, -1.0, 0.5, -3.0]] * 2)
    crowd = Crowd(mixed_slots(), count, draft_logits)
    accepted = crowd.step()
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
        q = distributions(draft_logits[:1], knobs)[0].double().numpy()
        overlap = np.minimum(p, q).sum()
        first = (accepted.num_accepted_B[crowd.slot_B == slot] > 0).double().mean()
        assert abs(float(first) - overlap) < 4 * (0.25 / count) ** 0.5
    # A one-hot draft is accepted as often as the target would have said it.
    first = (accepted.num_accepted_B[crowd.slot_B == ONE_HOT] > 0).double().mean()
    assert abs(float(first) - 1 / VOCAB) < 4 * (0.25 / count) ** 0.5


@pytest.mark.trap("E6")
@pytest.mark.usefixtures("vectorised")
def test_rare_tokens_survive_rejection() -> None:
    # The target gives three tokens about 1e-5 to 1e-4; the draft proposes one of them far too
    # often and never another, so both the coin and the residual meet small numbers.
    count = 300_000
    slots = mixed_slots()
    slots.temperature_S[SAMPLED] = 1.0
    p = torch.tensor([0.6, 0.3, 0.0998, 1e-4, 9e-5, 1e-5], dtype=torch.float64)
    q = torch.tensor([0.3, 0.3, 0.15, 0.25, 1e-9, 1e-6])
    total = np.zeros(VOCAB, np.int64)
    window_slots = torch.full((count,), SAMPLED)
    for seed in range(6):
        slots.seed_S2[SAMPLED, 0] = 1000 + seed
        position_B = torch.arange(count, dtype=torch.int32)
        logits = q.log().expand(count, VOCAB).clone()
        draft_B = propose_tokens(logits, window_slots, position_B, 0, slots)
        window = Window.packed(window_slots, torch.full((count,), 2), draft_B[:, None], position_B)
        accepted = verify(
            p.float().log().repeat(2 * count, 1),
            window,
            slots,
            tail=Tail.FULL,
            rules=AcceptRules(),
            custom=None,
            late_bits_NV=None,
        )
        total += np.bincount(accepted.token_BW[:, 0].numpy(), minlength=VOCAB)
    assert pvalue(total, p.numpy() / float(p.sum())) > 1e-4


def test_shortcut_emits_the_target_distribution_too() -> None:
    crowd = Crowd(mixed_slots(), 2500, torch.tensor([[1.0, 0.0, 1.0, -1.0, 0.5, -3.0]] * 2))
    crowd.step()
    for slot in (ONE_HOT, SAMPLED, FILTERED):
        counts = np.bincount(crowd.emitted_BP[crowd.slot_B == slot, 0].numpy(), minlength=VOCAB)
        assert pvalue(counts, crowd.wanted(slot)[0]) > 1e-4, slot


def test_shortcut_and_reference_emit_the_same_tokens(request: pytest.FixtureRequest) -> None:
    emitted = []
    for fixture in (None, "vectorised"):
        if fixture:
            request.getfixturevalue(fixture)
        crowd = Crowd(mixed_slots(), 700, torch.tensor([[1.0, 0.0, 1.0, -1.0, 0.5, -3.0]] * 2))
        crowd.step()
        crowd.step()
        emitted.append(crowd.emitted_BP)
    assert torch.equal(*emitted)
