"""Which drafts pay: what steps cost, what survives, and k of each row."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from paceline.scheduler.adaptive import (
    AUTO_PERIOD,
    AUTO_PROBE_K,
    AUTO_TURNS,
    REST_AT,
    DraftLengths,
    Survival,
)
from paceline.scheduler.step_cost import Choice, StepCost, choose
from paceline.speculation import SpeculativeConfig
from paceline.step import Floats, StepPlan, StepResult
from tests.fakes import runner_info
from tests.tiers import first_or_more

K = 7
KS = tuple(range(K + 1))


def cost_of(base: float, token: float, per_pass: float = 0.0, steps: int = 400) -> StepCost:
    """Has measured steps of all sizes."""
    cost = StepCost()
    for number in range(steps):
        rows, k = 1 + number % 17, number * 5 % (K + 1)
        tokens = rows * (k + 1)
        cost.measured(base + token * tokens + per_pass * k, tokens, k, rows * k, 100 * rows)
    return cost


def survival_of(*chances: float) -> Floats:
    survival_RK: Floats = np.power(np.array(chances)[:, None], np.arange(1, K + 1)).astype("f4")
    return survival_RK


# ---- the curve


def test_times_meet_what_was_measured_and_never_fall() -> None:
    cost = cost_of(base=8e-3, token=0.5e-3, per_pass=0.4e-3)
    for rows, k in ((1, 0), (1, 7), (8, 3), (16, 0), (16, 7)):
        expected = 8e-3 + 0.5e-3 * rows * (k + 1) + 0.4e-3 * k
        found = cost.times([rows * (k + 1)], k, rows * k, 100 * rows)[0]
        assert found == pytest.approx(expected, 0.15)
    assert (np.diff(cost.times(np.arange(1, 300), 3, 48)) >= 0).all()
    for more in ({"k": 4}, {"drafts_N": 60}, {"kv_tokens": 9000}):
        sizes = {"k": 3, "drafts_N": 48, "kv_tokens": 100}
        assert cost.times([40], **(sizes | more))[0] >= cost.times([40], **sizes)[0]


def test_a_curve_that_is_flat_first_and_rises_later_is_found() -> None:
    cost = StepCost(is_fixed=True)
    for number in range(600):
        tokens = int(2 ** (number % 11))
        cost.measured(10e-3 + 50e-6 * max(tokens - 128, 0), tokens, 0, 0, 0)
    assert cost.of_one_more(16) < 10e-6
    assert 35e-6 < cost.of_one_more(1024) < 65e-6


def test_before_a_step_was_measured_there_is_a_prior() -> None:
    cost = StepCost()
    assert cost.times([4], 3, 3)[0] > cost.times([1], 0, 0)[0] > 0
    cost.measured(0.0, 1, 0, 0, 0)  # a device that tells no times
    assert cost.num_measured == 0


def test_a_few_disturbed_steps_change_little() -> None:
    cost = cost_of(base=8e-3, token=0.5e-3)
    before = cost.times([8], 3, 6, 200)[0]
    for _ in range(5):
        cost.measured(4.0, 8, 3, 6, 200)
    assert cost.times([8], 3, 6, 200)[0] < 1.3 * before


# ---- the choice


def test_no_draft_is_admitted_where_tokens_cost_as_much_as_steps() -> None:
    assert choose(survival_of(0.6, 0.2), cost_of(0.0, 1e-3), KS).k == 0


def test_all_good_drafts_are_admitted_where_tokens_are_free() -> None:
    choice = choose(survival_of(0.9, 0.9), cost_of(10e-3, 1e-9), KS)
    assert choice.of(survival_of(0.9, 0.9)).tolist() == [K, K]


@pytest.mark.parametrize("per_pass", [0.0, 0.5e-3])
def test_the_choice_is_the_best_of_all(per_pass: float) -> None:
    """Against every set of rows' first drafts."""
    cost = cost_of(5e-3, 1e-3, per_pass)
    chances = (0.9, 0.6, 0.2)
    survival_RK = survival_of(*chances)
    best, best_k = 0.0, (0, 0, 0)
    for ks in np.ndindex(K + 1, K + 1, K + 1):
        gain = 3 + sum(float(survival_RK[row, :k].sum()) for row, k in enumerate(ks))
        rate = gain / float(cost.times([3 + sum(ks)], max(ks), sum(ks))[0])
        if rate > best:
            best, best_k = rate, ks
    choice = choose(survival_RK, cost, KS)
    assert tuple(choice.of(survival_RK)) == best_k
    assert choice.rate == pytest.approx(best)
    assert best_k[0] > best_k[2]


def test_better_rows_get_more_drafts_and_fuller_batches_fewer() -> None:
    cost = cost_of(8e-3, 0.6e-3)
    counts = []
    for copies in (1, 6):
        survival_RK = survival_of(*(0.9, 0.6, 0.2) * copies)
        k_R = choose(survival_RK, cost, KS).of(survival_RK)
        assert k_R[0] > k_R[1] >= k_R[2]
        counts.append(int(k_R[0]))
    assert counts[0] > counts[1]


def test_padded_rows_have_a_common_width_and_fill_it() -> None:
    survival_RK = survival_of(0.9, 0.2)
    choice = choose(survival_RK, cost_of(10e-3, 0.1e-3), (0, 1, 3, 7), is_padded=True)
    assert choice.k in (1, 3, 7)
    assert choice.of(survival_RK).tolist() == [choice.k] * 2


def test_a_draft_that_is_not_allowed_is_not_admitted() -> None:
    survival_RK = survival_of(0.9, 0.9)
    survival_RK[1, 2:] = 0.0
    for is_padded in (False, True):
        choice = choose(survival_RK, cost_of(10e-3, 1e-9), KS, is_padded=is_padded)
        assert choice.of(survival_RK).tolist() == [K, 2]
    assert Choice(0, 1.0, 1.0).of(survival_RK).tolist() == [0, 0]


# ---- survival


@pytest.mark.parametrize("chance", [0.2, 0.6, 0.9])
def test_survival_is_learned_by_position(chance: float) -> None:
    survival, rng = Survival(2, K, is_pooled=True), np.random.default_rng(0)
    for step in range(400):
        accepted = next((j for j in range(K) if rng.random() > chance), K)
        survival.learn(np.zeros(1, np.intp), np.full(1, K, "i4"), np.full(1, accepted, "i4"))
        if step % 4 == 0:
            survival.fade(0.98, 0.98)
    found_K = survival.of(np.zeros(1, np.intp))[0]
    for j in range(3):
        assert found_K[j] == pytest.approx(chance ** (j + 1), abs=0.12)
    assert (np.diff(found_K) < 0).all()
    assert survival.expected == pytest.approx(chance, abs=0.05)  # what a new request is taken for


# ---- k by slot


def lengths(
    num_slots: int = 4, *, pays: bool = False, **values: object
) -> tuple[DraftLengths, StepCost]:
    keys = {"num_speculative_tokens": "auto", "max_num_speculative_tokens": K, **values}
    spec = SpeculativeConfig.from_mapping({"method": "ngram", **keys})
    info = runner_info(max_k=K, num_slots=num_slots, pays_for_missing_drafts=pays)
    draft = DraftLengths(info, spec)
    for slot in range(num_slots):
        draft.start(slot, None)
    return draft, draft._rank.cost


def run_steps(
    draft: DraftLengths, chances: list[float], steps: int, base: float, token: float, first: int = 1
) -> float:
    """A simulated device with these costs. Returns tokens per second."""
    rng, rows = np.random.default_rng(1), len(chances)
    slots, emitted, time_s, proposed = np.arange(rows), 0, 0.0, 0
    for step in range(first, first + steps):
        k_B = draft.wanted(step, rows)[:rows]
        drafts_B = np.minimum(k_B, proposed).astype(np.int32)
        proposed = int(k_B.max())
        accepted_B = np.zeros(rows, np.int32)
        for row, chance in enumerate(chances):
            while accepted_B[row] < drafts_B[row] and rng.random() < chance:
                accepted_B[row] += 1
        seconds = base + token * (rows + int(drafts_B.sum())) + 0.02 * base * proposed
        ones, uids = np.ones(rows, np.int32), np.arange(rows)
        plan = StepPlan(step, proposed, uids, slots.astype("i4"), k_B + 1, k_B, ones > 0, ones * 90)
        result = StepResult(step, uids, ones, ones[:, None], 0 * ones, drafts_B, accepted_B)
        result.device_start_s, result.device_end_s = time_s, time_s + seconds
        draft.learn(slots, k_B, result)
        draft.measure(plan, slots, result, 90 * rows)
        time_s += seconds
        emitted += rows + int(accepted_B.sum())
    return emitted / time_s


LOADS = list(product((1, 4, 16), (0.002, 0.05, 0.3, 1.5), (0.2, 0.6, 0.9, None)))


@pytest.mark.parametrize(("rows", "token", "chance"), first_or_more(LOADS, LOADS[::7].__contains__))
def test_auto_is_near_the_best_k_of_each_load(
    rows: int, token: float, chance: float | None
) -> None:
    """Nothing is known of the device before: it is 30 times faster or slower than the prior."""
    chances = [chance or (0.9, 0.6, 0.2)[row % 3] for row in range(rows)]
    draft, _ = lengths(rows)
    run_steps(draft, chances, 200, 0.01, 0.01 * token)
    found = run_steps(draft, chances, 600, 0.01, 0.01 * token, first=201)
    best = 0.0
    for k in KS:
        tokens = sum(math.fsum(c**j for j in range(k + 1)) for c in chances)
        best = max(best, tokens / (0.01 + 0.01 * token * rows * (k + 1) + 2e-4 * k))
    assert found > 0.9 * best
    assert found > 0.96 * rows / (0.01 + 0.01 * token * rows)  # no drafts


def test_a_request_keeps_to_its_own_limit() -> None:
    draft, _ = lengths()
    draft.start(1, 2)
    draft.start(2, 0)
    for step in range(3 * AUTO_PERIOD):
        k_S = draft.wanted(step, 4)
        assert k_S[1] <= 2
        assert k_S[2] == 0
    run_steps(draft, [0.9] * 4, 200, 0.01, 1e-6)
    assert draft.wanted(205, 4).tolist() == [K, 2, 0, K]


def test_cold_requests_are_tried_again_in_turn_and_recover() -> None:
    rows = 8
    draft, _ = lengths(rows)
    run_steps(draft, [0.0] * rows, 300, 0.01, 0.004)
    tried = [draft.wanted(period * AUTO_PERIOD, rows) for period in range(AUTO_TURNS)]
    assert np.array(tried).sum(axis=0).tolist() == [AUTO_PROBE_K] * rows
    assert draft.wanted(5, rows).max() == 0
    run_steps(draft, [1.0] * rows, 600, 0.01, 0.0005, first=301)
    assert draft.wanted(905, rows).min() > 3


def test_one_step_of_a_period_measures_what_no_drafts_cost() -> None:
    draft, _ = lengths()
    run_steps(draft, [0.9] * 4, 100, 0.01, 1e-6)
    at_rest = [step for step in range(AUTO_PERIOD) if not draft.wanted(step, 4).any()]
    assert at_rest == [REST_AT]


def test_steps_with_prompts_have_fewer_drafts_where_full_steps_are_slow() -> None:
    draft, cost = lengths()
    for _ in range(40):
        cost.measured(2.0, 2048, 0, 0, 0)
        cost.measured(0.01, 4, 0, 0, 0)
        cost.measured(0.0101, 32, 7, 28, 0)
    draft._rank.decide(draft._allowed(np.arange(4)), 0)
    draft._set_auto(np.arange(4))
    assert draft.wanted(5, 4).min() > draft.wanted(5, 4, is_mixed=True).max()


def test_fixed_shapes_use_the_widths_that_are_captured() -> None:
    draft, _ = lengths(pays=True)
    run_steps(draft, [0.6] * 4, 100, 0.01, 0.0002)
    assert set(draft.wanted(5, 4).tolist()) <= {0, 1, 3, 7}


@pytest.mark.parametrize("number", [K, "auto"])
def test_k_by_batch_size_is_a_limit_and_gaps_keep_the_last(number: object) -> None:
    ranges = [[1, 2, 5], [4, 6, 1], [8, 9, 0]]
    keys = {"method": "ngram", "num_speculative_tokens": number}
    spec = SpeculativeConfig.from_mapping({**keys, "num_speculative_tokens_per_batch_size": ranges})
    draft = DraftLengths(runner_info(max_k=K, num_slots=12), spec)
    for slot in range(12):
        draft.start(slot, None)
    found = [int(draft.wanted(5, rows)[0]) for rows in range(1, 13)]
    most = [5, 5, 5, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert all(k <= limit for k, limit in zip(found, most, strict=True))
    assert number == "auto" or found == most


def run_chain(
    draft: DraftLengths, share: float, steps: int, chance: float = 0.9, first: int = 1
) -> tuple[float, float]:
    """One request. In a share of its steps seven drafts of the host are verified, in the others
    those of the drafter, which cost as much as half a step each. Returns the tokens of a second,
    and the drafts that the drafter makes in a step."""
    rng, slots, made, emitted, time_s = np.random.default_rng(1), np.arange(1), 0, 0, 0.0
    drafts = 0
    for step in range(first, first + steps):
        is_host = rng.random() < share
        k_B = draft.wanted(step, 1)[:1].copy()
        count, right = (7, 0.97) if is_host else (min(drafts, int(k_B[0])), chance)
        accepted = next((j for j in range(count) if rng.random() > right), count)
        drafts = int(draft.proposed(k_B, slots)[0])
        seconds = 0.01 + 0.001 * count + 0.005 * drafts
        one, k_B[0] = np.ones(1, np.int32), count
        plan = StepPlan(step, count, slots, slots.astype("i4"), k_B + 1, k_B, one > 0, one * 90)
        plan.draft_k, plan.draft_k_B = drafts, one * drafts
        counts = one * np.int32(count), one * np.int32(accepted)
        result = StepResult(step, slots, one, one[:, None], 0 * one, *counts)
        result.device_start_s, result.device_end_s = time_s, time_s + seconds
        draft.learn(slots, k_B, result, np.arange(int(is_host)))
        draft.measure(plan, slots, result, 90)
        time_s, made, emitted = time_s + seconds, made + drafts, emitted + 1 + accepted
    return emitted / time_s, made / steps


CHAIN = {"method": ["suffix", "eagle"], "model": "head", "num_speculative_tokens": K}


def chain_lengths() -> DraftLengths:
    """Of a chain with a fixed K."""
    spec = SpeculativeConfig.from_mapping(CHAIN)
    draft = DraftLengths(runner_info(max_k=K, num_slots=2), spec)
    draft.start(0, None)
    return draft


def test_a_drafter_that_costs_more_than_it_brings_rests_beside_the_host() -> None:
    """Alone it pays. Where the host has nine of ten steps, a token takes too little time."""
    draft = chain_lengths()
    run_chain(draft, 0.0, 400)
    assert run_chain(draft, 0.0, 200, first=401)[1] > 0.7
    run_chain(draft, 0.9, 200, first=601)
    assert run_chain(draft, 0.9, 200, first=801)[1] < 0.1
    run_chain(draft, 0.0, 200, first=1001)
    assert run_chain(draft, 0.0, 200, first=1201)[1] > 0.7, "it is tried again"


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("chance", [0.02, 0.6, 0.95])
def test_a_chain_is_as_fast_as_the_better_of_its_drafters(share: float, chance: float) -> None:
    draft, alone = chain_lengths(), chain_lengths()
    run_chain(draft, share, 300, chance)
    run_chain(alone, 0.0, 300, chance)
    chain, _ = run_chain(draft, share, 400, chance, first=301)
    drafter, _ = run_chain(alone, 0.0, 400, chance, first=301)
    nothing = chain_lengths()
    nothing.start(0, 0)
    host, _ = run_chain(nothing, share, 400, chance, first=301)
    assert chain > 0.97 * max(drafter, host)


def test_drafts_that_the_host_will_replace_are_not_made() -> None:
    draft = chain_lengths()
    draft.start(1, None)
    run_chain(draft, 0.0, 200)
    k_S = draft.wanted(205, 2)
    draft.use_S[:] = 1.0, 0.1
    made = draft.proposed(k_S, np.arange(2))
    assert made[0] == k_S[0] > 0
    assert made[1] == 0
    assert k_S[1] > 0
