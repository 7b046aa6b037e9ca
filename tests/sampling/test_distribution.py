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

from paceline.kernels.processors.reference import LateBits
from paceline.kernels.rows import LogitRows, WindowRows
from paceline.kernels.sampling import numpy as sampling
from paceline.kernels.sampling import reference
from paceline.kernels.sampling.reference import Knobs, Noise, distributions
from paceline.kernels.verify import reference as verify
from paceline.sampling.draft import propose_tokens
from paceline.scheduler.adaptive import AUTO_PERIOD, DraftLengths
from paceline.speculation import SpeculativeConfig
from paceline.state.slots import Slots
from paceline.step import StepResult
from tests.fakes import runner_info
from tests.sampling.verifying import Accepted, accept

VOCAB = 6
STRIDE = 16
K = 3
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

    def __init__(
        self, slots: Slots, count: int, draft_logits: Tensor, *, is_block: bool = False
    ) -> None:
        self.slots, self.draft_logits, self.is_block = slots, draft_logits, is_block
        self.target = target_logits()
        # Greedy rows need no crowd of their own: they all say the same.
        counts = [count if slot in (ONE_HOT, SAMPLED, FILTERED) else 50 for slot in range(5)]
        self.slot_B = torch.arange(5).repeat_interleave(torch.tensor(counts))
        self.base_B = torch.cat([torch.arange(n, dtype=torch.int32) for n in counts]) * STRIDE
        self.length_B = self.base_B.clone()
        # Windows of 0 to K drafts, the widest most often.
        self.width_B = 1 + (self.base_B // STRIDE % (K + 3)).clamp(max=K)
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
        draft_BK = torch.stack(drafts, 1).to(torch.int32)
        self.admit(draft_BK)
        draft_BK = draft_BK.where(torch.arange(1, K + 1) < self.width_B[:, None], -1)
        windows = WindowRows.packed(self.slot_B, self.width_B, draft_BK, self.length_B)
        position_N = windows.logit_rows.position_M
        logits_NV = self.target[position_N % STRIDE]
        accepted = accept(logits_NV, windows, self.slots, is_block=self.is_block)
        self._advance(accepted)
        self.history.append(accepted)

    def admit(self, draft_BK: Tensor) -> None:
        """Choose how many drafts each row verifies; here they stay as they were."""

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


DRAFT_LOGITS = (
    (2.0, 0.0, 1.0, -1.0, 0.5, -3.0),
    (-1.0, 1.5, 0.0, 0.3, -2.0, 1.0),
    (0.5, 1.0, 0.0, -0.5, 0.8, 0.2),
)


@pytest.fixture(
    scope="module",
    params=[
        ("standard", 3_000),
        ("block", 3_000),
        pytest.param(("standard", 12_000), marks=pytest.mark.more),
        pytest.param(("block", 30_000), marks=pytest.mark.more),
    ],
    ids=str,
)
def crowd(request: pytest.FixtureRequest) -> Crowd:
    """It has gone three positions: 3 sampled modes x 3 positions, in this many sequences each."""
    method, count = request.param
    crowd = Crowd(mixed_slots(), count, torch.tensor(DRAFT_LOGITS), is_block=method == "block")
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
    has_draft_B = crowd.width_B > 1
    count = int((has_draft_B & (crowd.slot_B == SAMPLED)).sum())
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
        is_one_B = has_draft_B & (crowd.slot_B == slot)
        first = (accepted.num_accepted_B[is_one_B] > 0).double().mean()
        assert abs(float(first) - overlap) < 4 * (0.25 / count) ** 0.5
    # A one-hot draft is accepted as often as the target would have said it.
    is_one_B = has_draft_B & (crowd.slot_B == ONE_HOT)
    first = (accepted.num_accepted_B[is_one_B] > 0).double().mean()
    assert abs(float(first) - 1 / VOCAB) < 4 * (0.25 / count) ** 0.5


def test_sampled_drafts_under_a_mask_emit_the_masked_distribution() -> None:
    """Each window position has a mask of its own; the drafter does not know them."""
    count, width = 4_000, K + 1
    slots = mixed_slots()
    allowed = torch.tensor([0b011011, 0b110100, 0b101111, 0b111101], dtype=torch.int32)
    draft_logits = torch.tensor(DRAFT_LOGITS)
    target_WV = target_logits()[5 : 5 + width]
    for slot in (ONE_HOT, SAMPLED, FILTERED):
        slot_B = torch.full((count,), slot)
        length_B = torch.arange(count, dtype=torch.int32) * STRIDE
        drafts = [
            propose_tokens(
                draft_logits[j].expand(count, VOCAB).clone(), slot_B, length_B + j, j, slots
            )
            for j in range(K)
        ]
        draft_BK = torch.stack(drafts, 1).to(torch.int32)
        windows = WindowRows.packed(slot_B, torch.full((count,), width), draft_BK, length_B)
        bits_RWX = allowed[None, :, None].expand(1, width, 1).contiguous()
        late = LateBits(torch.zeros(count, dtype=torch.int32), bits_RWX)
        accepted = accept(target_WV.repeat(count, 1), windows, slots, late=late)
        is_allowed_WV = (allowed[:, None] >> torch.arange(VOCAB)) & 1 > 0
        masked_WV = target_WV.masked_fill(~is_allowed_WV, float("-inf"))
        s = torch.full((width,), slot)
        tables = (slots.temperature_S, slots.top_k_S, slots.top_p_S, slots.min_p_S)
        wanted = distributions(masked_WV, Knobs(*(table[s] for table in tables))).double().numpy()
        for place in range(width - 1):  # few windows reach the last place
            emitted = accepted.token_BW[accepted.count_B > place, place].numpy()
            assert len(emitted) > 150
            counts = np.bincount(emitted, minlength=VOCAB)
            assert pvalue(counts, wanted[place]) > 1e-4, (slot, place)
        assert bool((accepted.num_accepted_B > 0).any())


def test_block_verification_accepts_more_and_one_hot_drafts_the_same() -> None:
    accepted = {}
    for is_block in (False, True):
        crowd = Crowd(mixed_slots(), 3_000, torch.tensor(DRAFT_LOGITS), is_block=is_block)
        crowd.step()
        accepted[is_block] = crowd.history[0].num_accepted_B
    for slot in (SAMPLED, FILTERED):
        more_B = (accepted[True] - accepted[False])[crowd.slot_B == slot].double()
        assert float(more_B.sum()) > 0
    is_other_B = (crowd.slot_B != SAMPLED) & (crowd.slot_B != FILTERED)
    assert torch.equal(accepted[True][is_other_B], accepted[False][is_other_B])


def test_block_verification_has_the_expected_length_of_its_paper() -> None:
    """The chance of at least i accepted drafts is the mean of reach_i over draft sequences, and
    the residual is what the recursion says: by summing over all sequences of two drafts."""
    slots = mixed_slots()
    slots.temperature_S[SAMPLED] = 1.0
    crowd = Crowd(slots, 8_000, torch.tensor(DRAFT_LOGITS), is_block=True)
    crowd.width_B = torch.full_like(crowd.width_B, 3)
    crowd.step()
    p_PV = crowd.target.double().softmax(-1)
    q_KV = crowd.draft_logits.double().softmax(-1)
    one_V = (p_PV[0] / q_KV[0]).clamp(max=1.0)
    two_VV = (one_V[:, None] * p_PV[1] / q_KV[1]).clamp(max=1.0)
    expected = [(q_KV[0] * one_V).sum(), (q_KV[0][:, None] * q_KV[1] * two_VV).sum()]
    found_B = crowd.history[0].num_accepted_B[crowd.slot_B == SAMPLED]
    for least, chance in enumerate(expected, 1):
        share = (found_B >= least).double().mean()
        assert abs(float(share - chance)) < 4 * (0.25 / len(found_B)) ** 0.5, least


@pytest.mark.trap("E6")
def test_rare_tokens_survive_rejection() -> None:
    # The target gives three tokens about 1e-4; the draft proposes one of them far too often and
    # never another, so both the coin and the residual meet small numbers.
    count = 50_000
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
            monkeypatch.setattr(sampling, "thresholds", reference.thresholds)
        crowd = Crowd(mixed_slots(), 700, torch.tensor([[1.0, 0.0, 1.0, -1.0, 0.5, -3.0]] * K))
        crowd.step()
        crowd.step()
        emitted.append(crowd.emitted_BP)
    assert torch.equal(*emitted)


def draw_by_reference(
    logits: Tensor, rows: LogitRows, knobs: Knobs, noise: Noise, verdict: Tensor
) -> tuple[Tensor, Tensor]:
    return reference.draw_rows(logits[rows.row_M], knobs, noise)


class AutoCrowd(Crowd):
    """Each sequence verifies as many drafts as "auto" says. Steps cost as on a busy device, so that
    only drafts that are often accepted pay."""

    def __init__(self, count: int) -> None:
        super().__init__(mixed_slots(), count, torch.tensor(DRAFT_LOGITS))
        rows = len(self.slot_B)
        values = {"num_speculative_tokens": "auto", "max_num_speculative_tokens": K}
        spec = SpeculativeConfig.from_mapping({"method": "ngram", **values})
        self.lengths = DraftLengths(runner_info(max_k=K, num_slots=rows), spec)
        for slot in range(rows):
            self.lengths.start(slot, None)
        for tokens in range(rows, rows * (K + 1), rows):
            self.lengths._rank.cost.measured(tokens * 0.7e-6 + 0.3e-6 * rows, tokens, 0, 0, 0)
        self.number = AUTO_PERIOD + 2
        self.rows = np.arange(rows)
        self.seen_k: set[int] = set()

    def admit(self, draft_BK: Tensor) -> None:
        k_B = self.lengths.wanted(self.number, len(self.rows))
        self.seen_k.update(k_B.tolist())
        self.width_B = torch.from_numpy(1 + k_B.astype(np.int64))

    def step(self) -> None:
        super().step()
        found = self.history[-1]
        drafts_B, accepted_B = found.num_drafts_B.numpy(), found.num_accepted_B.numpy()
        none = np.zeros(0, np.int32)
        result = StepResult(
            self.number, none.astype(np.int64), none, none[:, None], none, drafts_B, accepted_B
        )
        self.lengths.learn(self.rows, drafts_B, result)
        self.lengths._rank.decide(self.lengths._allowed(self.rows), 0)
        self.lengths._set_auto(self.rows)
        self.number += 1


class PeekingCrowd(Crowd):
    """What must not be: a draft is verified only if it is token 0."""

    def admit(self, draft_BK: Tensor) -> None:
        self.width_B = 1 + (draft_BK == 0).cumprod(1).sum(1)


def worst_pvalue(crowd: Crowd) -> float:
    """The least p-value of the first three positions of rows with sampled drafts."""
    while int((crowd.length_B - crowd.base_B).min()) < 3:
        crowd.step()
    found = []
    for slot in (SAMPLED, FILTERED):
        wanted = crowd.wanted(slot)
        rows = crowd.slot_B == slot
        for position in range(3):
            tokens = crowd.emitted_BP[rows, position].numpy()
            counts = np.bincount(tokens, minlength=VOCAB)
            found.append(pvalue(counts, wanted[position]))
    return min(found)


def test_drafts_that_auto_admits_keep_the_distribution() -> None:
    """Also in steps after others had drafts rejected: k depends on what was committed."""
    crowd = AutoCrowd(1_000)
    assert worst_pvalue(crowd) > 1e-4
    assert len(crowd.seen_k) > 1
    assert any((found.num_accepted_B > 0).any() for found in crowd.history)


def test_admission_that_looks_at_the_draft_changes_the_distribution() -> None:
    """So the test before this one would find it."""
    crowd = PeekingCrowd(mixed_slots(), 600, torch.tensor(DRAFT_LOGITS))
    assert worst_pvalue(crowd) < 1e-12


class RestartedCrowd(Crowd):
    """Its engine dies in every second step. The tokens of that step are lost; all sequences go on
    from what was delivered, first without drafts, as after a prompt."""

    number = 0

    def admit(self, draft_BK: Tensor) -> None:
        if self.number % 4 == 2:
            self.width_B = torch.ones_like(self.width_B)

    def step(self) -> None:
        width_B, length_B, emitted_BP = self.width_B, self.length_B, self.emitted_BP.clone()
        super().step()
        self.width_B = width_B
        if self.number % 4 == 1:
            assert (self.history[-1].num_accepted_B > 0).any()
            self.length_B, self.emitted_BP = length_B, emitted_BP
        self.number += 1


@pytest.mark.parametrize("is_block", [False, True])
def test_sampled_drafts_keep_the_distribution_over_restarts(is_block: bool) -> None:
    """Tokens may differ from those of a run without a restart: other drafts were rejected."""
    logits = torch.tensor(DRAFT_LOGITS)
    crowd = RestartedCrowd(mixed_slots(), 2_000, logits, is_block=is_block)
    assert worst_pvalue(crowd) > 1e-4
    assert crowd.number > 3
