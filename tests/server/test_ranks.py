"""`paceline serve` over several ranks: as one server, and gone as one."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

import pytest

from tests.server.processes import running

TP2_DP2 = {"tensor_parallel_size": 2, "data_parallel_size": 2}
DP2 = {"data_parallel_size": 2}


def complete(process: Any, prompt: str, max_tokens: int) -> str:
    fields = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    status, _, body = process.request("POST", "/v1/completions", **fields)
    assert status == 200, body
    return str(json.loads(body)["choices"][0]["text"])


def test_eight_clients_at_once_and_then_one_alone() -> None:
    with running("slots=2", engine=TP2_DP2, num_ranks=4) as process:
        texts: dict[int, str] = {}

        def ask(i: int) -> None:
            texts[i] = complete(process, f"client {i} ", 64)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert texts == {i: (f"client {i} " * 8)[:64] for i in range(8)}
        assert complete(process, "alone ", 12) == "alone alone "
        metrics = process.request("GET", "/metrics")[2].decode()
        assert "paceline:num_requests_running" in metrics
        process.popen.send_signal(signal.SIGTERM)
        code, _ = process.await_exit()
        assert code == 0


def test_a_header_chooses_the_replica() -> None:
    with running("delay_s=0.02 slots=4", engine=DP2, num_ranks=2) as process:
        fields: dict[str, Any] = {"prompt": "abc", "max_tokens": 400}
        streams = [
            process.open_stream(headers={"X-data-parallel-rank": "1"}, **fields) for _ in range(3)
        ]
        for stream in streams:
            stream.read1()
        metrics = process.request("GET", "/metrics")[2].decode()
        running_by_rank = {
            line.split('rank="')[1][0]: float(line.split()[-1])
            for line in metrics.splitlines()
            if line.startswith("paceline:rank_num_requests_running{")
        }
        assert running_by_rank["1"] == 3
        assert running_by_rank.get("0", 0) == 0
        for value in ("2", "-1", "first", "9" * 40):
            headers = {"X-data-parallel-rank": value}
            status, _, body = process.request("POST", "/v1/completions", headers=headers, **fields)
            assert status == 400, body
            assert json.loads(body)["error"]["param"] == "X-data-parallel-rank"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_streams_with_the_reason_and_the_server_with_1(victim: int) -> None:
    with running("delay_s=0.02", engine=DP2, num_ranks=2) as process:
        streams = [process.open_stream(prompt="abc", max_tokens=500) for _ in range(2)]
        for stream in streams:
            stream.read1()
        os.kill(process.engine_pids[victim], signal.SIGKILL)
        for stream in streams:
            body = stream.read()
            assert b'"code":"engine_dead"' in body
            assert f"rank {victim} (replica {victim})".encode() in body
        code, said = process.await_exit()
        assert code == 1
        assert "SIGKILL" in said


def test_ctrl_c_lets_the_streams_of_all_replicas_finish() -> None:
    with running("delay_s=0.01", engine=DP2, num_ranks=2) as process:
        streams = [process.open_stream(prompt="abc", max_tokens=60) for _ in range(2)]
        for stream in streams:
            stream.read1()
        process.popen.send_signal(signal.SIGINT)
        for stream in streams:
            assert stream.read().rstrip().endswith(b"data: [DONE]")
        code, said = process.await_exit()
        assert (code, "Traceback" in said) == (0, False)


def test_a_rank_that_cannot_load_is_said_and_no_rank_stays() -> None:
    with running("refuse=folder at_rank=1", engine=DP2, wait=False) as process:
        code, said = process.await_exit()
        assert code == 1
        assert "rank 1 (replica 1): folder is no checkpoint" in said
