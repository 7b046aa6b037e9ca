"""Aborts at every moment: what ends, what is not computed, what is left of it."""

from __future__ import annotations

import pytest

from paceline.request import Done
from paceline.scheduler.events import Ended
from paceline.step import StepPlan
from tests.engine.harness import Harness, Stream, request
from tests.fakes import FakeRunner, FakeStep, runner_info

all_depths = pytest.mark.parametrize("depth", range(4))


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + i) % 60 for i in range(length)]


def plans(harness: Harness) -> list[StepPlan]:
    return harness.runner.plans


@all_depths
@pytest.mark.parametrize("after", range(6))
def test_an_abort_at_any_moment_ends_the_stream_and_frees_all(depth: int, after: int) -> None:
    """Waiting, between chunks, in flight, decoding: by how many turns came before."""
    harness = Harness(runner_info(max_k=2), depth=depth, max_num_batched_tokens=12)
    stream = harness.add(request(1, prompt(20), max_tokens=30))
    other = harness.add(request(2, prompt(20, 9), max_tokens=10))
    for _ in range(after):
        harness.turn()
    harness.engine.abort(1)
    harness.engine.abort(1)
    harness.engine.abort(77)
    harness.run()
    harness.check_outputs()
    assert stream.done == Done.ABORT
    assert other.done == Done.LENGTH


@all_depths
def test_rows_in_flight_of_an_aborted_request_are_counted_as_wasted(depth: int) -> None:
    harness = Harness(runner_info(), depth=depth)
    harness.add(request(1, prompt(5), max_tokens=30))
    for _ in range(5):
        harness.turn()
    assert harness.num_in_flight == depth
    harness.engine.abort(1)
    harness.run()
    assert harness.front.num_wasted_rows == depth
    assert harness.engine.scheduler.num_wasted_rows == depth


def test_a_step_whose_requests_were_all_aborted_is_not_computed() -> None:
    info = runner_info(page_size=4)
    harness = Harness(info, depth=1, runner=FakeRunner(info, is_lazy=True))
    for uid in (1, 2):
        harness.add(request(uid, prompt(20), max_tokens=30))
    harness.turn()
    harness.engine.let_go([1])
    assert plans(harness)[0].unwanted[0] == 0  # the other request waits for it
    harness.engine.let_go([2])
    again = harness.add(request(3, prompt(20), max_tokens=30))
    harness.run()
    harness.check_outputs()
    assert harness.runner.num_left_out == 1
    assert again.num_cached == [0]  # what the others began is not there


def test_what_was_computed_before_an_abort_stays_in_the_prefix_cache() -> None:
    info = runner_info(page_size=4)
    harness = Harness(
        info, depth=1, runner=FakeRunner(info, is_lazy=True), max_num_batched_tokens=8
    )
    harness.add(request(1, prompt(32), max_tokens=30))
    for _ in range(3):
        harness.turn()  # two chunks are computed, the third is in flight
    harness.engine.let_go([1])
    again = harness.add(request(2, prompt(32), max_tokens=30))
    harness.run()
    harness.check_outputs()
    assert harness.runner.num_left_out == 1
    assert again.num_cached == [16]


@pytest.mark.parametrize("uid", [1, 7])
def test_the_end_of_every_abort_is_reported_also_of_unknown_requests(uid: int) -> None:
    harness = Harness(runner_info())
    harness.add(request(1, prompt(5), max_tokens=3))
    harness.run()  # it has ended by itself
    harness.front.streams.setdefault(7, Stream())
    harness.engine.let_go([uid])
    harness.turn()
    assert harness.front.last is not None
    assert harness.front.last.events.ended == [Ended(uid, Done.ABORT)]


def test_aborts_are_seen_while_a_long_step_runs() -> None:
    info = runner_info(num_slots=2)
    harness = Harness(info, depth=0, runner=SlowRunner(info))
    aborts = [[], [1, 2]]
    harness.engine.read_aborts = lambda: aborts.pop(0)
    for uid in (1, 2):
        harness.add(request(uid, prompt(5), max_tokens=30))
    harness.turn()
    assert plans(harness)[0].unwanted[0] == 1
    assert aborts == []
    assert not harness.turn()
    harness.check_idle()


class SlowRunner(FakeRunner):
    """Its steps are over when they were asked three times."""

    def launch(self, plan: StepPlan) -> FakeStep:
        step = super().launch(plan)
        answers = iter((False, False, True))
        step.is_over = lambda within_s: next(answers)  # type: ignore[method-assign]
        return step


@all_depths
def test_a_preempted_request_can_be_aborted_before_it_has_drained(depth: int) -> None:
    harness = Harness(runner_info(max_k=2), depth=depth)
    stream = harness.add(request(1, prompt(5), max_tokens=30))
    for _ in range(4):
        harness.turn()
    harness.engine.reset_prefix_cache(preempt_running=True)
    harness.engine.abort(1)
    harness.run()
    harness.check_outputs()
    assert stream.done == Done.ABORT
    assert harness.front.num_wasted_rows == depth
