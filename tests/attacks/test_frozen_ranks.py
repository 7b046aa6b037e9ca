"""Ranks that are stopped or hang: the server says which one, every client hears it, none stays."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.patience import wait_for
from tests.server.processes import Process, is_running, running

LONE: dict[str, Any] = {}
DP2 = {"data_parallel_size": 2}
DP2_EP = {**DP2, "enable_expert_parallel": True}  # one group: its ranks end together
TP2 = {"tensor_parallel_size": 2}
STALL_S = 1.0
STALL = {"stall_timeout": STALL_S}
PATIENCE_S = 60.0
# Longer than the front waits for a sign of life.
LONG_S = STALL_S + 4.0


def num_ranks(layout: dict[str, Any]) -> int:
    return int(layout.get("data_parallel_size", 1))


def open_streams(process: Process) -> list[Any]:
    """Of all replicas, and each has begun."""
    streams = [process.open_stream(prompt="abc", max_tokens=5000) for _ in range(4)]
    for stream in streams:
        assert stream.read1()
    return streams


def complete(process: Process) -> int:
    fields = {"prompt": "abc", "max_tokens": 4, "temperature": 0}
    return process.request("POST", "/v1/completions", **fields)[0]


@pytest.mark.parametrize(
    ("layout", "victims"),
    [
        (LONE, [0]),
        pytest.param(DP2, [0], marks=pytest.mark.more),
        pytest.param(DP2, [1], marks=pytest.mark.more),
        (DP2, [0, 1]),
    ],
)
def test_a_stopped_rank_ends_with_a_front_that_was_killed(
    layout: dict[str, Any], victims: list[int]
) -> None:
    """A stopped process reads no socket: only the kernel can end it with its parent."""
    with running(engine=layout, num_ranks=num_ranks(layout)) as process:
        pids = process.engine_pids
        try:
            for victim in victims:
                os.kill(pids[victim], signal.SIGSTOP)
            process.popen.kill()
            process.popen.wait()
            wait_for(lambda: not any(is_running(pid) for pid in pids), PATIENCE_S)
            with socket.create_server(("127.0.0.1", process.port)):
                pass  # no process holds the port
        finally:
            for pid in filter(is_running, pids):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("layout", "victims", "names"),
    [
        pytest.param(
            LONE, [0], ["the engine process (pid {0})"], id="lone", marks=pytest.mark.more
        ),
        pytest.param(DP2, [1], ["rank 1 (replica 1)", "(pid {1})"], id="one of two"),
        pytest.param(DP2_EP, [0, 1], ["rank 0", "rank 1"], id="both", marks=pytest.mark.more),
    ],
)
def test_a_frozen_rank_is_named_to_every_client_and_ends_the_server(
    layout: dict[str, Any], victims: list[int], names: list[str]
) -> None:
    behaviour, engine = "delay_s=0.02 max_len=8192", {**layout, **STALL}
    with running(behaviour, engine=engine, num_ranks=num_ranks(layout)) as process:
        pids = process.engine_pids
        streams = open_streams(process)
        for victim in victims:
            os.kill(pids[victim], signal.SIGSTOP)
        for stream in streams:
            body = stream.read().decode()
            assert '"code":"engine_dead"' in body
            assert "has sent no heartbeat for" in body
            assert all(name.format(*pids) in body for name in names), body
        code, said = process.await_exit(PATIENCE_S)
        assert code == 1
        assert "has sent no heartbeat" in said


@pytest.mark.parametrize(
    ("layout", "replica"), [pytest.param(DP2, 1, marks=pytest.mark.more), (TP2, 0)]
)
def test_a_rank_that_freezes_while_nothing_runs_is_missed(
    layout: dict[str, Any], replica: int
) -> None:
    """A leader, and a peer, for which its leader does not wait at rest."""
    with running(engine={**layout, **STALL}, num_ranks=2) as process:
        os.kill(process.engine_pids[1], signal.SIGSTOP)
        code, said = process.await_exit(PATIENCE_S)
        assert code == 1
        assert f"rank 1 (replica {replica}): the engine process" in said


@pytest.mark.parametrize(
    ("layout", "name"),
    [pytest.param(LONE, "gone: ", marks=pytest.mark.more), (DP2, "rank 1 (replica 1): ")],
)
def test_a_step_that_never_ends_is_named_to_every_client(
    layout: dict[str, Any], name: str, tmp_path: Path
) -> None:
    """The process lives and beats; its loop is what hangs."""
    hang = tmp_path / "hang"
    behaviour = f"delay_s=0.02 max_len=8192 hang_file={hang} at_rank={num_ranks(layout) - 1}"
    engine = {**layout, **STALL}
    with running(behaviour, engine=engine, num_ranks=num_ranks(layout)) as process:
        streams = open_streams(process)
        hang.touch()
        for stream in streams:
            body = stream.read().decode()
            assert '"code":"engine_dead"' in body
            assert re.search(rf"{re.escape(name)}step \d+ has not returned for", body), body
        code, said = process.await_exit(PATIENCE_S)
        assert code == 1
        assert "in launch" in said  # where its threads were


def test_a_step_that_computes_for_long_is_left_alone() -> None:
    """A long prompt on a slow machine is no hang, and neither is a kernel that is compiled."""
    with running(f"spin_at=3 spin_s={LONG_S}", engine=STALL) as process:
        assert complete(process) == 200


@pytest.mark.parametrize(
    ("layout", "who"),
    [
        (LONE, "front"),
        pytest.param(LONE, "all", marks=pytest.mark.more),
        pytest.param(DP2, "front", marks=pytest.mark.more),
        pytest.param(DP2, "all", marks=pytest.mark.more),
    ],
)
def test_after_a_pause_of_the_front_healthy_ranks_live_on(layout: dict[str, Any], who: str) -> None:
    """It has seen no beat for long, and that is its own doing. Ctrl-Z stops the ranks as well."""
    with running(engine={**layout, **STALL}, num_ranks=num_ranks(layout)) as process:
        pids = process.engine_pids
        stopped = [process.popen.pid, *(pids if who == "all" else [])]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(LONG_S)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        time.sleep(STALL_S)  # for whoever would judge by the pause
        assert complete(process) == 200
        assert all(is_running(pid) for pid in pids)
