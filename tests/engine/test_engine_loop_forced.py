"""Host drafts in the loop: forced tokens and other continuations, at every depth."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.request import Done
from paceline.step import HostDrafts, Ints, Longs
from tests.engine.harness import Harness, Runs, packed, request
from tests.fakes import runner_info

VOCAB = 64
all_depths = pytest.mark.parametrize("depth", range(4))


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + i) % 60 for i in range(length)]


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("emitted", "rest"),
    [((), (5, 6, 7)), ((5,), (6, 7)), ((5, 6), (7,)), ((5, 6, 7), ()), ((5, 7), ()), ((6,), ())],
)
def test_the_rest_of_a_continuation_follows_tokens_that_are_its_beginning(
    emitted: tuple[int, ...], rest: tuple[int, ...]
) -> None:
    sequence_SL = ints(1, 2, *emitted, *[60] * (8 - len(emitted)))[None]

    def num_left(least: int, length: int = 2, num_emitted: int = len(emitted)) -> int:
        host = HostDrafts(ints(0), ints(length), ints(5, 6, 7, -1)[None], ints(least))
        slot_R: Longs = np.zeros(1, np.int64)
        return int(host.num_left(slot_R, sequence_SL, ints(2 + num_emitted))[0])

    assert num_left(1) == len(rest)
    assert num_left(2) == (len(rest) if len(rest) >= 2 else 0)
    assert num_left(1, length=3, num_emitted=0) == 0  # from tokens on that are not there yet
    assert num_left(1, num_emitted=5) == 0


@pytest.mark.parametrize("max_k", [0, 2, 9])
@pytest.mark.parametrize("block", [4, 12])
@all_depths
def test_forced_tokens_take_fewer_steps_and_change_no_token(
    depth: int, block: int, max_k: int
) -> None:
    steps = []
    for host_drafts in (0, 7):
        info = runner_info(max_k=max_k, max_host_drafts=host_drafts, num_pages=200)
        harness = Harness(info, depth=depth)
        harness.runner.no_draft = 1.0
        streams = [
            harness.add(request(uid, prompt(9, uid), max_tokens=60), Runs(VOCAB, block))
            for uid in (1, 2)
        ]
        harness.add(request(3, prompt(9, 5), max_tokens=60))
        harness.run()
        harness.check_outputs()
        steps.append(max(stream.num_steps for stream in streams))
        num_forced = sum(stream.num_forced for stream in streams)
        assert num_forced == sum(stream.num_accepted for stream in streams)
        assert (num_forced > 30) == bool(host_drafts)
    # A run that is found while a step is in flight is drafted one step later.
    assert steps[1] < (0.8 if block == 4 else 0.6) * steps[0]


@pytest.mark.trap("F5")
@all_depths
def test_drafts_that_a_step_did_not_verify_are_gone_after_it(depth: int) -> None:
    """The drafter's drafts give way to forced ones, and a window may be cut by the budget. Masks
    follow the drafts that are really verified: `Runs` raises at any other token."""
    info = runner_info(max_k=5, max_host_drafts=3, num_slots=2, num_pages=200)
    harness = Harness(info, depth=depth, max_num_batched_tokens=13, adaptive=True)
    harness.runner.no_draft, harness.runner.acceptance = 0.0, 0.4
    harness.add(request(1, prompt(20), max_tokens=70), Runs(VOCAB, 12))
    harness.add(request(2, prompt(30, 5), max_tokens=40))
    harness.run()
    harness.check_outputs()


def test_a_small_budget_plans_fewer_host_drafts_and_refuses_nothing() -> None:
    info = runner_info(max_host_drafts=7, num_slots=4)
    harness = Harness(info, depth=1, max_num_batched_tokens=6)
    for uid in range(1, 5):
        harness.add(request(uid, prompt(9, uid), max_tokens=30), Runs(VOCAB, 12))
    harness.run()
    harness.check_outputs()
    assert max(plan.num_tokens for plan in harness.runner.plans) <= 6
    assert any(plan.host_drafts is not None for plan in harness.runner.plans)


def test_host_drafts_do_not_stop_prompts() -> None:
    info = runner_info(max_host_drafts=7, num_slots=2)
    harness = Harness(info, depth=1, max_num_batched_tokens=6)
    harness.add(request(1, prompt(9), max_tokens=60), Runs(VOCAB, 32))
    for _ in range(6):
        harness.turn()
    harness.add(request(2, prompt(20, 7), max_tokens=3))
    harness.run()
    harness.check_outputs()
    chunks = [plan for plan in harness.runner.plans if plan.num_rows == 2]
    assert any(plan.host_drafts is not None and 2 in plan.uid_B for plan in chunks)


class Sentence(Runs):
    """A run of forced tokens, and then nothing but the end."""

    EOS = 63

    def allowed(self, last: int | None) -> list[int]:
        return [40] if last is None else [self.EOS] if last >= 44 else [last + 1]


@pytest.mark.trap("I26")
@all_depths
def test_a_grammar_may_end_inside_a_window(depth: int) -> None:
    harness = Harness(runner_info(max_host_drafts=7), depth=depth)
    stream = harness.add(
        request(1, prompt(9), max_tokens=30, eos=(Sentence.EOS,)), Sentence(VOCAB, 4)
    )
    harness.run()
    assert stream.tokens == [40, 41, 42, 43, 44, Sentence.EOS]
    assert stream.done == Done.EOS
    assert stream.num_steps <= 2 + depth
    assert stream.num_forced == 5


@all_depths
def test_a_preempted_request_keeps_no_continuation(depth: int) -> None:
    harness = Harness(runner_info(max_k=2, max_host_drafts=7), depth=depth)
    harness.add(request(1, prompt(9), max_tokens=40), Runs(VOCAB, 12))
    for _ in range(4):
        harness.turn()
    assert harness.engine.scheduler.continuations
    harness.engine.reset_prefix_cache(preempt_running=True)
    assert not harness.engine.scheduler.continuations
    harness.run()
    harness.check_outputs()


class FailingForced(Runs):
    def forced(self) -> list[int]:
        if len(self.accepted) > 3:
            raise ValueError("lost in the grammar")
        return super().forced()


@all_depths
def test_a_constraint_that_cannot_say_what_is_forced_ends_its_own_request_only(depth: int) -> None:
    harness = Harness(runner_info(max_host_drafts=7), depth=depth)
    broken = harness.add(request(1, prompt(9), max_tokens=30), FailingForced(VOCAB, 4))
    other = harness.add(request(2, prompt(9, 5), max_tokens=12))
    harness.run()
    assert broken.done == Done.ERROR
    assert "lost in the grammar" in broken.reason
    assert (other.tokens, other.done) == harness.reference(2)


def test_adaptive_speculation_does_not_learn_from_forced_tokens() -> None:
    """The drafter is always wrong, and forced tokens are always accepted."""
    info = runner_info(max_k=4, max_host_drafts=7, num_pages=200)
    harness = Harness(info, depth=0, adaptive=True)
    harness.runner.no_draft, harness.runner.acceptance = 0.0, 0.0
    stream = harness.add(request(1, prompt(9), max_tokens=80), Runs(VOCAB, 4))
    harness.run()
    harness.check_outputs()
    assert stream.num_forced > 30
    lengths = harness.engine.scheduler._draft_lengths
    assert lengths._survival._accepted_SK.max() == 0


@pytest.mark.trap("F4")
def test_each_row_has_the_masks_of_its_own_drafts_also_where_there_are_none() -> None:
    """Rows of one step with no draft, one, and a whole window of them."""
    info = runner_info(max_k=3, max_host_drafts=7, num_pages=200)
    harness = Harness(info, depth=1, seed=3)
    harness.runner.no_draft, harness.runner.acceptance = 0.5, 0.9
    widths = set()
    for uid, block, k in ((1, 1, 0), (2, 1, 1), (3, 32, None)):
        req = request(uid, prompt(5, uid), max_tokens=60, num_speculative_tokens=k)
        harness.add(req, Runs(VOCAB, block))
    harness.run()
    harness.check_outputs()
    for plan in harness.runner.plans:
        if plan.num_rows == 3:
            widths.add(tuple(plan.k_B.tolist()))
    assert any(len(set(row)) == 3 for row in widths), widths


def test_masks_of_all_rows_are_asked_for_in_one_call_and_kept_in_one_array() -> None:
    calls: list[int] = []
    addresses = set()

    class Filler:
        def fill(self, rows: object, mask_RWV: Ints) -> dict[int, Exception]:
            assert isinstance(rows, list)
            calls.append(len(rows))
            addresses.add(mask_RWV.ctypes.data)
            for index, constraint, drafts in rows:
                mask_RWV[index, : 1 + len(drafts)] = constraint.masks(drafts)
            return {}

    harness = Harness(runner_info(max_host_drafts=3), depth=1, filler=Filler())
    for uid in (1, 2, 3):
        harness.add(request(uid, prompt(9, uid), max_tokens=40), Runs(VOCAB, 4))
    harness.run()
    harness.check_outputs()
    assert calls.count(3) > 5
    assert len(addresses) <= 3  # it grows to the largest step


def test_a_mask_array_is_packed_by_bits() -> None:
    assert packed([0, 33], 64).tolist() == [1, 2]
