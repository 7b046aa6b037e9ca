"""Plans as bytes, and ranks that launch what their leader launches."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest

from paceline.engine.engine import Engine
from paceline.engine.peers import LeadingRunner, follow
from paceline.engine.plans import decode_late, decode_plan, encode_late, encode_plan
from paceline.errors import CollectiveError
from paceline.request import SamplingParams
from paceline.step import (
    MARKS,
    HostDrafts,
    LateMasks,
    PageAppends,
    SlotInit,
    SnapshotMarks,
    StepPlan,
    StepSize,
)
from tests.engine.harness import Front, ModThree, Stream, engine_config, request
from tests.fakes import FakeRunner, runner_info
from tests.patience import PATIENCE_S


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def some_plan(**changes: Any) -> StepPlan:
    params = SamplingParams(
        temperature=0.7, top_p=0.9, seed=3, stop_token_ids=[5, 6], logit_bias={3: -1.0}
    )
    admitted = SlotInit(
        slot=2,
        request=replace(request(9, [4, 5, 6]), params=params),
        tokens=ints(4, 5, 6, 7),
        prompt_len=3,
        num_cached=0,
        max_len=40,
        pages=ints(11, 12),
        snapshot=5,
    )
    plan = StepPlan(
        step=17,
        k=3,
        uid_B=np.array([2**40, 9]),
        slot_B=ints(1, 2),
        query_len_B=ints(4, 4),
        k_B=ints(3, 0),
        samples_B=np.array([True, False]),
        length_bound_B=ints(30, 4),
        admissions=[admitted],
        page_appends=PageAppends(ints(1, 1), ints(4, 5), ints(7, 8)),
        late_B=np.array([True, False]),
        marks=SnapshotMarks(*np.arange(4 * MARKS, dtype=np.int32).reshape(2, 2, MARKS)),
        agreed=StepSize(9, 8, 4, 3, 2, False, True, True),
        host_drafts=HostDrafts(ints(0), ints(29), ints(5, 6, -1)[None], ints(2)),
    )
    return replace(plan, **changes)


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(one.dtype == other.dtype and one.tolist() == other.tolist())
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"admissions": [], "page_appends": None, "late_B": None, "agreed": None},
        {"late_B": None, "page_appends": None, "marks": None, "host_drafts": None},
    ],
)
def test_a_plan_comes_out_of_its_bytes_as_it_went_in(changes: dict[str, Any]) -> None:
    plan = some_plan(**changes)
    frame = encode_plan(plan)
    back = decode_plan(frame)
    assert encode_plan(back) == frame
    # How a request looks in bytes is tests/engine/test_messages.py's.
    requests = [init.request for init in plan.admissions]
    assert [init.request.uid for init in back.admissions] == [r.uid for r in requests]
    pairs = zip(back.admissions, requests, strict=True)
    back.admissions = [replace(init, request=r) for init, r in pairs]
    assert same(astuple(back), astuple(plan))


def test_a_plan_without_rows_travels_too() -> None:
    nothing = np.empty(0, np.int32)
    plan = StepPlan(
        3, 2, nothing.astype(np.int64), nothing, nothing, nothing, nothing.astype(bool), nothing
    )
    back = decode_plan(encode_plan(plan))
    assert back.num_rows == 0
    assert (back.step, back.k) == (3, 2)


def test_masks_come_out_of_their_bytes_as_they_went_in() -> None:
    late = LateMasks(ints(1, 3), np.arange(12, dtype=np.int32).reshape(2, 3, 2))
    assert same(astuple(decode_late(encode_late(late))), astuple(late))


@pytest.mark.trap("L-3")
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("is_constrained", [False, True])
def test_a_peer_launches_what_its_leader_launches(depth: int, is_constrained: bool) -> None:
    info = runner_info(max_k=2)
    leading, following = (FakeRunner(info, seed=1, delay=lambda: None) for _ in range(2))
    mine, theirs = socket.socketpair()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            follow(following, theirs, depth, PATIENCE_S)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    front = Front()
    leader = LeadingRunner(leading, [mine], PATIENCE_S)
    engine = Engine(leader, engine_config(info, depth=depth), front.receive)
    for uid in (1, 2, 3):
        constraint = ModThree(info.vocab_size) if is_constrained and uid == 2 else None
        front.streams[uid] = Stream()
        engine.add(request(uid, [3 * uid, 4], max_tokens=9), constraint=constraint)
    while engine.turn():
        pass
    mine.close()
    thread.join(PATIENCE_S)
    leading.close()
    following.close()
    assert not failed
    assert following.num_steps == leading.num_steps > 3
    for ours, peers in zip(leading.plans, following.plans, strict=True):
        assert same(astuple(replace(peers, admissions=[])), astuple(replace(ours, admissions=[])))
    for slot, other in zip(leading.slots, following.slots, strict=True):
        assert (slot.tokens, slot.done) == (other.tokens, other.done)


def test_a_peer_says_when_its_step_failed_although_no_plan_follows() -> None:
    info = runner_info()
    runner = FakeRunner(info)
    runner.fail_at = 1
    mine, theirs = socket.socketpair()
    leading = FakeRunner(info)
    leader = LeadingRunner(leading, [mine], PATIENCE_S)
    engine = Engine(leader, engine_config(info, depth=1), lambda _: None)
    engine.add(request(1, [3], max_tokens=1))
    engine.turn()
    with pytest.raises(RuntimeError):
        follow(runner, theirs, 1, PATIENCE_S)
    mine.close()
    theirs.close()


def test_a_leader_that_says_nothing_is_missed_at_rest_too() -> None:
    info = runner_info()
    mine, theirs = socket.socketpair()
    leader = LeadingRunner(FakeRunner(info), [mine], PATIENCE_S)
    engine = Engine(leader, engine_config(info, depth=1), lambda _: None)
    engine.add(request(1, [3], max_tokens=3))
    failed: list[BaseException] = []

    def run() -> None:
        try:
            follow(FakeRunner(info), theirs, 1, 1.0)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while engine.turn():
        pass
    for _ in range(12):
        time.sleep(0.2)
        assert not engine.turn()  # a pulse
    assert thread.is_alive(), "it rests"
    thread.join(PATIENCE_S)
    assert [type(x) for x in failed] == [CollectiveError]
    assert "has sent nothing for 2 s" in str(failed[0])
    mine.close()
    theirs.close()


def test_a_peer_that_takes_no_plan_is_missed() -> None:
    info = runner_info()
    mine, theirs = socket.socketpair()
    leader = LeadingRunner(FakeRunner(info), [mine], 0.05)
    with (
        closing(mine),
        closing(theirs),
        pytest.raises(CollectiveError, match=r"has not read its plan for 0\.05 s"),
    ):
        leader.send(1, bytes(10_000_000))
