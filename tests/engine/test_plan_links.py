"""The connections of a replica that spans machines: who gets one, and what happens without."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from paceline.engine import link
from paceline.engine.plan_links import PlanLinks
from paceline.engine.transport import read_exactly
from paceline.errors import ConfigError, EngineDead
from paceline.parallel.placement import Layout
from tests.patience import PATIENCE_S, wait_for

KEY = b"a key of the tests"
LAYOUT = Layout(tensor_parallel=4)


@contextlib.contextmanager
def leader_machine() -> Iterator[tuple[PlanLinks, socket.socket]]:
    """It has ranks 0 and 1; ranks 2 and 3 are elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        yield PlanLinks(LAYOUT, {2: where, 3: where}, [0, 1], KEY, 10.0), listener


def peer_machine(leader: PlanLinks, key: bytes = KEY) -> PlanLinks:
    return PlanLinks(LAYOUT, leader.leaders, [2, 3], key, 10.0)


def dial(peers: PlanLinks, ends: contextlib.ExitStack) -> dict[int, socket.socket]:
    found: dict[int, socket.socket] = {}
    thread = threading.Thread(target=lambda: found.update(peers.open(ends, None)), daemon=True)
    thread.start()
    ends.callback(thread.join, PATIENCE_S)
    return found


def test_each_peer_has_one_connection_to_its_leader() -> None:
    with contextlib.ExitStack() as ends, leader_machine() as (leader, listener):
        far = dial(peer_machine(leader), ends)
        near = leader.open(ends, listener)
        assert sorted(near) == [2, 3]
        for peer, sock in near.items():
            sock.sendall(bytes((peer,)))
        wait_for(lambda: len(far) == 2)
        assert {peer: sock.recv(1) for peer, sock in far.items()} == {2: b"\x02", 3: b"\x03"}


def test_ranks_of_one_machine_need_no_connection() -> None:
    with contextlib.ExitStack() as ends:
        assert PlanLinks(Layout(2), {}, [0, 1], KEY, 10.0).open(ends, None) == {}


def test_connections_without_the_key_are_closed_and_the_peers_still_come() -> None:
    with contextlib.ExitStack() as ends, leader_machine() as (leader, listener):
        address = listener.getsockname()
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n" * 8):
            with socket.create_connection(address) as sock:
                sock.sendall(noise)
        refusals: list[Exception] = []

        def intrude() -> None:
            with pytest.raises(ConfigError, match="another cluster key") as refused:
                link.dial(address, None, b"another key", time.monotonic() + PATIENCE_S)
            refusals.append(refused.value)
            dial(peer_machine(leader), ends)

        threading.Thread(target=intrude, daemon=True).start()
        assert sorted(leader.open(ends, listener)) == [2, 3]
        assert refusals


def test_silent_connections_hold_up_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may stay silent for longer than the peers wait."""
    monkeypatch.setattr(link, "HANDSHAKE_S", 10 * PATIENCE_S)
    with contextlib.ExitStack() as ends, leader_machine() as (leader, listener):
        for _ in range(3):
            ends.enter_context(socket.create_connection(listener.getsockname()))
        dial(peer_machine(leader), ends)
        assert sorted(leader.open(ends, listener)) == [2, 3]


def test_bytes_that_trickle_in_do_not_extend_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"abc")
        assert read_exactly(here, 2, give_up_s=10.0) == b"ab"
        now_s = 10.0
        with pytest.raises(TimeoutError):
            read_exactly(here, 1, give_up_s=10.0)


def test_a_machine_that_is_gone_ends_the_wait() -> None:
    def gone() -> None:
        raise EngineDead("node 1 is gone")

    with (
        contextlib.ExitStack() as ends,
        leader_machine() as (leader, listener),
        pytest.raises(EngineDead, match="node 1 is gone"),
    ):
        leader.open(ends, listener, check=gone)


def test_a_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.plan_links._OPEN_S", 0.0)
    with (
        contextlib.ExitStack() as ends,
        leader_machine() as (leader, listener),
        pytest.raises(EngineDead, match=r"ranks \[2, 3\] did not connect"),
    ):
        leader.open(ends, listener)
