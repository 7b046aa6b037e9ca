"""Suffix decoding and chains in the loop: host and device agree, and no token changes."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.scheduler import lookups
from tests.engine.harness import Harness, ModThree, Runs, Stream, request
from tests.fakes import runner_info

VOCAB = 64
SUFFIX = {
    "method": "suffix",
    "num_speculative_tokens": 7,
    "suffix_decoding_max_cached_requests": 10,
}
CHAIN = {**SUFFIX, "method": ["suffix", "ngram"], "num_speculative_tokens": 3}
all_depths = pytest.mark.parametrize("depth", range(4))


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + i) % 60 for i in range(length)]


def harness_of(spec: dict[str, Any], depth: int = 1, **changes: Any) -> Harness:
    max_k = 3 if spec["method"] != "suffix" else 0
    values = {"max_host_drafts": 7, "num_pages": 200, "max_model_len": 200, **changes}
    return Harness(runner_info(max_k=max_k, **values), depth=depth, speculative_config=spec)


def asked_again(harness: Harness, times: int = 3, **params: Any) -> list[Stream]:
    """The same request again and again: from the second on its answer is known."""
    streams = []
    for uid in range(1, times + 1):
        streams.append(harness.add(request(uid, prompt(9), max_tokens=80, **params)))
        harness.run()
    harness.check_outputs()
    return streams


@pytest.mark.parametrize("spec", [SUFFIX, CHAIN], ids=["suffix", "chain"])
@all_depths
def test_an_answer_that_is_known_takes_few_steps(depth: int, spec: dict[str, Any]) -> None:
    harness = harness_of(spec, depth)
    harness.runner.acceptance = 0.0
    first, *others = asked_again(harness)
    assert first.num_steps >= 78
    for stream in others:
        assert stream.num_accepted > 45
        # A continuation has 15 tokens: with more than one step in flight, windows are not full.
        assert stream.num_steps <= (80 / 8 + 6 if depth < 2 else 35)
        assert stream.num_forced == 0


def test_nothing_is_remembered_by_default() -> None:
    spec = {"method": "suffix", "num_speculative_tokens": 7}
    streams = asked_again(harness_of(spec))
    assert [stream.num_accepted for stream in streams] == [streams[0].num_accepted] * 3


@all_depths
def test_a_preempted_request_looks_up_again_when_it_goes_on(depth: int) -> None:
    harness = harness_of(SUFFIX, depth)
    asked_again(harness, 1)
    stream = harness.add(request(9, prompt(9), max_tokens=80))
    for turn in range(400):
        if turn % 12 == 11:
            harness.engine.reset_prefix_cache(preempt_running=True)
        if not harness.turn():
            break
    harness.run()
    harness.check_outputs()
    assert stream.num_preemptions > 0
    assert stream.num_accepted > 20


@pytest.mark.parametrize(
    ("speculative", "is_looked_up", "is_drafted"),
    [
        (None, True, True),
        ({"method": "suffix"}, True, False),
        ({"method": "ngram"}, False, True),
        ({"method": "none"}, False, False),
    ],
)
def test_a_request_chooses_among_the_loaded_drafters(
    speculative: dict[str, Any] | None, is_looked_up: bool, is_drafted: bool
) -> None:
    harness = harness_of(CHAIN, draft_methods=("suffix", "ngram"))
    harness.runner.acceptance, harness.runner.no_draft = 0.0, 0.0
    asked_again(harness, 1)
    num_plans = len(harness.runner.plans)
    stream = harness.add(request(2, prompt(9), max_tokens=80, speculative=speculative))
    harness.run()
    harness.check_outputs()
    plans = harness.runner.plans[num_plans:]
    assert any(plan.host_drafts is not None for plan in plans) == is_looked_up
    assert (stream.num_accepted > 0) == is_looked_up
    assert any((plan.draft_k or 0) > 0 for plan in plans) == is_drafted


def test_a_request_may_ask_for_fewer_drafts_than_the_host_would_look_up() -> None:
    harness = harness_of(SUFFIX)
    asked_again(harness, 2, num_speculative_tokens=2)
    assert max(plan.k for plan in harness.runner.plans) == 2


def test_forced_tokens_win_over_what_was_looked_up() -> None:
    """The grammar's runs are shorter than the answer that is remembered."""
    harness = harness_of(SUFFIX)
    streams = []
    for uid in (1, 2):
        streams.append(harness.add(request(uid, prompt(9), max_tokens=60), Runs(VOCAB, 4)))
        harness.run()
    harness.check_outputs()
    assert streams[0].num_forced > 12
    assert streams[1].num_forced > 0
    # Where several tokens are allowed, the remembered answer says which.
    assert streams[1].num_accepted > streams[1].num_forced
    assert streams[1].num_steps < streams[0].num_steps


@all_depths
def test_looked_up_drafts_are_masked_as_the_grammar_says(depth: int) -> None:
    """`ModThree` raises at a token that it forbids. Free requests have taught other answers."""
    harness = harness_of(SUFFIX, depth)
    asked_again(harness, 1)
    for uid in (8, 9):
        harness.add(request(uid, prompt(9), max_tokens=60), ModThree(VOCAB))
        harness.run()
    harness.check_outputs()


def tokens_per_step(spec: dict[str, Any], acceptance: float, *, is_known: bool) -> float:
    harness = harness_of({**spec, "adaptive": True})
    harness.runner.acceptance, harness.runner.no_draft = acceptance, 0.0
    if is_known:
        asked_again(harness, 1)
    count, steps = 0, 0
    for uid in range(10, 16):
        stream = harness.add(request(uid, prompt(9 if is_known else uid, 1), max_tokens=80))
        harness.run()
        count, steps = count + len(stream.tokens), steps + stream.num_steps
    harness.check_outputs()
    return count / steps


@pytest.mark.parametrize("acceptance", [0.2, 0.6, 0.95])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_chain_takes_as_few_steps_as_the_better_of_its_drafters(
    acceptance: float, is_known: bool
) -> None:
    no_cache = {"suffix_decoding_max_cached_requests": 0}
    suffix = tokens_per_step(SUFFIX, acceptance, is_known=is_known)
    drafter = tokens_per_step({**CHAIN, **no_cache}, acceptance, is_known=False)
    chain = tokens_per_step(CHAIN, acceptance, is_known=is_known)
    assert chain >= 0.97 * max(suffix, drafter), (chain, suffix, drafter)


def test_a_drafter_proposes_nothing_where_the_continuation_is_sure() -> None:
    harness = harness_of({**CHAIN, "adaptive": True})
    harness.runner.acceptance = 0.0
    asked_again(harness, 4)
    last = [plan for plan in harness.runner.plans if plan.uid_B[0] == 4]
    assert any(plan.draft_k == 0 and plan.k > 3 for plan in last)


def test_long_prompts_are_indexed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "INDEX_TOKENS", 5)
    harness = harness_of(SUFFIX)
    streams = [
        harness.add(request(uid, prompt(60, uid), max_tokens=70, seed=1)) for uid in (1, 2, 3)
    ]
    harness.run()
    again = [
        harness.add(request(uid + 3, prompt(60, uid), max_tokens=70, seed=1)) for uid in (1, 2)
    ]
    harness.run()
    harness.check_outputs()
    assert all(stream.num_accepted < 10 for stream in streams)
    assert all(stream.num_accepted > 20 for stream in again)


def test_lookups_of_requests_that_ended_are_gone() -> None:
    harness = harness_of(SUFFIX)
    asked_again(harness, 2)
    harness.add(request(7, prompt(9), max_tokens=80))
    for _ in range(5):
        harness.turn()
    harness.engine.abort(7)
    harness.run()
    assert not harness.engine.scheduler._allocator.lookups._rows
