"""Several ranks behind one client: who gets what, and how all of them end together."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from paceline import LLM, SamplingParams
from paceline.config import EngineConfig
from paceline.engine.client import EngineClient
from paceline.engine.launch import EngineProcess
from paceline.errors import CheckpointError, ConfigError, EngineDead
from tests.engine.echo_client import (
    FACTORY,
    Stream,
    echo_client,
    echo_front,
    pump_for_ever,
    pump_until_finished,
    submit,
)
from tests.engine.test_client_process import first_line, is_running, members, start, wait_gone
from tests.patience import PATIENCE_S
from tests.tiers import first_or_more

DP2: dict[str, Any] = {"data_parallel_size": 2}
DP4: dict[str, Any] = {"data_parallel_size": 4}
TP2: dict[str, Any] = {"tensor_parallel_size": 2}
FORCED: dict[str, Any] = {"force_collectives": True}
TP2_DP2: dict[str, Any] = {**TP2, **DP2}
# Replicas that wait for each other.
DP2_EP: dict[str, Any] = {**DP2, "enable_expert_parallel": True}
DP4_EP: dict[str, Any] = {**DP4, "enable_expert_parallel": True}
LAYOUTS = [
    pytest.param(DP2, id="dp2"),
    pytest.param(TP2, id="tp2"),
    pytest.param(TP2_DP2, id="tp2-dp2"),
]

SCRIPT = """
import sys, time
from paceline.config import EngineConfig
from paceline.engine.client import EngineClient
from paceline.engine.launch import EngineProcess
from tests.engine.echo_client import FACTORY, echo_front, run

def say(stage, fraction):
    print("progress", flush=True)

config = EngineConfig.from_keywords(
    model=sys.argv[1], data_parallel_size=2, tensor_parallel_size=2
)
client = EngineClient.start(config, factory=FACTORY, front=echo_front(), progress=say)
print("pids", *client.engine_pids, flush=True)
print(run(client, "abc", max_tokens=6).text(), flush=True)
"""


@pytest.fixture(autouse=True)
def temporary_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """What ranks share has no name in any folder, so nothing can stay there or find it full."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    assert list(folder.iterdir()) == []


def ranks(behaviour: str = "", **options: Any) -> Any:
    return echo_client(behaviour, in_process=False, **options)


def assert_gone(pids: list[int]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    for pid in pids:
        assert wait_gone(pid, max(0.0, give_up_s - time.monotonic())), f"process {pid} stayed"


def errors_of(streams: list[Stream]) -> list[str]:
    found = []
    for stream in streams:
        assert stream.last().finish_reason == "error"
        assert stream.generation is not None
        found.append(str(stream.generation.error))
    return found


def submit_for_ever(client: EngineClient) -> NoReturn:
    for number in itertools.count():
        submit(client, str(number), "abc" * 20, max_tokens=4)
    raise AssertionError


# ---- life


@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_get_the_tokens_of_one_rank_and_nothing_stays(layout: dict[str, Any]) -> None:
    prompts = [f"prompt {i} " for i in range(10)]
    with ranks(**layout) as client:
        pids = client.engine_pids
        sizes = (layout.get("tensor_parallel_size", 1), layout.get("data_parallel_size", 1))
        assert len(set(pids)) == sizes[0] * sizes[1]
        assert client.num_slots == 8 * sizes[1]
        streams = [submit(client, p, p, max_tokens=18, n=2) for p in prompts]
        pump_until_finished(client, *streams)
        assert [s.text(i) for s in streams for i in (0, 1)] == [
            (p * 3)[:18] for p in prompts for _ in (0, 1)
        ]
        assert all(is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize(
    "options", first_or_more([{}, DP2, TP2_DP2, FORCED], (TP2_DP2, FORCED).__contains__)
)
def test_ranks_put_nothing_into_the_temporary_folder(
    options: dict[str, Any], temporary_folder: Path
) -> None:
    with ranks(**options):
        assert list(temporary_folder.iterdir()) == []


def test_progress_comes_from_one_rank() -> None:
    said: list[tuple[str, float]] = []
    config = EngineConfig.from_keywords(model="", **DP2)
    client = EngineClient.start(
        config, factory=FACTORY, front=echo_front(), progress=lambda *news: said.append(news)
    )
    client.close()
    assert said == [("loading", 0.0), ("loading", 1.0)]


def test_several_ranks_do_not_fit_into_this_process() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2 x data_parallel_size 2 are 4"):
        LLM("", engine_in_process=True, **TP2_DP2)


# ---- who gets what


@pytest.mark.trap("C14")
def test_a_burst_reaches_all_replicas_evenly() -> None:
    with ranks("delay_s=0.01 slots=8", **DP4) as client:
        streams = [submit(client, str(i), "abc", max_tokens=60) for i in range(32)]
        assert client.requests.router.num_open == [8, 8, 8, 8]
        while not all(s.deltas for s in streams):
            client.pump(1.0)
        # All 32 run at once: no replica has more than its eight slots.
        assert (client.stats.num_running, client.stats.num_waiting) == (32, 0)
        assert 0.0 < client.stats.kv_usage < 0.5
        pump_until_finished(client, *streams)
        while client.stats.num_running:
            client.pump(1.0)
        assert client.stats.num_generated_tokens == 32 * 60
        assert client.requests.router.num_open == [0, 0, 0, 0]


def test_an_abort_reaches_the_replica_that_has_the_request() -> None:
    with ranks("delay_s=0.05 slots=1 max_len=4096", **DP2) as client:
        first = [submit(client, name, "abc", max_tokens=4000) for name in ("a", "b")]
        while not all(s.deltas for s in first):
            client.pump(1.0)
        for name in ("a", "b"):  # each holds the only slot of its replica
            client.abort(name)
        later = [submit(client, name, "xy", max_tokens=4) for name in ("c", "d")]
        pump_until_finished(client, *later)
        assert [s.text() for s in later] == ["xyxy", "xyxy"]


def test_a_stop_string_frees_the_slot_of_its_own_replica() -> None:
    with ranks("delay_s=0.05 slots=1 max_len=4096", **DP2) as client:
        streams = [submit(client, str(i), "abc!", max_tokens=4000, stop="!") for i in range(6)]
        pump_until_finished(client, *streams)
        assert [s.text() for s in streams] == ["abc"] * 6


def test_prefixes_are_cached_and_forgotten_by_every_replica() -> None:
    prompt = "0123456789abcdef" * 4
    with ranks(**DP2) as client:

        def cached() -> list[int]:
            streams = [submit(client, str(i), prompt, max_tokens=2) for i in range(2)]
            pump_until_finished(client, *streams)
            return [s.generation.metrics.num_cached_tokens for s in streams if s.generation]

        assert cached() == [0, 0]
        assert min(cached()) > 0
        client.reset_prefix_cache()
        assert cached() == [0, 0]


def test_traces_of_all_replicas_come_together() -> None:
    with ranks(**DP2) as client:
        client.start_trace()
        streams = [submit(client, str(i), "abc", max_tokens=8) for i in range(4)]
        pump_until_finished(client, *streams)
        spans = client.take_trace()
        assert {s.replica for s in spans} == {0, 1}
        assert {s.lane for s in spans if s.replica == 1} >= {"plan", "launch", "commit", "device"}
        assert client.take_trace() == []


def test_drain_finishes_the_requests_of_every_replica_and_then_all_ranks_end() -> None:
    with ranks("delay_s=0.005", **TP2_DP2) as client:
        pids = client.engine_pids
        # One replica has much less to do: it ends first, and the other goes on.
        streams = [
            submit(client, "a", "abc", max_tokens=3),
            submit(client, "b", "xy", max_tokens=90),
        ]
        client.pump(0.05)
        client.drain()
        with pytest.raises(EngineDead, match="shutting down"):
            submit(client, "late", "abc")
        pump_until_finished(client, *streams)
        assert [s.text() for s in streams] == ["abc", "xy" * 45]
        with pytest.raises(EngineDead, match="as it was asked to"):
            pump_for_ever(client)
        assert_gone(pids)


# ---- death


@pytest.mark.parametrize(
    ("layout", "victim", "label"),
    [
        pytest.param(DP2, 1, r"rank 1 \(replica 1\)", marks=pytest.mark.more),
        pytest.param(DP4, 0, r"rank 0 \(replica 0\)", marks=pytest.mark.more),
        pytest.param(TP2, 1, r"rank 1 \(replica 0\)", marks=pytest.mark.more),
        (TP2, 0, r"rank 0 \(replica 0\)"),
        (TP2_DP2, 3, r"rank 3 \(replica 1\)"),
    ],
)
def test_a_killed_rank_ends_all_ranks_and_every_request_hears_which_one(
    layout: dict[str, Any], victim: int, label: str
) -> None:
    with ranks("delay_s=0.005", **layout) as client:
        pids = client.engine_pids
        streams = [submit(client, str(i), "abc", max_tokens=400) for i in range(6)]
        while not all(s.deltas for s in streams):
            client.pump(1.0)
        os.kill(pids[victim], signal.SIGKILL)
        with pytest.raises(EngineDead, match=rf"is gone: {label}: .*SIGKILL"):
            pump_for_ever(client)
        assert_gone(pids)
        for error in errors_of(streams):
            assert "SIGKILL" in error
            assert f"rank {victim} " in error
        with pytest.raises(EngineDead, match=label):
            submit(client, "later", "abc")


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        pytest.param(DP2, 1, marks=pytest.mark.more),
        pytest.param(TP2, 1, marks=pytest.mark.more),
        (TP2_DP2, 2),
    ],
)
def test_a_failing_device_ends_all_ranks_with_its_own_reason(
    layout: dict[str, Any], rank: int
) -> None:
    with ranks(f"delay_s=0.005 fail_at=20 at_rank={rank}", **layout) as client:
        pids = client.engine_pids
        with client.together():  # no rank fails before they are all there
            streams = [submit(client, str(i), "abc", max_tokens=400) for i in range(4)]
        with pytest.raises(EngineDead, match=rf"rank {rank} .*caught fire"):
            pump_for_ever(client)
        assert_gone(pids)
        for error in errors_of(streams):
            assert "caught fire" in error
            assert f"rank {rank} " in error


def test_a_rank_that_only_misses_another_is_not_blamed_for_it() -> None:
    """It is heard first; the rank that it waited for says a moment later what happened."""
    behaviour = "delay_s=0.005 miss_at=20 fail_at=60 at_rank=1"
    with ranks(behaviour, **DP2_EP) as client:
        with client.together():  # no rank fails before they are all there
            streams = [submit(client, str(i), "abc", max_tokens=400) for i in range(2)]
        with pytest.raises(EngineDead, match=r"gone: rank 1 \(replica 1\): .*caught fire"):
            pump_for_ever(client)
        assert all("caught fire" in error for error in errors_of(streams))


def test_when_every_rank_misses_another_the_first_one_heard_is_named() -> None:
    with ranks("delay_s=0.005 miss_at=20", **DP2_EP) as client:
        pids = client.engine_pids
        with client.together():  # no rank fails before they are all there
            streams = [submit(client, str(i), "abc", max_tokens=400) for i in range(2)]
        with pytest.raises(EngineDead, match=r"gone: rank [01] .*waited in vain"):
            pump_for_ever(client)
        assert_gone(pids)
        assert all("waited in vain" in error for error in errors_of(streams))


@pytest.mark.parametrize(
    ("layout", "hangs", "late"),
    [
        (DP2_EP, 1, r"rank 1 \(replica 1\) did not answer; rank 0 "),
        # On a busy machine one of the others may not have answered yet either.
        pytest.param(
            *(DP4_EP, 2, r"(rank \d .* and )*rank 2 \(.* did not answer; rank [013] "),
            marks=pytest.mark.more,
        ),
    ],
)
def test_a_rank_that_stays_silent_while_all_others_give_up_is_named_first(
    layout: dict[str, Any], hangs: int, late: str
) -> None:
    behaviour = f"delay_s=0.005 miss_at=20 hang_at=15 at_rank={hangs}"
    with ranks(behaviour, **layout) as client:
        pids = client.engine_pids
        with client.together():  # no rank fails before they are all there
            streams = [submit(client, str(i), "abc", max_tokens=400) for i in range(4)]
        with pytest.raises(EngineDead, match=rf"gone: {late}.*waited in vain"):
            pump_for_ever(client)
        assert_gone(pids)
        assert all("did not answer" in error for error in errors_of(streams))


def test_an_idle_front_learns_of_a_dead_rank_when_it_submits() -> None:
    with ranks(**TP2) as client:
        pids = client.engine_pids
        os.kill(pids[1], signal.SIGKILL)
        assert wait_gone(pids[1])
        submit(client, "one", "abc", max_tokens=400)
        with pytest.raises(EngineDead, match=r"rank 1 .*SIGKILL"):
            pump_for_ever(client)
        assert_gone(pids)


def test_a_death_that_an_abort_meets_first_is_still_shown_to_an_event_loop() -> None:
    """The other replica knows nothing of it and has nothing to say."""
    with ranks("delay_s=0.005", **DP2) as client:
        pids = client.engine_pids
        one, _, three = (submit(client, str(i), "abc", max_tokens=400) for i in range(3))
        client.abort("1")  # all that replica 1 has
        while not (one.deltas and three.deltas):
            client.pump(1.0)
        os.kill(pids[0], signal.SIGKILL)
        assert wait_gone(pids[0])
        client.abort("0")
        assert select.select([client.fileno()], [], [], PATIENCE_S)[0]
        with pytest.raises(EngineDead, match=r"rank 0 .*SIGKILL"):
            client.pump(None)
        assert "SIGKILL" in errors_of([three])[0]
        assert_gone(pids)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(DP2, id="dp2"),
        pytest.param(TP2, id="tp2", marks=pytest.mark.more),
        pytest.param(TP2_DP2, id="tp2-dp2", marks=pytest.mark.more),
    ],
)
def test_a_leader_that_stands_still_and_reads_nothing_is_given_up(layout: dict[str, Any]) -> None:
    """All are idle, so no other replica would notice. A message that does not fit any more tells,
    and where the leader has a peer, the peer may be faster."""
    by_peer = "| did not answer; rank 1 " if "tensor_parallel_size" in layout else ""
    noticed = rf"rank 0 .*( has read no message for 1 s{by_peer})"
    with ranks(stall_timeout=1.0, **layout) as client:
        for group in client._supervisor._groups:
            assert group.cluster._watch is not None
            group.cluster._watch.end()  # it would miss the heartbeats about as soon
        pids = client.engine_pids
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(EngineDead, match=noticed):
            submit_for_ever(client)
        with pytest.raises(EngineDead, match=noticed):
            client.pump(None)
        assert client.num_open == 0
        assert_gone(pids)


def test_close_does_not_wait_for_a_rank_that_reads_nothing() -> None:
    with ranks(**DP2) as client:
        pids = client.engine_pids
        os.kill(pids[0], signal.SIGSTOP)
        channel = client._supervisor._groups[0].cluster._ranks[0].channel
        with contextlib.suppress(BlockingIOError):
            while True:
                channel._socket.send(bytes(1 << 16))
        client.close(grace_s=2.0)
        assert_gone(pids)


def test_a_rank_that_hangs_in_a_step_does_not_hold_up_close() -> None:
    with ranks("hang_at=6", **TP2_DP2) as client:
        pids = client.engine_pids
        streams = [submit(client, str(i), "abc", max_tokens=50) for i in range(2)]
        while not all(s.deltas for s in streams):
            client.pump(1.0)
        time.sleep(0.2)
        started = time.monotonic()
        client.close(grace_s=2 * PATIENCE_S)
        assert time.monotonic() - started < PATIENCE_S, "the grace was waited for"
        assert not any(is_running(pid) for pid in pids)


def test_an_error_while_loading_on_one_rank_names_it_and_keeps_its_type() -> None:
    # Other tests of the group have children of their own.
    ours = os.getpgid(0), (os.getpid(), 1)
    before = members(*ours)
    config = EngineConfig.from_keywords(model="refuse=/nowhere at_rank=1 load_s=0.1", **DP2)
    with pytest.raises(CheckpointError) as caught:
        EngineClient.start(config, factory=FACTORY, front=echo_front())
    assert str(caught.value) == "rank 1 (replica 1): /nowhere is no checkpoint."
    assert set(members(*ours)) <= set(before)


def test_a_rank_that_dies_while_loading_is_an_error_and_no_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig.from_keywords(model="load_s=600", **DP2)
    ranks: list[EngineProcess] = []
    start_one = EngineProcess.__init__

    def start_and_remember(rank: EngineProcess, *arguments: Any) -> None:
        start_one(rank, *arguments)
        ranks.append(rank)

    def kill_one(stage: str, fraction: float) -> None:
        ranks[1].kill()

    monkeypatch.setattr(EngineProcess, "__init__", start_and_remember)
    with pytest.raises(EngineDead, match=r"could not start: rank 1 \(replica 1\): .*SIGKILL"):
        EngineClient.start(config, factory=FACTORY, front=echo_front(), progress=kill_one)


# ---- the front


def test_ctrl_c_while_loading_ends_every_rank() -> None:
    with start(SCRIPT, "load_s=600") as front:
        assert first_line(front) == "progress"
        os.killpg(front.pid, signal.SIGINT)  # as a terminal does
        front.wait(PATIENCE_S)
        assert members(front.pid) == []
        assert front.stderr is not None
        noise = front.stderr.read()
        assert noise.count("Traceback") <= 1, noise  # the front's own, of the script


@pytest.mark.parametrize("way", ["killed", "ends"])
def test_no_rank_outlives_its_front(way: str) -> None:
    tail = "\ntime.sleep(600)" if way == "killed" else ""
    with start(SCRIPT + tail, "") as front:
        lines = [first_line(front) for _ in range(4)]
        pids = [int(pid) for pid in lines[2].split()[1:]]
        assert (len(pids), lines[3]) == (4, "abcabc")
        if way == "killed":
            front.kill()
        else:
            assert front.wait(PATIENCE_S) == 0
        assert_gone(pids)


def test_a_fork_of_the_front_takes_no_ranks_along() -> None:
    code = (
        "\nimport os\nif os.fork() == 0:\n    sys.exit(0)\nos.wait()\n"
        "print(run(client, 'xy', max_tokens=4).text(), flush=True)"
    )
    with start(SCRIPT + code, "") as front:
        out, errors = front.communicate(timeout=PATIENCE_S)
        assert out.splitlines()[-1] == "xyxy", errors


def test_llm_spreads_its_prompts_and_keeps_their_order() -> None:
    config = EngineConfig.from_keywords(model="slots=2", **TP2_DP2)
    client = EngineClient.start(config, factory=FACTORY, front=echo_front())
    with LLM.from_client(client) as llm:
        prompts = [f"{i} " for i in range(30)]
        results = llm.generate(prompts, SamplingParams(max_tokens=9), use_tqdm=False)
        assert [r.outputs[0].text for r in results] == [(p * 9)[:9] for p in prompts]
    assert_gone(client.engine_pids)
