"""The transitions of the engine's loop between work, waiting, preparing and its end."""

from __future__ import annotations

import pytest

from paceline.engine.loop_state import SPARE_AFTER_S, Activity, LoopState


def state(activity: Activity, heartbeat_s: float = 5.0) -> LoopState:
    made = LoopState(heartbeat_s)
    made.activity = activity
    return made


def test_a_loop_starts_busy_and_does_not_wait() -> None:
    new = LoopState(5.0)
    assert new.activity is Activity.BUSY
    assert not new.is_waiting


def test_a_turn_without_work_makes_the_loop_wait_for_messages() -> None:
    loop = state(Activity.BUSY)
    loop.found_nothing(all_drain=False)
    assert loop.activity is Activity.IDLE
    assert loop.is_waiting
    assert loop.wait_s == SPARE_AFTER_S


def test_an_idle_loop_prepares_if_the_runner_can() -> None:
    loop = state(Activity.IDLE)
    assert loop.waited(has_spare_work=True), "the next turn prepares"
    assert loop.has_spare_time
    assert not loop.is_waiting


def test_an_idle_loop_without_spare_work_waits_until_a_heartbeat_is_due() -> None:
    loop = state(Activity.IDLE)
    assert not loop.waited(has_spare_work=False)
    assert loop.activity is Activity.RESTING
    assert loop.wait_s == loop.heartbeat_s
    assert loop.waited(has_spare_work=False), "the next turn shows the heartbeat"
    loop.found_nothing(all_drain=False)
    assert loop.activity is Activity.RESTING


def test_a_short_heartbeat_comes_before_spare_time() -> None:
    assert state(Activity.IDLE, heartbeat_s=0.1).wait_s == 0.1


def test_preparing_goes_on_while_there_is_more() -> None:
    loop = state(Activity.SPARE)
    loop.prepared(has_more=True)
    assert loop.has_spare_time
    loop.prepared(has_more=False)
    assert loop.activity is Activity.BUSY, "all replicas turn once more"


def test_a_replica_that_prepared_because_another_one_could_turns_again() -> None:
    loop = state(Activity.IDLE)
    loop.prepared(has_more=True)
    assert loop.activity is Activity.BUSY


@pytest.mark.parametrize("before", [Activity.IDLE, Activity.SPARE, Activity.RESTING])
def test_a_message_or_work_ends_waiting_and_spare_time(before: Activity) -> None:
    for transition in (LoopState.received, LoopState.found_work):
        loop = state(before)
        transition(loop)
        assert loop.activity is Activity.BUSY


@pytest.mark.parametrize("before", [Activity.BUSY, Activity.IDLE, Activity.RESTING])
def test_a_drained_loop_ends_when_no_replica_has_work(before: Activity) -> None:
    loop = state(before)
    loop.found_nothing(all_drain=True)
    assert loop.activity is Activity.ENDED
