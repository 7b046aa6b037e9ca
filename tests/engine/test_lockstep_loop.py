"""Replicas that step together, over fake runners: engines in threads, agreements in memory.

Real processes and real collectives are in tests/parallel; here are the loop's own decisions.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import pytest

from paceline.engine.engine import Engine, run_engine
from paceline.engine.messages import Control, StepMessage, Wake, decode, encode, encode_submit
from paceline.step import StepAgreement, StepProposal, StepSize
from tests.engine.harness import engine_config, request
from tests.fake_model import reference_output
from tests.fakes import FakeRunner, runner_info
from tests.patience import PATIENCE_S

K = 3


class Table:
    """Where the replicas of one test meet: an agreement is a barrier for all of them."""

    def __init__(self, size: int) -> None:
        self.proposals: list[StepProposal] = [StepProposal()] * size
        self.size = size
        self.agreements: list[list[StepProposal]] = []
        self._barrier = threading.Barrier(size, timeout=PATIENCE_S)

    def meet(self, place: int, proposal: StepProposal) -> list[StepProposal]:
        self.proposals[place] = proposal
        self._barrier.wait()
        proposals = list(self.proposals)
        if place == 0:
            self.agreements.append(proposals)
        self._barrier.wait()
        return proposals


@dataclass
class TableLockstep:
    table: Table
    place: int
    number: int = 0

    def agree(self, proposal: StepProposal) -> StepAgreement:
        proposals = self.table.meet(self.place, proposal)
        self.number += 1
        return StepAgreement(
            step_size=StepSize.joined([w.step_size for w in proposals]),
            has_plan=any(w.has_plan for w in proposals),
            is_unfinished=any(w.is_unfinished for w in proposals),
            is_draining=all(w.is_draining for w in proposals),
            has_spare_time=any(w.has_spare_time for w in proposals),
        )


@dataclass
class Replica:
    runner: FakeRunner
    engine: Engine
    inbox: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    has_stopped: bool = False
    error: BaseException | None = None

    def take(self, data: bytes) -> None:
        message = decode(data)
        if message is Control.STOPPED:
            self.has_stopped = True
        if isinstance(message, StepMessage):
            result = message.result
            for row, uid in enumerate(result.uid_B.tolist()):
                count = int(result.count_B[row])
                self.tokens.setdefault(uid, []).extend(result.token_BW[row, :count].tolist())
                if result.done_B[row]:
                    self.done.add(uid)


@contextmanager
def replicas(
    size: int,
    depth: int = 1,
    delay: Callable[[str], None] | None = None,
    *,
    is_auto: bool = False,
    **options: Any,
) -> Iterator[tuple[Table, list[Replica]]]:
    table = Table(size)
    made: list[Replica] = []
    for place in range(size):
        info = runner_info(max_k=K, num_slots=4, num_pages=64, max_model_len=64)
        runner = FakeRunner(info, seed=place, delay=lambda: None, **options)
        runner.lockstep = TableLockstep(table, place)
        replica = Replica(runner, None)  # type: ignore[arg-type]
        config = engine_config(info, depth=depth, is_auto=is_auto)
        replica.engine = Engine(runner, config, replica.take, delay=delay)
        made.append(replica)

    def run(place: int) -> None:
        others = [x for i, x in enumerate(made) if i != place]

        def wake(step: int) -> None:
            for other in others:
                other.inbox.put(encode(Wake(step)))

        try:
            run_engine(made[place].engine, made[place].inbox, wake)
        except BaseException as error:
            made[place].error = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(size)]
    for thread in threads:
        thread.start()
    yield table, made
    for replica in made:
        if not replica.has_stopped:
            replica.inbox.put(encode(Control.STOP))
    # Who waits in an agreement is not awake for a Stop; the process would end there.
    for thread in threads:
        thread.join(0.2)
    for replica in made:
        replica.runner.close()
        assert replica.error is None or isinstance(
            replica.error.__cause__, threading.BrokenBarrierError
        )


def await_done(made: list[Replica], wanted: dict[int, list[int]]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    uids = {(place, uid) for place, x in wanted.items() for uid in x}
    while any(uid not in made[place].done for place, uid in uids):
        assert time.monotonic() < give_up_s, "requests hang"
        assert all(x.error is None for x in made), [x.error for x in made]
        time.sleep(0.002)


def await_rest(table: Table) -> None:
    """Steps that were launched ahead go on after the last request; then all sleep."""
    give_up_s = time.monotonic() + PATIENCE_S
    while any(w.is_unfinished or w.has_plan for w in table.agreements[-1]):
        assert time.monotonic() < give_up_s, "replicas never rest"
        time.sleep(0.002)


def expected(uid: int, prompt: list[int], most: int) -> list[int]:
    return reference_output(request(uid, prompt, max_tokens=most), 64, 64)[0]


def submit(replica: Replica, uid: int, prompt: list[int], **params: Any) -> None:
    replica.inbox.put(encode_submit(request(uid, prompt, **params)))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_one_request_finishes_while_all_other_replicas_are_idle(depth: int) -> None:
    with replicas(3, depth) as (table, made):
        submit(made[1], 7, [1, 2, 3], max_tokens=20)
        await_done(made, {1: [7]})
        await_rest(table)
        assert made[1].tokens[7] == expected(7, [1, 2, 3], 20)
        steps = [x.runner.num_steps for x in made]
        assert len(set(steps)) == 1, "every rank runs every step"
        assert all(not p.num_rows for p in made[0].runner.plans)
        assert all(p.agreed is not None for p in made[0].runner.plans)


def test_shapes_are_agreed_and_each_rank_keeps_its_own_k() -> None:
    with replicas(2) as (_, made):
        submit(made[0], 1, list(range(1, 12)), max_tokens=12)
        submit(made[1], 2, [5], max_tokens=12)
        await_done(made, {0: [1], 1: [2]})
    for ours, theirs in zip(made[0].runner.plans, made[1].runner.plans, strict=False):
        assert ours.step == theirs.step
        assert ours.agreed == theirs.agreed
        assert ours.k == theirs.k


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_auto_has_one_k_on_all_replicas_and_no_exchange_of_its_own(depth: int) -> None:
    """One replica's drafts are always right, the other's never: each alone wants another k."""
    wanted = {0: [1, 3], 1: [2]}
    prompts = {1: [5, 6, 7], 3: [9], 2: [8, 2]}
    with replicas(2, depth, is_auto=True, no_draft=0.0) as (table, made):
        made[0].runner.acceptance, made[1].runner.acceptance = 1.0, 0.0
        for place, uids in wanted.items():
            for uid in uids:
                submit(made[place], uid, prompts[uid], max_tokens=56)
        await_done(made, wanted)
        await_rest(table)
        assert table.agreements
        num_steps = sum(any(w.has_plan for w in row) for row in table.agreements)
        assert [x.runner.num_steps for x in made] == [num_steps] * 2
    for place, uids in wanted.items():
        for uid in uids:
            assert made[place].tokens[uid] == expected(uid, prompts[uid], 56)
    plans = [x.runner.plans for x in made]
    assert [p.k for p in plans[0]] == [p.k for p in plans[1]]
    own = [[int(p.k_B.max(initial=0)) for p in of] for of in plans]
    assert max(own[0]) == K
    assert own[0] != own[1]


def test_replicas_sleep_when_all_are_idle_and_wake_for_whoever_gets_work() -> None:
    with replicas(3) as (table, made):
        for uid, place in enumerate((0, 2, 1, 1, 0), start=1):
            submit(made[place], uid, [uid, 2], max_tokens=5)
            await_done(made, {place: [uid]})
            await_rest(table)
            before = len(table.agreements)
            time.sleep(0.1)
            assert len(table.agreements) == before, "idle replicas go on agreeing"
        assert [w.is_unfinished for w in table.agreements[-1]] == [False] * 3


def test_replicas_at_rest_show_each_other_now_and_then_that_they_are_there() -> None:
    with replicas(3) as (table, made):
        for replica in made:
            replica.engine.state.heartbeat_s = 0.02
        submit(made[0], 1, [1], max_tokens=3)
        await_done(made, {0: [1]})
        await_rest(table)
        wanted = len(table.agreements) + 4
        give_up_s = time.monotonic() + PATIENCE_S
        while len(table.agreements) < wanted:
            assert time.monotonic() < give_up_s, "no replica noticed a frozen one"
            time.sleep(0.002)
        submit(made[2], 2, [3, 4], max_tokens=9)
        await_done(made, {2: [2]})
        assert made[2].tokens[2] == expected(2, [3, 4], 9)


def test_a_wake_for_an_agreement_that_has_been_is_ignored() -> None:
    with replicas(2) as (table, made):
        submit(made[0], 1, [1], max_tokens=3)
        await_done(made, {0: [1]})
        await_rest(table)
        before = len(table.agreements)
        made[1].inbox.put(encode(Wake(before)))
        time.sleep(0.05)
        assert len(table.agreements) == before
        submit(made[1], 2, [1], max_tokens=3)
        await_done(made, {1: [2]})


def test_drained_replicas_end_at_the_same_agreement() -> None:
    with replicas(3) as (table, made):
        submit(made[2], 1, [3, 4], max_tokens=16)
        for replica in made:
            replica.inbox.put(encode(Control.DRAIN))
        await_done(made, {2: [1]})
        give_up_s = time.monotonic() + PATIENCE_S
        while not all(x.has_stopped for x in made):
            assert time.monotonic() < give_up_s
            time.sleep(0.002)
        assert made[2].tokens[1] == expected(1, [3, 4], 16)
        assert all(w.is_draining for w in table.agreements[-1])


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_on_every_replica_gives_the_tokens_of_requests_run_alone(seed: int) -> None:
    """Arrivals at any moment, prompts longer than a chunk, pages that run out, idle spells."""
    random_ = random.Random(seed)

    def delay(stage: str) -> None:
        if random_.random() < 0.02:
            time.sleep(0.001)

    wanted: dict[int, list[int]] = {}
    prompts: dict[int, tuple[list[int], int]] = {}
    with replicas(2 + seed % 2, seed % 3, delay) as (table, made):
        for uid in range(1, 31):
            place = 0 if uid % 5 else random_.randrange(len(made))
            prompt = [random_.randrange(1, 50) for _ in range(random_.choice((1, 3, 17, 40)))]
            most = random_.choice((1, 2, 9, 64 - len(prompt)))
            prompts[uid] = prompt, most
            submit(made[place], uid, prompt, max_tokens=most)
            wanted.setdefault(place, []).append(uid)
            if random_.random() < 0.3:
                time.sleep(random_.random() * 0.02)
        await_done(made, wanted)
        await_rest(table)
        for place, uids in wanted.items():
            for uid in uids:
                prompt, most = prompts[uid]
                assert made[place].tokens[uid] == expected(uid, prompt, most)
        assert len({x.runner.num_steps for x in made}) == 1
