"""Late rows: constraints whose masks are bound after the previous result, at every depth."""

from __future__ import annotations

import pytest

from paceline.request import Done
from paceline.step import Ints, StepPlan
from tests.engine.harness import Harness, ModThree, request
from tests.fakes import runner_info

all_depths = pytest.mark.parametrize("depth", range(4))


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + i) % 60 for i in range(length)]


def plans(harness: Harness) -> list[StepPlan]:
    return harness.runner.plans


@pytest.mark.parametrize("max_k", [0, 1, 3])
@all_depths
def test_a_constrained_request_obeys_its_grammar_beside_free_ones(depth: int, max_k: int) -> None:
    harness = Harness(runner_info(max_k=max_k), depth=depth)
    grammar = ModThree(64)
    stream = harness.add(request(1, prompt(9), max_tokens=20), grammar)
    harness.add(request(2, prompt(9, 5), max_tokens=35))
    harness.run()
    harness.check_outputs()
    assert grammar.accepted == stream.tokens
    late = [plan.late_B for plan in plans(harness)]
    assert late[0] is not None
    assert late[-1] is None, "the steps after it are plain again"


@all_depths
def test_steps_with_late_rows_run_at_most_one_ahead(depth: int) -> None:
    harness = Harness(runner_info(max_k=2), depth=depth)
    harness.add(request(1, prompt(9), max_tokens=40))
    while harness.num_in_flight < depth:
        harness.turn()
    harness.add(request(2, prompt(9, 5), max_tokens=6), ModThree(64))
    while not harness.front.streams[2].done:
        harness.turn()
        if plans(harness)[-1].late_B is not None:
            assert harness.num_in_flight <= min(depth, 1)
    harness.run()
    harness.check_outputs()
    assert harness.max_in_flight == depth


def test_accepted_drafts_of_a_constrained_request_pass_its_masks() -> None:
    harness = Harness(runner_info(max_k=3), depth=1, seed=1)
    harness.runner.no_draft = 0.0
    streams = [
        harness.add(request(uid, prompt(9, uid), max_tokens=60), ModThree(64)) for uid in (1, 2, 3)
    ]
    harness.run()
    harness.check_outputs()
    assert sum(stream.num_accepted for stream in streams) > 5


@pytest.mark.trap("B8")
@all_depths
def test_a_preempted_constrained_request_keeps_no_drafts(depth: int) -> None:
    class Recording(ModThree):
        def __init__(self) -> None:
            super().__init__(64)
            self.asked: list[list[int]] = []

        def masks(self, draft_ids: list[int]) -> Ints:
            self.asked.append(draft_ids)
            return super().masks(draft_ids)

    harness = Harness(runner_info(max_k=3), depth=depth)
    harness.runner.no_draft = 0.0
    grammar = Recording()
    harness.add(request(1, prompt(9), max_tokens=25), grammar)
    for _ in range(5):
        harness.turn()
    assert grammar.asked[-1] != []
    harness.engine.reset_prefix_cache(preempt_running=True)
    num_before = len(grammar.asked)
    harness.run()
    assert grammar.asked[num_before] == []
    harness.check_outputs()


class Broken(ModThree):
    """Fails when it is asked for the n-th time."""

    def __init__(self, masks_left: int, accepts_left: int) -> None:
        super().__init__(64)
        self._masks_left, self._accepts_left = masks_left, accepts_left

    def masks(self, draft_ids: list[int]) -> Ints:
        self._masks_left -= 1
        if self._masks_left < 0:
            raise ValueError("lost in the grammar")
        return super().masks(draft_ids)

    def accept(self, tokens: list[int]) -> None:
        self._accepts_left -= 1
        if self._accepts_left < 0:
            raise ValueError("lost in the grammar")
        super().accept(tokens)


@pytest.mark.parametrize(("masks", "accepts"), [(0, 99), (3, 99), (99, 0), (99, 3)])
@all_depths
def test_a_constraint_that_fails_ends_its_own_request_only(
    depth: int, masks: int, accepts: int
) -> None:
    harness = Harness(runner_info(max_k=1), depth=depth)
    broken = harness.add(request(1, prompt(9), max_tokens=30), Broken(masks, accepts))
    other = harness.add(request(2, prompt(9, 5), max_tokens=12))
    harness.run()
    assert broken.done == Done.ERROR
    assert "lost in the grammar" in broken.reason
    assert (other.tokens, other.done) == harness.reference(2)


def test_a_constraint_that_fails_on_the_last_token_changes_nothing() -> None:
    harness = Harness(runner_info(), depth=1)
    harness.add(request(1, prompt(9), max_tokens=4), Broken(99, accepts_left=3))
    harness.run()
    harness.check_outputs()


def test_a_step_without_rows_has_no_late_rows_while_a_grammar_runs() -> None:
    """In lock step a replica runs one while the last step of a constrained request is in flight."""
    harness = Harness(runner_info(max_k=2), depth=1)
    harness.add(request(1, prompt(9), max_tokens=1), ModThree(64))
    harness.turn()
    assert harness.num_in_flight == 1
    plan = harness.engine.scheduler.plan_empty()
    assert plan.num_rows == 0
    assert plan.late_B is None
