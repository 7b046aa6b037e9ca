"""k follows a request's own acceptance: down by rejected drafts only, up again by a probe."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.scheduler.adaptive import PROBE_K, PROBE_PERIOD, DraftLengths
from paceline.speculation import SpeculativeConfig
from paceline.step import StepResult
from tests.fakes import runner_info

K = 5


def lengths(*, adaptive: bool = True, pays: bool = False) -> DraftLengths:
    spec = SpeculativeConfig(method="ngram", num_speculative_tokens=K, adaptive=adaptive)
    info = runner_info(max_k=K, num_slots=2, pays_for_missing_drafts=pays)
    return DraftLengths(info, spec)


def learn(draft: DraftLengths, steps: int, drafts: int, accepted: int, first: int = 2) -> None:
    for step in range(first, first + steps):
        none = np.zeros(1, np.int32)
        uids = np.zeros(1, np.int64)
        counts = none + np.int32(drafts), none + np.int32(accepted)
        result = StepResult(step, uids, none, none[:, None], none, *counts)
        draft.learn(np.zeros(1, np.intp), draft.wanted(step)[:1], result)


def k_of(draft: DraftLengths, step: int = 5) -> int:
    return int(draft.wanted(step)[0])


@pytest.mark.parametrize(("asked", "k"), [(None, K), (0, 0), (2, 2), (99, K)])
def test_a_request_starts_with_what_it_asked_for(asked: int | None, k: int) -> None:
    draft = lengths()
    draft.start(0, asked)
    assert k_of(draft) == k


def test_rejected_drafts_take_k_down_to_nothing_in_a_few_steps() -> None:
    draft = lengths()
    draft.start(0, None)
    learn(draft, steps=4, drafts=K, accepted=0)
    assert 0 < k_of(draft) < K
    learn(draft, steps=12, drafts=2, accepted=0)
    assert k_of(draft) == 0


def test_a_drafter_without_a_match_costs_nothing_and_lowers_nothing() -> None:
    draft = lengths()
    draft.start(0, None)
    learn(draft, steps=200, drafts=0, accepted=0)
    assert k_of(draft) == K


def test_with_fixed_shapes_a_drafter_without_a_match_is_not_waited_for() -> None:
    """The row is computed at its full width, whether there are drafts or not."""
    draft = lengths(pays=True)
    draft.start(0, None)
    learn(draft, steps=40, drafts=0, accepted=0)
    assert k_of(draft) == 0
    learn(draft, steps=1, drafts=0, accepted=0, first=2 * PROBE_PERIOD)  # proposes
    learn(draft, steps=7, drafts=PROBE_K, accepted=PROBE_K, first=2 * PROBE_PERIOD + 1)
    assert k_of(draft) > 0


def test_accepted_drafts_keep_k_and_never_exceed_what_was_asked_for() -> None:
    draft = lengths()
    draft.start(0, 3)
    learn(draft, steps=50, drafts=3, accepted=3)
    assert k_of(draft) == 3


def test_a_cold_request_probes_in_two_steps_of_each_period_and_recovers() -> None:
    draft = lengths()
    draft.start(0, None)
    learn(draft, steps=40, drafts=K, accepted=0)
    wanted = [k_of(draft, step) for step in range(2 * PROBE_PERIOD)]
    assert wanted == ([PROBE_K] * 2 + [0] * (PROBE_PERIOD - 2)) * 2
    learn(draft, steps=8, drafts=PROBE_K, accepted=PROBE_K)
    assert k_of(draft) > PROBE_K


def test_a_probe_keeps_to_the_requests_own_limit() -> None:
    draft = lengths()
    draft.start(0, 1)
    learn(draft, steps=40, drafts=1, accepted=0)
    assert k_of(draft, PROBE_PERIOD) == 1
    draft.start(0, 0)
    assert k_of(draft, PROBE_PERIOD) == 0


def test_a_new_request_in_the_slot_starts_afresh() -> None:
    draft = lengths()
    draft.start(0, None)
    learn(draft, steps=40, drafts=K, accepted=0)
    draft.start(0, None)
    learn(draft, steps=4, drafts=0, accepted=0)
    assert k_of(draft) == K


def forced_lengths() -> DraftLengths:
    spec = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=K,
        rejection_sample_method="synthetic",
        synthetic_acceptance_length=1.0,
    )
    assert spec.adaptive
    return DraftLengths(runner_info(max_k=K, num_slots=2), spec)


@pytest.mark.parametrize(
    "draft", [lengths(adaptive=False), forced_lengths()], ids=["off", "forced"]
)
def test_k_stays_without_adaptive_and_under_forced_acceptance(draft: DraftLengths) -> None:
    draft.start(0, None)
    learn(draft, steps=40, drafts=K, accepted=0)
    assert k_of(draft) == K
