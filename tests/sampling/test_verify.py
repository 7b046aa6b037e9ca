"""Verification at its edges: missing drafts, broken logits, forced acceptance, late masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import paceline.kernels.verify.reference
from paceline.kernels.rng import reference as rng
from paceline.kernels.rows import WindowRows
from paceline.kernels.sampling.reference import Knobs, distributions
from paceline.kernels.verify.reference import ROWS_AT_ONCE
from paceline.request import Done, EngineRequest, SamplingParams
from paceline.sampling.processors import pack_bits
from paceline.sampling.verify import SamplingMode, Synthetic, conditional_rates, synthetic_rates
from paceline.state.slots import LOGPROBS, MIN_TOKENS, PENALTIES, Slots
from tests.kernels.cases.step import COIN_SEEDS
from tests.sampling.simulation import NoiseModel, Simulation
from tests.sampling.verifying import Accepted, accept, late_bits

VOCAB = 32
CPU = torch.device("cpu")


def fresh_slots(count: int, *, temperature: float = 0.0, draft_vocab_size: int = 0) -> Slots:
    slots = Slots(count, 64, 4, VOCAB, CPU, draft_vocab_size=draft_vocab_size)
    slots.temperature_S.fill_(temperature)
    slots.seed_S2[:, 0] = torch.arange(count + 1, dtype=torch.int32)
    slots.prompt_len_S.fill_(2)
    slots.max_len_S.fill_(60)
    slots.tokens_SL.copy_(torch.arange(64, dtype=torch.int32) % VOCAB)
    return slots


def window_of(drafts: list[list[int]], length: int = 10) -> WindowRows:
    batch = len(drafts)
    return WindowRows.packed(
        torch.arange(batch),
        torch.full((batch,), len(drafts[0]) + 1),
        torch.tensor(drafts, dtype=torch.int32).reshape(batch, -1),
        torch.full((batch,), length, dtype=torch.int32),
    )


def some_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


check = accept


PATTERNS = [[-1, -1, -1], [-1, 4, 5], [4, -1, -1], [4, -1, 6], [4, 5, -1]]
ALWAYS = Synthetic(torch.ones(64, 3))


@pytest.mark.trap("E1")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["one-hot", "sampled", "synthetic"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_missing_draft_is_never_accepted(pattern: list[int], mode: str, temperature: float) -> None:
    slots = fresh_slots(40, temperature=temperature, draft_vocab_size=VOCAB)
    if mode == "sampled":
        slots.drafts_onehot_S.fill_(False)
        assert slots.draft_probs_SKV is not None
        slots.draft_probs_SKV[:, :, -1] = 1e-30  # where an index of -1 would read
    logits = some_logits(4 * 40)
    logits[:, [4, 5]] += 4.0
    synthetic = ALWAYS if mode == "synthetic" else None
    accepted = check(logits, window_of([pattern] * 40), slots, synthetic=synthetic)
    real = [*pattern, -1].index(-1)  # drafts before the first gap
    assert (accepted.num_accepted_B <= real).all()
    assert (accepted.num_drafts_B == sum(d >= 0 for d in pattern)).all()
    assert (accepted.count_B >= 1).all()
    for row, count in zip(accepted.token_BW.tolist(), accepted.count_B.tolist(), strict=True):
        assert all(0 <= token < VOCAB for token in row[:count])
        assert row[count:] == [-1] * (4 - count)
    if mode == "synthetic":
        assert (accepted.num_accepted_B == real).all()


@pytest.mark.trap("E7")
@pytest.mark.parametrize("mode", list(SamplingMode))
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_unusable_logits_end_one_request_and_no_other(mode: SamplingMode, poison: float) -> None:
    temperature = 0.0 if mode is SamplingMode.GREEDY else 0.9
    slots = fresh_slots(4, temperature=temperature)
    if mode is SamplingMode.FULL:
        slots.features_S.fill_(LOGPROBS | PENALTIES)
        slots.num_logprobs_S.fill_(3)
        slots.repetition_S.fill_(1.2)
    window = window_of([[1, 2]] * 4)
    logits = some_logits(12)
    clean = check(logits, window, slots, mode=mode)
    logits[3, 7] = poison  # the second request, at its first position
    broken = check(logits, window, slots, mode=mode)
    assert broken.done_B.tolist() == [0, Done.ERROR, 0, 0]
    assert broken.count_B[1] == 1
    assert 0 <= int(broken.token_BW[1, 0]) < VOCAB
    others = [0, 2, 3]
    assert torch.equal(broken.token_BW[others], clean.token_BW[others])
    assert torch.isfinite(broken.values_BWT).all()
    assert broken.ids_BWT.max() < VOCAB


def test_broken_row_behind_accepted_drafts_keeps_what_came_before() -> None:
    slots = fresh_slots(1)
    logits = some_logits(3)
    best = logits.argmax(-1).tolist()
    logits[1, 0] = float("nan")
    accepted = check(logits, window_of([best[:2]]), slots, mode=SamplingMode.GREEDY)
    assert accepted.token_BW[0, 0] == best[0]
    assert accepted.count_B[0] == 2
    assert accepted.done_B[0] == Done.ERROR


def test_request_that_may_say_nothing_ends_with_an_error() -> None:
    request = EngineRequest(
        uid=1,
        prompt_token_ids=[1],
        params=SamplingParams(temperature=0.0, min_tokens=4, allowed_token_ids=[3], seed=0),
        eos_token_ids=(3,),
    )
    healthy = EngineRequest(
        uid=2, prompt_token_ids=[1], params=SamplingParams(temperature=0.0, max_tokens=3, seed=0)
    )
    outputs = Simulation([request, healthy], NoiseModel(VOCAB)).run()
    assert [out.done for out in outputs] == [Done.ERROR, Done.LENGTH]


@pytest.mark.parametrize("mode", [SamplingMode.SAMPLE, SamplingMode.FULL])
def test_greedy_rows_are_the_same_in_every_tail(mode: SamplingMode) -> None:
    slots = fresh_slots(6)
    slots.temperature_S[3:] = 1.0
    logits = some_logits(18)
    logits[:, 5] = logits.amax(-1)  # ties
    window = window_of([[5, 5]] * 6)
    mixed = check(logits, window, slots, mode=mode)
    greedy = check(logits, window, slots, mode=SamplingMode.GREEDY)
    assert torch.equal(mixed.token_BW[:3], greedy.token_BW[:3])


def test_greedy_row_accepts_a_sampled_draft_only_if_it_is_the_best_token() -> None:
    slots = fresh_slots(2, draft_vocab_size=VOCAB)
    slots.drafts_onehot_S.fill_(False)
    assert slots.draft_probs_SKV is not None
    slots.draft_probs_SKV.fill_(1e-9)  # p / q would accept anything
    logits = some_logits(4)
    best = logits.argmax(-1).tolist()
    accepted = check(logits, window_of([[best[0]], [(best[2] + 1) % VOCAB]]), slots)
    assert accepted.num_accepted_B.tolist() == [1, 0]
    assert accepted.token_BW[1, 0] == best[2]


@pytest.mark.trap("E9")
def test_rejection_holds_few_distributions_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, k = 100, 4
    slots = fresh_slots(batch, temperature=1.0, draft_vocab_size=VOCAB)
    slots.drafts_onehot_S.fill_(False)
    assert slots.draft_probs_SKV is not None
    slots.draft_probs_SKV.fill_(1 / VOCAB)
    window = window_of([[1, 2, 3, 4]] * batch)
    logits = some_logits(batch * (k + 1))
    rows_at_once = []

    def recorded(logits_NV: Tensor, knobs: Knobs) -> Tensor:
        rows_at_once.append(len(logits_NV))
        return distributions(logits_NV, knobs)

    monkeypatch.setattr(paceline.kernels.verify.reference, "distributions", recorded)
    accepted = check(logits, window, slots)
    assert sum(rows_at_once) == batch * k
    assert max(rows_at_once) == ROWS_AT_ONCE
    monkeypatch.setattr(paceline.kernels.verify.reference, "ROWS_AT_ONCE", batch * k)
    at_once = check(logits, window, slots)
    assert torch.equal(accepted.token_BW, at_once.token_BW)


def test_sample_does_not_depend_on_its_neighbours() -> None:
    slots = fresh_slots(8, temperature=1.0)
    slots.top_p_S[:4] = 0.8
    logits = some_logits(8)
    together = check(logits, window_of([[]] * 8), slots, mode=SamplingMode.SAMPLE)
    for b in range(8):
        window = WindowRows.packed(
            torch.tensor([b]),
            torch.tensor([1]),
            torch.empty((1, 0), dtype=torch.int32),
            torch.tensor([10], dtype=torch.int32),
        )
        alone = check(logits[b : b + 1], window, slots, mode=SamplingMode.SAMPLE)
        assert alone.token_BW[0, 0] == together.token_BW[b, 0]


@pytest.mark.parametrize(
    ("length", "rates"),
    [
        (1, (0, 0, 0)),
        (1.25, (0.25, 0, 0)),
        (2, (1, 0, 0)),
        (2.5, (1, 0.5, 0)),
        (3, (1, 1, 0)),
        (3.75, (1, 1, 0.75)),
        (4, (1, 1, 1)),
        (1.5, (0.5,)),
        (2, (1,)),
        (4.5, (1, 1, 1, 0.5, 0, 0, 0)),
    ],
)
def test_an_acceptance_length_is_whole_drafts_and_a_chance_of_one_more(
    length: float, rates: tuple[float, ...]
) -> None:
    assert synthetic_rates(length, len(rates)) == rates
    assert 1 + sum(rates) == length
    assert conditional_rates(rates) == rates


@pytest.mark.parametrize(
    ("rates", "conditional"),
    [
        ((0.8, 0.4, 0.1), (0.8, 0.5, 0.25)),
        ((0.7, 0.7, 0.7), (0.7, 1, 1)),
        ((0.5, 0, 0), (0.5, 0, 0)),
        ((0, 0, 0), (0, 0, 0)),
        ((1, 1, 1), (1, 1, 1)),
        ((0.25,), (0.25,)),
    ],
)
def test_rates_become_those_of_one_draft_given_the_ones_before(
    rates: tuple[float, ...], conditional: tuple[float, ...]
) -> None:
    assert conditional_rates(rates) == conditional


def forced(rates: tuple[float, ...], temperature: float, batch: int = 4000) -> Accepted:
    """One step of this many windows, each with its own coins."""
    k = len(rates)
    slots = fresh_slots(1, temperature=temperature)
    slots.max_len_S.fill_(2**31 - 1)
    window = WindowRows.packed(
        torch.zeros(batch, dtype=torch.int64),
        torch.full((batch,), k + 1),
        torch.full((batch, k), 9, dtype=torch.int32),
        torch.arange(batch, dtype=torch.int32) * 8,
    )
    mode = SamplingMode.SAMPLE if temperature else SamplingMode.GREEDY
    synthetic = Synthetic(torch.tensor([conditional_rates(rates)]))
    return check(torch.zeros(batch * (k + 1), VOCAB), window, slots, mode=mode, synthetic=synthetic)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rates", [(0.9, 0.45, 0.1), (1.0, 0.5, 0.5), (0.3, 0.0, 0.0)], ids=str)
def test_forced_acceptance_meets_its_rates(rates: tuple[float, ...], temperature: float) -> None:
    accepted = forced(rates, temperature)
    num = accepted.num_accepted_B
    for j, rate in enumerate(rates):
        share = float((num > j).float().mean())
        assert abs(share - rate) <= 5 * (rate * (1 - rate) / len(num)) ** 0.5
    assert (accepted.count_B == num + 1).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("length", "counts"),
    [(1, [1]), (1.25, [1, 2]), (2, [2]), (2.5, [2, 3]), (3.9, [3, 4]), (4, [4])],
)
def test_a_forced_step_emits_one_of_the_two_lengths_next_to_the_asked_one(
    length: float, counts: list[int], temperature: float
) -> None:
    accepted = forced(synthetic_rates(length, 3), temperature)
    assert accepted.count_B.unique().tolist() == counts
    assert float(accepted.count_B.float().mean()) == pytest.approx(length, abs=0.04)


def test_a_rate_of_one_always_accepts_and_a_rate_of_nothing_never_does() -> None:
    """With the largest coin that there is, and with one of the smallest."""
    slots = fresh_slots(2)
    slots.seed_S2[:2] = torch.tensor([(seed, 0) for seed in COIN_SEEDS])
    position_2 = torch.tensor([3, 4], dtype=torch.int32)
    high, low = rng.uniform(slots.seed_S2[:2], position_2, rng.ACCEPT).tolist()
    assert high == 1 - 2**-24  # the next number is 1
    assert 0 < low < 1e-8
    synthetic = Synthetic(torch.tensor(((1.0, 0.0),) * 2))
    window = window_of([[9, 9]] * 2, length=3)
    accepted = check(some_logits(6), window, slots, mode=SamplingMode.GREEDY, synthetic=synthetic)
    assert accepted.num_accepted_B.tolist() == [1, 1]


@pytest.mark.trap("E11")
def test_forced_acceptance_does_not_stop_before_min_tokens() -> None:
    slots = fresh_slots(1)
    slots.features_S.fill_(MIN_TOKENS)
    slots.eos_ids_SE[:, 0] = 9
    slots.min_len_S.fill_(12)
    logits = torch.zeros(4, VOCAB)
    logits[:, 9] = 5.0
    accepted = check(logits, window_of([[9, 9, 9]]), slots, synthetic=ALWAYS)
    assert accepted.token_BW[0].tolist() == [9, 9, 9, -1]
    assert accepted.done_B[0] == Done.EOS


def test_counts_drafts_among_emitted_tokens_only() -> None:
    slots = fresh_slots(1)
    slots.stop_ids_SE[:, 3] = 6
    logits = torch.zeros(4, VOCAB)
    logits[torch.arange(4), torch.tensor([5, 6, 7, 8])] = 1.0
    accepted = check(logits, window_of([[5, 6, 7]]), slots, mode=SamplingMode.GREEDY)
    assert accepted.token_BW[0].tolist() == [5, 6, -1, -1]
    assert accepted.num_accepted_B[0] == 2
    assert accepted.num_drafts_B[0] == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_late_masks_bind_at_each_window_position(temperature: float) -> None:
    slots = fresh_slots(2, temperature=temperature)
    window = window_of([[3, 4], [3, 4]])
    everything = pack_bits(range(VOCAB), VOCAB)
    masks = [pack_bits([3], VOCAB), pack_bits([7], VOCAB), pack_bits([9], VOCAB)]
    late = torch.stack([torch.from_numpy(m) for m in [*masks, *[everything] * 3]])
    logits = some_logits(6)
    accepted = check(logits, window, slots, late=late_bits(late, window))
    assert accepted.token_BW[0].tolist() == [3, 7, -1]
    free = check(logits, window, slots)
    assert torch.equal(accepted.token_BW[1], free.token_BW[1])


def test_empty_batch_gives_an_empty_result() -> None:
    window = WindowRows.packed(
        torch.empty(0, dtype=torch.int64),
        torch.empty(0, dtype=torch.int64),
        torch.empty((0, 3), dtype=torch.int32),
        torch.empty(0, dtype=torch.int32),
    )
    for mode in SamplingMode:
        accepted = check(torch.empty(0, VOCAB), window, fresh_slots(1), mode=mode)
        assert accepted.token_BW.shape == (0, 4)


@pytest.mark.trap("E15")
@pytest.mark.parametrize("mode", list(SamplingMode))
def test_results_are_int32(mode: SamplingMode) -> None:
    slots = fresh_slots(2)
    slots.features_S.fill_(LOGPROBS)
    slots.num_logprobs_S.fill_(2)
    accepted: Any = check(some_logits(4), window_of([[1], [2]]), slots, mode=mode)
    for name in ("token_BW", "count_B", "done_B", "num_drafts_B", "num_accepted_B"):
        assert getattr(accepted, name).dtype == torch.int32, name
