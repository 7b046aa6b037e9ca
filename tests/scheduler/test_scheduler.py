"""Policies one by one: rows of a plan, order, pages, preemption, refusal, prefix hits."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.errors import ConfigError, InvalidRequest, PromptTooLong
from paceline.request import Done
from paceline.scheduler.scheduler import Scheduler
from paceline.step import StepPlan, StepResult
from tests.engine.harness import Harness, engine_config, request
from tests.fakes import FakeRunner, runner_info
from tests.scheduler.consistency import pages_of


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + i) % 60 for i in range(length)]


def last_plan(harness: Harness) -> StepPlan:
    return harness.runner.plans[-1]


def test_decode_rows_come_first_and_chunks_fill_the_budget() -> None:
    harness = Harness(runner_info(max_k=2), max_num_batched_tokens=16, adaptive=False)
    harness.add(request(1, prompt(5)))
    harness.turn()
    harness.add(request(2, prompt(20, 9)))
    harness.add(request(3, prompt(20, 30)))
    harness.turn()
    plan = last_plan(harness)
    assert plan.uid_B.tolist() == [1, 2]
    assert plan.query_len_B.tolist() == [3, 13]
    assert plan.k_B.tolist() == [2, 0]
    assert plan.samples_B.tolist() == [True, False]
    harness.turn()
    plan = last_plan(harness)
    assert plan.uid_B.tolist() == [1, 2, 3]
    assert plan.query_len_B.tolist() == [3, 7, 6]
    assert plan.samples_B.tolist() == [True, True, False]
    harness.run()
    harness.check_outputs()


def test_several_chunks_of_one_prompt_are_in_flight_at_once() -> None:
    harness = Harness(runner_info(), depth=3, max_num_batched_tokens=4)
    harness.add(request(1, prompt(14)))
    for _ in range(3):
        harness.turn()
    assert harness.num_in_flight == 3
    assert [plan.query_len_B.tolist() for plan in harness.runner.plans] == [[4], [4], [4]]
    harness.run()
    harness.check_outputs()


def test_a_step_of_final_chunks_proposes_what_its_rows_want() -> None:
    harness = Harness(runner_info(max_k=5))
    harness.add(request(1, prompt(5), num_speculative_tokens=2))
    harness.add(request(2, prompt(5, 9), num_speculative_tokens=3))
    harness.turn()
    assert last_plan(harness).k == 3
    assert last_plan(harness).k_B.tolist() == [0, 0]
    harness.turn()
    assert last_plan(harness).k_B.tolist() == [2, 3]


def test_a_request_without_speculation_keeps_the_step_narrow() -> None:
    harness = Harness(runner_info(max_k=5))
    stream = harness.add(request(1, prompt(5), num_speculative_tokens=0))
    harness.run()
    assert {plan.k for plan in harness.runner.plans} == {0}
    assert stream.num_drafts == 0


def test_drafts_past_the_end_of_a_request_are_not_verified() -> None:
    harness = Harness(runner_info(max_k=7))
    harness.runner.no_draft = 1.0
    harness.add(request(1, prompt(5), max_tokens=4))
    harness.run()
    assert [plan.k_B.tolist() for plan in harness.runner.plans] == [[0], [2], [1], [0]]


def test_a_row_is_not_planned_once_its_lower_bound_reached_the_end() -> None:
    harness = Harness(runner_info(), depth=3)
    harness.add(request(1, prompt(5), max_tokens=3))
    harness.run()
    assert len(harness.runner.plans) == 3
    assert harness.front.num_wasted_rows == 0


def test_the_oldest_waiting_request_is_not_overtaken() -> None:
    harness = Harness(runner_info(num_pages=8, page_size=4, num_slots=4), max_num_batched_tokens=64)
    harness.add(request(1, prompt(12), max_tokens=4))
    harness.turn()
    harness.add(request(2, prompt(24, 9), max_tokens=2))
    harness.add(request(3, prompt(2, 30), max_tokens=2))
    order = []
    while harness.turn():
        order += [init.request.uid for init in last_plan(harness).admissions]
    assert order == sorted(order)
    harness.check_outputs()


def test_lower_priority_values_run_first() -> None:
    harness = Harness(runner_info(num_slots=1), scheduling_policy="priority")
    for uid, priority in ((1, 5), (2, 0), (3, -1)):
        harness.add(request(uid, prompt(4, uid), priority=priority))
    harness.run()
    admitted = [i.request.uid for plan in harness.runner.plans for i in plan.admissions]
    assert admitted == [3, 2, 1]


def test_priority_is_ignored_under_first_come_first_served() -> None:
    harness = Harness(runner_info(num_slots=1))
    for uid, priority in ((1, 5), (2, 0)):
        harness.add(request(uid, prompt(4, uid), priority=priority))
    harness.run()
    admitted = [i.request.uid for plan in harness.runner.plans for i in plan.admissions]
    assert admitted == [1, 2]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("what_is_short", ["slots", "pages"])
def test_an_urgent_request_takes_the_place_of_a_less_urgent_one(
    depth: int, what_is_short: str
) -> None:
    slots, pages = (1, 64) if what_is_short == "slots" else (4, 8)
    harness = Harness(
        runner_info(num_slots=slots, num_pages=pages, page_size=4, max_model_len=32),
        depth=depth,
        scheduling_policy="priority",
    )
    slow = harness.add(request(1, prompt(12), max_tokens=15, priority=3))
    for _ in range(3):
        harness.turn()
    fast = harness.add(request(2, prompt(16, 20), max_tokens=2, priority=0))
    harness.turn()
    assert last_plan(harness).uid_B.tolist() == [2]
    harness.run()
    harness.check_outputs()
    assert (slow.num_preemptions, fast.num_preemptions) == (1, 0)


def test_an_urgent_request_preempts_none_if_it_still_would_not_fit() -> None:
    info = runner_info(num_slots=4, num_pages=12, page_size=4, max_model_len=64)
    harness = Harness(info, scheduling_policy="priority")
    harness.add(request(1, prompt(20), max_tokens=8, priority=0))
    less_urgent = harness.add(request(2, prompt(4, 9), max_tokens=8, priority=5))
    harness.turn()
    harness.add(request(3, prompt(40, 30), max_tokens=2, priority=0))
    for _ in range(3):
        harness.turn()
    assert less_urgent.num_preemptions == 0
    harness.run()
    harness.check_outputs()


def test_equal_priority_preempts_none() -> None:
    harness = Harness(runner_info(num_slots=1), scheduling_policy="priority")
    first = harness.add(request(1, prompt(4), priority=1))
    harness.turn()
    harness.add(request(2, prompt(4, 9), priority=1))
    harness.run()
    assert first.num_preemptions == 0


def test_the_latest_request_gives_way_when_pages_run_out() -> None:
    harness = Harness(runner_info(num_pages=10, page_size=2, num_slots=3, max_model_len=18))
    streams = [harness.add(request(uid, prompt(4, uid), max_tokens=12)) for uid in (1, 2, 3)]
    harness.run()
    harness.check_outputs()
    assert streams[0].num_preemptions == 0
    assert streams[2].num_preemptions > 0


@pytest.mark.trap("B7")
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_every_running_request_is_in_every_step_or_was_preempted_in_it(policy: str) -> None:
    """Pages are so short that victims leave while the others are looked at."""
    info = runner_info(num_pages=16, page_size=1, num_slots=6, max_model_len=14, max_k=1)
    scheduler = Scheduler(engine_config(info, scheduling_policy=policy), info)
    runner = FakeRunner(info)
    for uid in range(1, 7):
        scheduler.add(request(uid, prompt(2, uid), max_tokens=9, priority=uid % 3))
    running: set[int] = set()
    while (plan := scheduler.plan()) is not None:
        planned = set(plan.uid_B.tolist())
        preempted = set(scheduler.take_events().preempted)
        assert running - preempted <= planned
        assert not preempted & planned
        result = runner.launch(plan).wait()
        scheduler.commit(plan, result)
        running = planned - set(result.uid_B[result.done_B != 0].tolist())
    assert scheduler.num_unfinished == 0
    assert scheduler.num_preemptions > 3


# ---- refusal


def test_a_prompt_longer_than_the_model_is_refused_with_both_numbers() -> None:
    harness = Harness(runner_info(max_model_len=96))
    with pytest.raises(PromptTooLong, match=r"length is 96 .* has 96 tokens.*--max-model-len"):
        harness.engine.add(request(1, prompt(96)))
    harness.add(request(2, prompt(95)))
    harness.run()
    harness.check_outputs()


def test_a_prompt_larger_than_the_cache_is_refused_with_its_numbers() -> None:
    harness = Harness(runner_info(num_pages=5, page_size=4, max_model_len=96, max_k=2))
    longest = harness.engine.scheduler.max_len - 1
    assert longest == 5 * 4 - 2 - 2
    with pytest.raises(PromptTooLong, match=r"17 tokens.*room for 16.*--kv-cache-memory-bytes"):
        harness.engine.add(request(1, prompt(longest + 1)))
    stream = harness.add(request(2, prompt(longest), max_tokens=None))
    harness.run()
    assert (len(stream.tokens), stream.done) == (1, Done.LENGTH)


def test_an_empty_prompt_is_refused() -> None:
    harness = Harness(runner_info())
    with pytest.raises(InvalidRequest, match="empty"):
        harness.engine.add(request(1, []))


def test_a_budget_that_cannot_hold_all_rows_is_refused() -> None:
    info = runner_info(num_slots=4, max_k=3)
    config = engine_config(runner_info(num_slots=2, max_k=3), max_num_batched_tokens=8)
    with pytest.raises(ConfigError, match="4 rows of 4"):
        Scheduler(config, info)


# ---- prefix cache


def test_a_second_request_finds_the_prompt_of_the_first() -> None:
    harness = Harness(runner_info(page_size=4))
    harness.add(request(1, prompt(13)))
    harness.run()
    second = harness.add(request(2, prompt(13)))
    longer = harness.add(request(3, [*prompt(12), 59, 58]))
    harness.run()
    harness.check_outputs()
    assert second.num_cached == [12]
    assert longer.num_cached == [12]


def test_a_hit_leaves_one_token_to_compute() -> None:
    harness = Harness(runner_info(page_size=4))
    harness.add(request(1, prompt(12)))
    harness.run()
    second = harness.add(request(2, prompt(12)))
    harness.run()
    assert second.num_cached == [8]
    harness.check_outputs()


def test_requests_that_arrive_together_share_their_prompt() -> None:
    harness = Harness(runner_info(page_size=4))
    streams = [harness.add(request(uid, prompt(18), seed=uid)) for uid in range(1, 5)]
    harness.turn()
    assert last_plan(harness).query_len_B.tolist() == [18, 2, 2, 2]
    harness.run()
    harness.check_outputs()
    assert [stream.num_cached for stream in streams] == [[0], [16], [16], [16]]


def test_output_is_found_by_the_next_turn_of_a_conversation() -> None:
    harness = Harness(runner_info(page_size=4))
    first = harness.add(request(1, prompt(6), max_tokens=11))
    harness.run()
    history = prompt(6) + first.tokens
    second = harness.add(request(2, [*history, 5, 6, 7]))
    harness.run()
    harness.check_outputs()
    assert second.num_cached == [16], "the newest token of the first turn has no KV"


def test_prompt_logprobs_take_no_hit() -> None:
    harness = Harness(runner_info(page_size=4))
    harness.add(request(1, prompt(13)))
    harness.run()
    second = harness.add(request(2, prompt(13), prompt_logprobs=0))
    harness.run()
    assert second.num_cached == [0]
    assert second.prompt_logprob_ids == prompt(13)[1:]


def test_no_hit_without_prefix_caching() -> None:
    harness = Harness(runner_info(page_size=4), enable_prefix_caching=False)
    for uid in (1, 2):
        stream = harness.add(request(uid, prompt(13)))
        harness.run()
    assert stream.num_cached == [0]


def test_running_requests_leave_nothing_behind_after_a_reset() -> None:
    harness = Harness(runner_info(page_size=4))
    harness.add(request(1, prompt(13), max_tokens=12))
    for _ in range(3):
        harness.turn()
    harness.engine.reset_prefix_cache()
    harness.run()
    second = harness.add(request(2, prompt(13)))
    harness.run()
    assert second.num_cached == [0]
    harness.check_outputs()


# ---- pages held in advance


def test_a_request_alone_stays_in_one_piece_and_rarely_asks_for_pages() -> None:
    harness = Harness(runner_info(num_pages=256, page_size=4, max_model_len=600))
    harness.add(request(1, prompt(10), max_tokens=500))
    pages: list[int] = []
    while harness.turn():
        if harness.engine.scheduler.num_unfinished:
            pages = pages_of(harness.engine.scheduler, 1)
    assert pages == list(range(pages[0], pages[0] + len(pages)))
    assert sum(plan.page_appends is not None for plan in harness.runner.plans) < 6


@pytest.mark.parametrize("max_k", [0, 3])
def test_a_step_brings_no_more_pages_to_a_row_than_it_can(max_k: int) -> None:
    """A packet of fixed shape has room for a limited number of new pages per row."""
    info = runner_info(
        max_k=max_k, num_pages=400, page_size=4, max_model_len=400, max_row_appends=6
    )
    harness = Harness(info)
    for uid in range(1, 5):
        harness.add(request(uid, prompt(4, uid), max_tokens=300, ignore_eos=True))
    harness.run()
    harness.check_outputs()
    most = 0
    for plan in harness.runner.plans:
        if plan.page_appends is not None:
            most = max(most, int(np.bincount(plan.page_appends.slot).max()))
    assert most == 6


def test_a_row_gets_the_pages_that_it_needs_whatever_a_step_can_bring() -> None:
    """Too many are for the packet to refuse; too few would let a row write over others'."""
    info = runner_info(max_k=7, num_pages=400, page_size=2, max_model_len=400, max_row_appends=1)
    harness = Harness(info)
    harness.add(request(1, prompt(4), max_tokens=300, ignore_eos=True))
    harness.run()
    harness.check_outputs()
    found = [x.page_appends for x in harness.runner.plans if x.page_appends is not None]
    assert max(len(x.slot) for x in found) > 1


def test_pages_held_in_advance_are_given_back_before_a_request_waits() -> None:
    harness = Harness(runner_info(num_pages=32, page_size=2, num_slots=4, max_model_len=60))
    first = harness.add(request(1, prompt(4), max_tokens=20))
    harness.turn()
    held = len(pages_of(harness.engine.scheduler, 1))
    second = harness.add(request(2, prompt(48, 9), max_tokens=2))
    harness.turn()
    harness.turn()
    assert len(pages_of(harness.engine.scheduler, 1)) < held
    assert second.num_cached == [0]
    harness.run()
    harness.check_outputs()
    assert first.num_preemptions == second.num_preemptions == 0


def test_pages_held_in_advance_are_given_back_before_a_preemption() -> None:
    """The second request grows four times as fast and ends before the pool is really full."""
    info = runner_info(num_pages=64, page_size=1, num_slots=2, max_model_len=64, max_k=3)
    harness = Harness(info)
    harness.runner.acceptance, harness.runner.no_draft = 1.0, 0.0
    harness.add(request(1, prompt(2), max_tokens=15, num_speculative_tokens=0))
    harness.turn()
    assert len(pages_of(harness.engine.scheduler, 1)) >= 15
    harness.add(request(2, prompt(2, 30), max_tokens=40))
    harness.run()
    harness.check_outputs()
    assert harness.num_preemptions == 0


# ---- results that say little


@pytest.mark.trap("B10")
def test_a_row_with_drafts_and_no_output_moves_no_counter_below_zero() -> None:
    info = runner_info(max_k=3)
    scheduler = Scheduler(engine_config(info), info)
    scheduler.add(request(1, prompt(5), max_tokens=20))

    def result(plan: StepPlan, counts: list[int], drafts: list[int]) -> StepResult:
        zeros = np.zeros(len(counts), np.int32)
        tokens = np.full((len(counts), plan.k + 1), -1, np.int32)
        tokens[:, : counts[0]] = 7
        count_B, num_drafts_B = np.array(counts, np.int32), np.array(drafts, np.int32)
        return StepResult(plan.step, plan.uid_B, count_B, tokens, zeros, num_drafts_B, zeros)

    def planned() -> StepPlan:
        plan = scheduler.plan()
        assert plan is not None
        return plan

    first = planned()
    scheduler.commit(first, result(first, [1], [0]))
    empty, after = planned(), planned()
    nothing = result(empty, [0], [3])
    scheduler.commit(empty, nothing)
    assert nothing.num_accepted_B.tolist() == [0]
    table = scheduler.table
    slot = int(first.slot_B[0])
    assert table.committed_S[slot] == 6
    assert (table.lower_S[slot], table.upper_S[slot]) == (7, 10)
    scheduler.commit(after, result(after, [2], [3]))
    assert table.committed_S[slot] == table.lower_S[slot] == table.upper_S[slot] == 8


def test_results_must_come_in_the_order_of_their_plans() -> None:
    info = runner_info()
    scheduler = Scheduler(engine_config(info), info)
    scheduler.add(request(1, prompt(5)))
    scheduler.plan()
    second = scheduler.plan()
    assert second is not None
    zeros = np.zeros(1, np.int32)
    result = StepResult(2, second.uid_B, zeros, zeros[:, None], zeros, zeros, zeros)
    with pytest.raises(AssertionError, match="out of order"):
        scheduler.commit(second, result)


def test_a_uid_cannot_be_added_twice() -> None:
    harness = Harness(runner_info())
    harness.add(request(1, prompt(5)))
    with pytest.raises(AssertionError, match="added twice"):
        harness.engine.add(request(1, prompt(5)))
