"""A death costs a pause: groups of ranks start again, and open requests go on where they were."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.engine import supervisor
from paceline.engine.client import EngineClient
from paceline.engine.cluster import Cluster
from paceline.engine.messages import decode_submit, encode_submit, submit_uid
from paceline.engine.open_requests import MOST_FRUITLESS
from paceline.engine.router import Router
from paceline.errors import CheckpointError, EngineDead, InvalidRequest, RequestFailed
from paceline.request import EngineRequest
from paceline.scheduler.scheduler import Scheduler
from tests.engine.echo_client import (
    Stream,
    echo_client,
    pump_for_ever,
    pump_until,
    pump_until_finished,
    submit,
)
from tests.engine.harness import engine_config, request
from tests.engine.test_client_process import birth, is_running, wait_gone
from tests.fakes import runner_info

DP2: dict[str, Any] = {"data_parallel_size": 2}
TP2: dict[str, Any] = {"tensor_parallel_size": 2}
DP2_EP: dict[str, Any] = {**DP2, "enable_expert_parallel": True}
PROMPTS = ("abc", "hello ", "xy", "12345")
NUM_TOKENS = 150


def engine(behaviour: str = "", **options: Any) -> Any:
    values = {"max_restarts": 3, **options}
    return echo_client(f"delay_s=0.01 {behaviour}", in_process=False, **values)


def submit_all(client: EngineClient, **params: Any) -> list[Stream]:
    return [submit(client, p, p, max_tokens=NUM_TOKENS, **params) for p in PROMPTS]


def pump_until_all_begin(client: EngineClient, streams: list[Stream]) -> None:
    pump_until(client, lambda: all(s.deltas for s in streams))


def assert_whole(streams: list[Stream], n: int = 1) -> None:
    """Every token once, and none other."""
    for prompt, stream in zip(PROMPTS, streams, strict=True):
        for index in range(n):
            assert stream.text(index) == (prompt * NUM_TOKENS)[:NUM_TOKENS]
            assert stream.last(index).finish_reason == "length"


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        ({}, 0),
        pytest.param(DP2, 1, marks=pytest.mark.more),
        pytest.param(TP2, 1, marks=pytest.mark.more),
        pytest.param(TP2, 0, marks=pytest.mark.more),
        pytest.param(DP2_EP, 0, marks=pytest.mark.more),
    ],
)
def test_a_killed_rank_costs_no_token_and_sends_none_twice(
    layout: dict[str, Any], victim: int
) -> None:
    with engine(**layout) as client:
        streams = submit_all(client, n=2, logprobs=1, prompt_logprobs=1)
        pump_until_all_begin(client, streams)
        before = client.engine_pids
        os.kill(before[victim], signal.SIGKILL)
        pump_until_finished(client, *streams)
        assert_whole(streams, n=2)
        for stream in streams:
            for index in (0, 1):
                tables = [t for d in stream.of(index) for t in d.logprobs or []]
                assert len(tables) == NUM_TOKENS
            assert [d.prompt_logprobs is not None for d in stream.of(0)].count(True) == 1
        pump_until(client, lambda: not client.stats.num_restarting)
        assert client.stats.restarts == {"died": 1}
        assert client.stats.num_resumed > 0
        replica = victim // layout.get("tensor_parallel_size", 1)
        lost = client.stats.ranks[replica]
        assert "SIGKILL" in lost.reason
        totals = [
            client.stats.ranks[r].num_generated_tokens for r in range(client.stats.num_replicas)
        ]
        assert sum(totals) == client.stats.num_generated_tokens == 2 * len(PROMPTS) * NUM_TOKENS
        assert client.stats.num_held == 0
        assert len(client.engine_pids) == len(before)
        assert before[victim] not in client.engine_pids
        again = submit_all(client)
        pump_until_finished(client, *again)
        assert_whole(again)


def test_requests_of_a_dead_replica_move_to_a_living_one_at_once() -> None:
    with engine("load_s=1.5", **DP2) as client:
        streams = submit_all(client)
        pump_until_all_begin(client, streams)
        os.kill(client.engine_pids[0], signal.SIGKILL)
        while not all(s.finished for s in streams):
            client.pump(1.0)
            assert client.requests.router.num_open[0] == 0 or not client.stats.num_restarting
        assert_whole(streams)


@pytest.mark.parametrize("behaviour", ["hang_at=20", pytest.param("", marks=pytest.mark.more)])
def test_a_lone_rank_that_hangs_or_freezes_is_found_and_restarted(behaviour: str) -> None:
    """Its device, or all of its process."""
    with engine(behaviour, stall_timeout=1.0, max_restarts=20) as client:
        stream = submit(client, "a", "abc", max_tokens=30)
        pump_until(client, lambda: bool(stream.deltas))
        pids = client.engine_pids
        if not behaviour:
            os.kill(pids[0], signal.SIGSTOP)
        pump_until_finished(client, stream)
        assert stream.text() == "abc" * 10
        assert client.stats.restarts["died"] >= 1
        assert wait_gone(pids[0])


def test_a_failing_device_is_restarted_without_a_word_to_its_clients() -> None:
    with engine("fail_at=40", max_restarts=20) as client:
        stream = submit(client, "a", "abc", max_tokens=60)
        pump_until_finished(client, stream)
        assert stream.text() == "abc" * 20
        assert "caught fire" in client.stats.ranks[0].reason


def test_without_retry_requests_hear_of_the_death_and_the_engine_comes_back() -> None:
    with engine(retry=False) as client:
        streams = submit_all(client)
        pump_until_all_begin(client, streams)
        os.kill(client.engine_pids[0], signal.SIGKILL)
        pump_until_finished(client, *streams)
        for stream in streams:
            assert stream.last().finish_reason == "error"
            assert stream.generation is not None
            assert isinstance(stream.generation.error, EngineDead)
        again = submit_all(client)  # they wait for the restart
        pump_until_finished(client, *again)
        assert_whole(again)


def test_after_the_last_restart_a_death_is_the_end() -> None:
    with engine(max_restarts=1) as client:
        streams = submit_all(client)
        for _ in range(2):
            pump_until(client, lambda: bool(client.engine_pids))
            pids = client.engine_pids
            num_tokens = client.stats.num_generated_tokens
            if client.stats.restarts:
                pump_until(client, lambda n=num_tokens: client.stats.num_generated_tokens > n)  # type: ignore[misc]
            os.kill(pids[0], signal.SIGKILL)
            if not client.stats.restarts:
                pump_until(client, lambda: bool(client.stats.restarts))
        with pytest.raises(EngineDead, match="SIGKILL"):
            pump_for_ever(client)
        assert all(s.last().finish_reason == "error" for s in streams)


def test_a_request_that_kills_each_engine_is_given_up_before_the_server_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "_MOST_DELAY_S", 0.1)
    with engine("fail_at=1", max_restarts=MOST_FRUITLESS + 1) as client:
        stream = submit(client, "a", "abc")
        pump_until_finished(client, stream)
        assert stream.generation is not None
        assert isinstance(stream.generation.error, RequestFailed)
        assert "3 times in a row" in str(stream.generation.error)
        pump_until(client, lambda: not client.stats.num_restarting)
        assert client.is_alive


def test_a_restart_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as client:
        launch = Cluster.launch
        num_failed: list[int] = []

        def fail_once(*arguments: Any, **options: Any) -> Cluster:
            if not num_failed:
                num_failed.append(1)
                raise CheckpointError("the disk is away")
            return launch(*arguments, **options)

        monkeypatch.setattr(Cluster, "launch", fail_once)
        streams = submit_all(client)
        pump_until_all_begin(client, streams)
        os.kill(client.engine_pids[0], signal.SIGKILL)
        pump_until_finished(client, *streams)
        assert_whole(streams)
        assert num_failed


def test_an_abort_during_a_restart_is_final_and_new_requests_wait() -> None:
    with engine("load_s=0.5") as client:
        streams = submit_all(client)
        pump_until_all_begin(client, streams)
        os.kill(client.engine_pids[0], signal.SIGKILL)
        pump_until(client, lambda: client.stats.is_restarting)
        client.abort(PROMPTS[0])
        late = submit(client, "late", "zz", max_tokens=4)
        assert client.num_leaving == 0
        pump_until_finished(client, late, *streams[1:])
        assert late.text() == "zzzz"
        assert len(streams[0].text()) < NUM_TOKENS


def test_close_during_a_restart_leaves_no_process() -> None:
    with engine("load_s=2") as client:
        os.kill(client.engine_pids[0], signal.SIGKILL)
        pump_until(client, lambda: client.stats.is_restarting)
        restart = client._supervisor._groups[0].restart
        assert restart is not None
        pump_until(client, lambda: restart._new is not None)
        assert restart._new is not None
        (pid,) = restart._new.pids
        client.close()
        assert not is_running(pid)


def test_a_rank_can_be_drained_and_restarted_under_load() -> None:
    with engine(max_restarts=0, **DP2) as client:
        streams = submit_all(client)
        before = {pid: birth(pid) for pid in client.engine_pids}
        pump_until_all_begin(client, streams)
        for rank, grace_s in ((0, 0.0), (1, 60.0)):  # its requests move; they finish
            client.drain_rank(rank, grace_s)
            pump_until(client, lambda r=rank: not client.is_restarting(r))  # type: ignore[misc]
        pump_until_finished(client, *streams)
        assert_whole(streams)
        assert client.stats.restarts == {"drained": 2}
        assert all(birth(pid) != born for pid, born in before.items()), "an old rank runs on"
        assert all(map(is_running, client.engine_pids))
        with pytest.raises(InvalidRequest, match="ranks are 0 to 1"):
            client.drain_rank(2, 0.0)


def test_a_rank_that_dies_while_it_is_drained_restarts_once() -> None:
    with engine() as client:
        streams = submit_all(client)
        pump_until_all_begin(client, streams)
        client.drain_rank(0, 60.0)
        os.kill(client.engine_pids[0], signal.SIGKILL)
        pump_until_finished(client, *streams)
        assert_whole(streams)
        pump_until(client, lambda: not client.is_restarting(0))
        assert client.stats.restarts == {"died": 1}


def test_an_engine_in_a_thread_cannot_be_restarted() -> None:
    with (
        echo_client(max_restarts=3) as client,
        pytest.raises(InvalidRequest, match="is a thread"),
    ):
        client.drain_rank(0, 0.0)


def test_generate_goes_on_after_a_death() -> None:
    with engine() as client:
        llm = LLM.from_client(client)
        pid, pump = client.engine_pids[0], client.pump
        killed: list[int] = []

        def kill_once(timeout_s: float | None = 0.0) -> int:
            if client.stats.num_generated_tokens > 20 and not killed:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)
            return int(pump(timeout_s))

        client.pump = kill_once
        outputs = llm.generate(list(PROMPTS), SamplingParams(max_tokens=NUM_TOKENS), use_tqdm=False)
        assert killed
        assert [o.outputs[0].text for o in outputs] == [(p * 150)[:NUM_TOKENS] for p in PROMPTS]


# ---- parts


def test_a_submit_keeps_prompt_and_output_apart() -> None:
    params = SamplingParams(max_tokens=9)
    request = EngineRequest(7, [1, 2, 3], params, output_token_ids=[4, 5])
    frame = encode_submit(request)
    read = decode_submit(frame)
    assert submit_uid(frame) == 7
    assert (list(read.prompt_token_ids), list(read.output_token_ids)) == ([1, 2, 3], [4, 5])
    assert list(read.token_ids) == [1, 2, 3, 4, 5]


def test_a_resumed_request_is_admitted_as_a_preempted_one() -> None:
    scheduler = Scheduler(engine_config(runner_info()), runner_info())
    resumed = replace(request(1, [5, 6, 7], max_tokens=9), output_token_ids=[8, 9])
    scheduler.add(resumed)
    plan = scheduler.plan()
    assert plan is not None
    (init,) = plan.admissions
    assert init.tokens.tolist() == [5, 6, 7, 8, 9]
    assert (init.prompt_len, init.max_len) == (3, 12)
    assert plan.samples_B.tolist() == [True]


def test_a_closed_replica_gets_no_request() -> None:
    router = Router(2)
    router.closed = {0}
    assert [router.assign([uid]) for uid in (1, 2, 3)] == [1, 1, 1]
    router.closed = {0, 1}
    assert router.assign([4]) is None
    assert router.of(1) == [1, 2, 3]
    router.closed = set()
    assert router.assign([4]) == 0


def test_restarts_in_a_row_wait_longer_each_time() -> None:
    assert [supervisor._delay_s(n) for n in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
