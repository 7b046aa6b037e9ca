"""Clients that leave by the hundred, and a frozen engine: what other clients notice of it.

A stopped engine process makes moments that are short otherwise as long as a test needs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.patience import wait_for
from tests.server.processes import Process, running

SLOTS = 4
# More messages than a loop reads in this many steps: a few for each request that runs when all
# clients leave, and four for the one that stays.
CROWD, MOST_STEPS = 900, 12
LARGE = [5] * 20_000  # four bytes a token: a few of these fill the socket to the engine


@contextmanager
def frozen(process: Process) -> Iterator[None]:
    """The engine's process does not run within the block."""
    os.kill(process.engine_pids[0], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.engine_pids[0], signal.SIGCONT)


def value(process: Process, name: str, **labels: str) -> float:
    """A number of /metrics."""
    _, _, text = process.request("GET", "/metrics")
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            if sample.name == f"paceline:{name}" and labels.items() <= sample.labels.items():
                return sample.value
    raise KeyError(name)


def num_here(process: Process) -> float:
    return value(process, "num_requests_running") + value(process, "num_requests_waiting")


def num_left(process: Process) -> float:
    return value(process, "request_success_total", finished_reason="abort")


def ask(process: Process, **fields: object) -> socket.socket:
    """A request whose answer the caller may not wait for."""
    body = json.dumps({"prompt": "abc", "max_tokens": 400, **fields}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{process.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    sock = socket.create_connection(("127.0.0.1", process.port), timeout=60)
    sock.sendall(head.encode() + body)
    return sock


def come_and_leave(
    process: Process, num_clients: int, num_sequences: int = 1, **fields: object
) -> None:
    """Clients with this many sequences each, until the server has noticed that they are gone."""
    here, left, count = num_here(process), num_left(process), num_clients * num_sequences
    with ExitStack() as clients:
        for _ in range(num_clients):
            clients.enter_context(ask(process, **fields))
        wait_for(lambda: num_here(process) == here + count)
    wait_for(lambda: num_left(process) == left + count)


def complete(process: Process, **fields: object) -> int:
    return process.request("POST", "/v1/completions", **{"prompt": "abc", **fields})[0]


def num_steps(process: Process) -> float:
    return value(process, "step_bubble_seconds_count")


def test_requests_that_were_left_unread_are_not_computed() -> None:
    with running(f"slots={SLOTS} delay_s=0.05") as process:
        with frozen(process):
            come_and_leave(process, CROWD)
        assert complete(process, max_tokens=3) == 200
        assert num_steps(process) <= MOST_STEPS


def test_no_step_is_made_for_those_who_left_while_they_waited_behind_others() -> None:
    with running(f"slots={SLOTS} delay_s=0.05") as process:
        clients = [ask(process, max_tokens=500) for _ in range(CROWD)]
        wait_for(lambda: num_here(process) == CROWD)
        wait_for(lambda: value(process, "num_requests_running") == SLOTS)
        with frozen(process):
            num_before = num_steps(process)
            for client in clients:
                client.close()
            wait_for(lambda: num_left(process) == CROWD)
        assert complete(process, max_tokens=3) == 200
        assert num_steps(process) - num_before <= MOST_STEPS


def test_a_place_is_free_only_when_the_engine_has_let_go() -> None:
    with running(max_waiting=6) as process:
        with frozen(process):
            come_and_leave(process, 1, 4, n=4)
            come_and_leave(process, 1, 2, prompt=["abc", "def"])
            assert complete(process) == 429
        wait_for(lambda: complete(process, n=6, max_tokens=3) == 200)


def test_a_storm_of_requests_that_leave_is_answered_with_429() -> None:
    answers: set[bytes] = set()
    with running(max_waiting=20) as process, frozen(process):
        for _ in range(4):
            come_and_leave(process, 5)
        for _ in range(50):
            with ask(process) as client:
                answers.add(client.recv(12))
        assert num_here(process) == 20
    assert answers == {b"HTTP/1.1 429"}


def test_an_engine_that_reads_nothing_does_not_hold_up_the_front() -> None:
    with running("max_len=30000", engine={"stall_timeout": 600}) as process, ExitStack() as stack:
        with frozen(process):
            for _ in range(20):
                stack.enter_context(ask(process, prompt=LARGE, max_tokens=2))
            # More than a socket holds. The requests of this test end after a minute without answer.
            wait_for(lambda: num_here(process) == 20)
            assert process.request("GET", "/health")[0] == 200
        assert complete(process, max_tokens=3) == 200
        wait_for(lambda: num_here(process) == 0)


def test_every_sequence_that_does_not_run_is_counted_as_waiting() -> None:
    with running(f"slots={SLOTS}") as process, ExitStack() as stack, frozen(process):
        for _ in range(5):
            stack.enter_context(ask(process, n=2))
        wait_for(lambda: value(process, "num_requests_waiting") == 10)
        assert value(process, "num_requests_running") == 0


def test_retry_after_grows_with_the_time_that_those_before_take(tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    behaviour = f"slots=1 delay_s=0.05 hang_file={hang}"
    with running(behaviour, max_waiting=8) as process, ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(ask(process, max_tokens=20))
        # One a second, and most of them stay open.
        wait_for(lambda: value(process, "request_success_total", finished_reason="length") >= 2)
        hang.touch()
        status, headers, _ = process.request("POST", "/v1/completions", prompt="abc", n=8)
        assert status == 429
        assert 3 <= int(headers["retry-after"]) <= 600
