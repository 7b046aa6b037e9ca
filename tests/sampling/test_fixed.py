"""Verification at fixed shapes says what verification of true shapes says, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from paceline.kernels import sampling
from paceline.kernels.logprobs import LogprobResults
from paceline.kernels.sampling import distributions
from paceline.kernels.step_rows import BatchRows, StepRows, StepShape
from paceline.kernels.verify import Limits, Settled, Windows, settle_windows_reference
from paceline.request import EngineRequest, SamplingParams
from paceline.sampling import fixed
from paceline.sampling.draft import propose_tokens
from paceline.sampling.params import features_of, slot_rows
from paceline.sampling.verify import Accepted, AcceptRules, Tail, verify
from paceline.sampling.window import Window
from paceline.state.slots import LOGPROBS, Slots

CPU = torch.device("cpu")
VOCAB = 23
LONGEST = 40
EOS = 3
MAX_K = 3

FEATURES: list[dict[str, Any]] = [
    {"presence_penalty": 0.8, "frequency_penalty": -0.3, "repetition_penalty": 1.4},
    {"logit_bias": {1: 4.0, 5: -100.0}},
    {"bad_words": ((4,), (2, 6), (1, 2, 3))},
    {"allowed_token_ids": [1, 2, 5, 7, 11, 13]},
    {"min_tokens": 9, "stop_token_ids": [5, 6]},
    {"logprobs": 4},
    {"logprobs": 0, "repetition_penalty": 0.7, "min_tokens": 16, "bad_words": ((9, 9),)},
    {},
]


def request(generator: np.random.Generator, tail: Tail, index: int) -> EngineRequest:
    params: dict[str, Any] = {"seed": int(generator.integers(0, 2**62))}
    if tail is not Tail.GREEDY and generator.random() < 0.8:
        params["temperature"] = float(generator.choice([0.5, 1.0, 1.6]))
        params["top_k"] = int(generator.choice([0, 1, 5, 30]))
        params["top_p"] = float(generator.choice([0.3, 0.9, 1.0]))
        params["min_p"] = float(generator.choice([0.0, 0.15]))
    else:
        params["temperature"] = 0.0
    words: tuple[tuple[int, ...], ...] = ()
    if tail is Tail.FULL:
        wanted = dict(FEATURES[index % len(FEATURES)])
        words = wanted.pop("bad_words", ())
        params |= wanted
    prompt = generator.integers(0, 9, int(generator.integers(1, 8))).tolist()
    return EngineRequest(
        uid=index,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        eos_token_ids=(EOS,),
        bad_word_ids=words,
    )


class State:
    """Slots in random states and one step over some of them, with windows of all widths."""

    def __init__(self, seed: int, tail: Tail, k: int, *, samples_drafts: bool = False) -> None:
        generator = np.random.default_rng(seed)
        count = 10
        self.k = k
        self.slots = Slots(
            count,
            LONGEST,
            MAX_K,
            VOCAB,
            CPU,
            draft_vocab_size=VOCAB + 2 if samples_drafts else 0,
        )
        slots = self.slots
        length = generator.integers(1, LONGEST - MAX_K - 1, count)
        for slot in range(count):
            asked = request(generator, tail, slot)
            prompt_len = len(asked.prompt_token_ids)
            length[slot] = max(length[slot], prompt_len)
            for name, value in slot_rows(asked, LONGEST, prompt_len, vocab_size=VOCAB).items():
                getattr(slots, name)[slot] = torch.as_tensor(value)
            slots.features_S[slot] = features_of(asked)
        slots.tokens_SL.copy_(torch.from_numpy(generator.integers(0, 9, slots.tokens_SL.shape)))
        slots.num_tokens_S[:count] = torch.from_numpy(length).int()
        # Some slots have no row, some rows do not sample, two are padding; slot 5 wants logprobs.
        order = generator.permutation(count)
        slot_B = np.concatenate(([5], order[order != 5][:7], [count, count]))
        width_B = np.append(generator.integers(0, k + 2, 8), [0, 0])
        width_B[0] = k + 1
        draft_BK = generator.integers(0, 9, (len(slot_B), k))
        draft_BK[np.arange(k) >= width_B[:, None] - 1] = -1
        if samples_drafts:
            assert slots.draft_probs_SKV is not None
            slots.draft_probs_SKV.copy_(
                torch.from_numpy(generator.dirichlet(np.ones(VOCAB + 2), (count + 1, MAX_K)))
            )
            slots.drafts_onehot_S[:count] = torch.from_numpy(generator.integers(0, 2, count)).int()
        self.rows = step_rows(slots, slot_B, width_B, draft_BK)
        shape = (len(slot_B) * (k + 1), VOCAB)
        self.logits_NV = torch.from_numpy(generator.normal(0, 2, shape)).float()
        self.bits_NV = torch.from_numpy(generator.integers(-(2**31), 2**31, (shape[0], 1))).int()

    def as_it_is(self, tail: Tail, rules: AcceptRules, *, is_late: bool = False) -> Accepted:
        """What the CPU's own verification says about the rows that sample."""
        sampling_B = self.rows.width_B > 0
        used_N = fixed.windows(self.rows).used_N()
        window = Window.packed(
            self.rows.batch.slot_B[sampling_B].long(),
            self.rows.width_B[sampling_B].long(),
            self.rows.draft_BK[sampling_B],
            self.rows.num_tokens_B[sampling_B],
        )
        return verify(
            self.logits_NV[used_N].clone(),
            window,
            self.slots,
            tail=tail,
            rules=rules,
            custom=None,
            late_bits_NV=self.bits_NV[used_N] if is_late else None,
        )

    def at_fixed_shapes(self, tail: Tail, **more: Any) -> Settled:
        verdicts = fixed.verify(self.logits_NV, self.rows, self.slots, tail=tail, **more)
        sampling_B = self.rows.width_B > 0
        start_B = torch.arange(len(sampling_B)) * (self.k + 1)
        windows = Windows(
            self.rows.batch.slot_B[sampling_B].long(),
            start_B[sampling_B],
            self.rows.width_B[sampling_B].long(),
            self.rows.draft_BK[sampling_B],
            self.rows.num_tokens_B[sampling_B],
        )
        slots = self.slots
        limits = Limits(slots.eos_ids_SE, slots.stop_ids_SE, slots.min_len_S, slots.max_len_S)
        return settle_windows_reference(verdicts, windows, limits)


def step_rows(slots: Slots, slot_B: Any, width_B: Any, draft_BK: Any) -> StepRows:
    batch, k = draft_BK.shape

    def ints(values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values)).int()

    none_B = torch.zeros(batch, dtype=torch.int32)
    slot = ints(slot_B)
    return StepRows(
        shape=StepShape(batch, batch * (k + 1), k, True),
        batch=BatchRows(none_B, none_B, none_B, slot, none_B, none_B, none_B),
        row_T=none_B,
        start_B=none_B,
        num_tokens_B=slots.num_tokens_S[slot.long()],
        width_B=ints(width_B),
        draft_BK=ints(draft_BK),
        sample_N=none_B,
        token_BW=none_B,
        count_B=none_B,
        last_B=none_B,
    )


def assert_same(settled: Settled, accepted: Accepted) -> None:
    assert torch.equal(settled.count_B, accepted.count_B)
    assert torch.equal(settled.token_BW, accepted.token_BW)
    assert torch.equal(settled.done_B, accepted.done_B)
    assert torch.equal(settled.num_drafts_B, accepted.num_drafts_B)
    assert torch.equal(settled.num_accepted_B, accepted.num_accepted_B)


@pytest.mark.parametrize("k", [0, 1, MAX_K])
@pytest.mark.parametrize("tail", list(Tail))
@pytest.mark.parametrize("seed", range(6))
def test_fixed_shapes_emit_the_same_tokens(seed: int, tail: Tail, k: int) -> None:
    state = State(seed, tail, k)
    before_NV = state.logits_NV.clone()
    assert_same(state.at_fixed_shapes(tail), state.as_it_is(tail, AcceptRules()))
    assert torch.equal(before_NV, state.logits_NV)  # logprobs are taken from them later


@pytest.mark.parametrize("seed", range(12))
def test_sampled_drafts_are_judged_alike(seed: int) -> None:
    state = State(seed, Tail.FULL, MAX_K, samples_drafts=True)
    assert_same(state.at_fixed_shapes(Tail.FULL), state.as_it_is(Tail.FULL, AcceptRules()))


@pytest.mark.parametrize("tail", list(Tail))
def test_broken_rows_end_the_same_requests(tail: Tail) -> None:
    for seed in range(4):
        state = State(seed, tail, 2, samples_drafts=tail is Tail.FULL)
        state.logits_NV[::4, 1] = torch.nan
        state.logits_NV[1::7] = -torch.inf
        settled = state.at_fixed_shapes(tail)
        accepted = state.as_it_is(tail, AcceptRules())
        assert torch.equal(settled.done_B, accepted.done_B)
        assert torch.equal(settled.count_B, accepted.count_B)


@pytest.mark.parametrize("seed", range(4))
def test_late_masks_bind_at_fixed_shapes(seed: int) -> None:
    state = State(seed, Tail.FULL, 2)
    settled = state.at_fixed_shapes(Tail.FULL, late_bits_NV=state.bits_NV)
    assert_same(settled, state.as_it_is(Tail.FULL, AcceptRules(), is_late=True))


@pytest.mark.parametrize("seed", range(4))
def test_logprobs_are_those_of_what_is_emitted(seed: int) -> None:
    for rates in (None, torch.full((MAX_K,), 0.7)):
        state = State(seed, Tail.FULL, MAX_K, samples_drafts=rates is None)
        accepted = state.as_it_is(Tail.FULL, AcceptRules(rates))
        is_forced = rates is not None
        verdicts = fixed.verify(
            state.logits_NV, state.rows, state.slots, tail=Tail.FULL, is_forced=is_forced
        )
        batch = state.rows.shape.rows
        shape = (2, batch, MAX_K + 1, 1 + 5)
        results = LogprobResults(
            torch.zeros(shape, dtype=torch.int32),
            torch.zeros(shape),
            torch.zeros(shape[:3], dtype=torch.int32),
            torch.tensor([7], dtype=torch.int32),
        )
        fixed.write_logprobs(
            state.logits_NV, verdicts, state.rows, state.slots, results, rates_K=rates
        )
        assert not results.ids_EBWT[0].any()  # the other turn's entry
        wanted = accepted.logprobs
        assert wanted is not None
        row_B = (state.rows.width_B > 0).nonzero()[:, 0]
        for r, row in enumerate(wanted.row_R.tolist()):
            b, count = int(row_B[row]), int(accepted.count_B[row])
            assert state.slots.features_S[state.rows.batch.slot_B[b]] & LOGPROBS
            top = 1 + int(wanted.num_top_R[r])
            ids, values = results.ids_EBWT[1, b, :count], results.values_EBWT[1, b, :count]
            assert torch.equal(ids[:, :top], wanted.ids_RWT[r, :count, :top])
            torch.testing.assert_close(values[:, :top], wanted.values_RWT[r, :count, :top])
            assert torch.equal(results.rank_EBW[1, b, :count], wanted.rank_RW[r, :count])


def test_drafts_of_int32_rows_equal_those_of_the_kernel_contract() -> None:
    state = State(1, Tail.SAMPLE, MAX_K, samples_drafts=True)
    slots = state.slots
    prob_SKV = slots.draft_probs_SKV
    assert prob_SKV is not None
    slot_B = state.rows.batch.slot_B[:8]
    logits_BV = state.logits_NV[:8]
    logits_BV[0, 2] = torch.nan
    position_B = state.rows.num_tokens_B[:8]
    mine = prob_SKV.clone()
    token_B = sampling.draft(logits_BV, slot_B, position_B, fixed.knobs_of(slots), mine, 1)
    wanted_B = propose_tokens(logits_BV, slot_B, position_B, 1, slots)
    assert torch.equal(token_B, wanted_B)
    drawn_B = slot_B[slots.temperature_S[slot_B.long()] > 0].long()
    torch.testing.assert_close(mine[drawn_B, 1, :VOCAB], prob_SKV[drawn_B, 1, :VOCAB])


@pytest.mark.trap("E2", "E3")
def test_rejection_at_fixed_shapes_keeps_the_targets_distribution() -> None:
    """One draft from a very different q: emitted tokens still follow p, the rejected ones too."""
    count, vocab = 25_000, 5
    slots = Slots(1, 8, 1, vocab, CPU, draft_vocab_size=vocab)
    slots.temperature_S[0] = 0.9
    slots.top_p_S[0] = 0.97
    slots.seed_S2[0, 0] = 77
    slots.drafts_onehot_S[0] = 0
    slots.max_len_S.fill_(2**31 - 1)
    target_V = torch.tensor([1.0, 0.2, -0.5, -1.0, -6.0])
    draft_V = torch.tensor([-1.0, 1.5, 0.5, 0.0, 1.0])
    slots.num_tokens_S[0] = 0
    position_B = torch.arange(count, dtype=torch.int32) * 2
    slot_B = torch.zeros(count, dtype=torch.int32)
    prob_SKV = slots.draft_probs_SKV
    assert prob_SKV is not None
    knobs = fixed.knobs_of(slots)
    draft_B = sampling.draft(draft_V.expand(count, -1), slot_B, position_B, knobs, prob_SKV, 0)
    rows = step_rows(slots, slot_B, np.full(count, 2), draft_B[:, None])
    rows.num_tokens_B = position_B
    verdicts = fixed.verify(target_V.expand(2 * count, -1), rows, slots, tail=Tail.FULL)
    assert verdicts.ok_N is not None
    ok_B = verdicts.ok_N[::2]
    emitted_B = torch.where(ok_B, draft_B, verdicts.token_N[::2])
    p_V = distributions(target_V[None], knobs.at(torch.zeros(1, dtype=torch.int64)))[0].double()
    q_V = prob_SKV[0, 0].double()
    used_V = p_V > 0
    counts_V = torch.bincount(emitted_B, minlength=vocab)
    assert counts_V[~used_V].sum() == 0
    expected = (p_V[used_V] / p_V.sum() * count).numpy()
    assert stats.chisquare(counts_V[used_V].numpy(), expected).pvalue > 1e-4
    overlap = float(torch.minimum(p_V, q_V).sum())
    assert abs(float(ok_B.double().mean()) - overlap) < 4 * (0.25 / count) ** 0.5
