"""The sockets between ranks: which ranks can talk to each other, and that no others can."""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import ExitStack, closing
from dataclasses import replace
from queue import Empty, SimpleQueue
from types import SimpleNamespace

import pytest

from paceline.config import EngineConfig
from paceline.engine import cluster
from paceline.engine.boot import RankSpawn, is_after_another, last_words
from paceline.engine.cluster import Cluster
from paceline.engine.launch import _rank_spawns, path_of
from paceline.engine.messages import Died, Wake, decode, encode
from paceline.engine.worker import _open_wakes, _wake_driver
from paceline.errors import CollectiveError, EngineDead
from paceline.parallel.placement import Layout, RankPlace
from tests.patience import PATIENCE_S


def own(descriptors: tuple[int, ...]) -> tuple[int, ...]:
    """As a process of its own would inherit them."""
    return tuple(os.dup(fd) for fd in descriptors)


@pytest.mark.parametrize(
    ("layout", "num_plans", "num_wakes"),
    [
        (Layout(1, 1), [0], [0]),
        (Layout(1, 3), [0, 0, 0], [0, 0, 0]),  # replicas that share nothing do not talk
        (Layout(3, 1, True), [2, 1, 1], [0, 0, 0]),
        (Layout(1, 3, True), [0, 0, 0], [2, 2, 2]),
        (Layout(2, 2, True), [1, 1, 1, 1], [1, 0, 1, 0]),
    ],
)
def test_every_rank_has_the_sockets_of_its_place(
    layout: Layout, num_plans: list[int], num_wakes: list[int]
) -> None:
    with ExitStack() as ends:
        spawns = _rank_spawns(RankPlace(0, layout), ends)
        assert [spawn.place.rank for spawn in spawns] == list(range(layout.num_ranks))
        assert [len(spawn.plans) for spawn in spawns] == num_plans
        assert [len(spawn.wake_others) for spawn in spawns] == num_wakes
        assert [spawn.wake is not None for spawn in spawns] == [n > 0 for n in num_wakes]
        assert [RankSpawn.decode(spawn.encode()) for spawn in spawns] == spawns


@pytest.mark.parametrize(("device", "may_use_gpu"), [("auto", True), ("cpu", False)])
def test_ranks_of_a_cpu_leave_the_gpu_alone(
    device: str, may_use_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawns: list[RankSpawn] = []
    monkeypatch.setattr(cluster, "EngineProcess", lambda factory, spawn: spawns.append(spawn))
    monkeypatch.setattr(Cluster, "__init__", lambda *parts: None)
    config = EngineConfig.from_keywords(model="", device=device)
    Cluster.launch(config, RankPlace(0, Layout(2)))
    assert [RankSpawn.decode(spawn.encode()).may_use_gpu for spawn in spawns] == [may_use_gpu] * 2


def test_without_a_driver_there_is_nothing_to_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def driver(name: str) -> SimpleNamespace:
        if opened:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(cuInit=opened.append)

    monkeypatch.setattr(ctypes, "CDLL", driver)
    _wake_driver()
    _wake_driver()
    assert opened == [0]


def test_plans_go_from_a_leader_to_the_peers_of_its_own_replica() -> None:
    with ExitStack() as ends:
        spawns = _rank_spawns(RankPlace(0, Layout(3, 2)), ends)
        for leader, peers in ((0, (1, 2)), (3, (4, 5))):
            for place, peer in enumerate(peers):
                sending = ends.enter_context(
                    socket.socket(fileno=os.dup(spawns[leader].plans[place]))
                )
                taking = ends.enter_context(socket.socket(fileno=os.dup(spawns[peer].plans[0])))
                sending.sendall(b"for %d" % peer)
                assert taking.recv(16) == b"for %d" % peer


def test_a_leader_wakes_all_others_and_not_itself() -> None:
    with ExitStack() as ends:
        spawns = _rank_spawns(RankPlace(0, Layout(2, 3, True)), ends)
        leaders = [spawns[rank] for rank in (0, 2, 4)]
        inboxes: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in leaders]
        wakes = []
        for spawn, inbox in zip(leaders, inboxes, strict=True):
            assert spawn.wake is not None
            mine = replace(spawn, wake=os.dup(spawn.wake), wake_others=own(spawn.wake_others))
            wakes.append(_open_wakes(mine, inbox))
        wake = wakes[1]
        assert wake is not None
        wake(7)
        for inbox in (inboxes[0], inboxes[2]):
            frame = inbox.get(timeout=PATIENCE_S)
            assert frame is not None
            assert decode(frame) == Wake(7)
        with pytest.raises(Empty):
            inboxes[1].get(timeout=0.05)


def test_more_wakes_than_a_socket_holds_are_all_heard() -> None:
    with ExitStack() as ends:
        spawns = _rank_spawns(RankPlace(0, Layout(1, 2, True)), ends)
        inbox: SimpleQueue[bytes | None] = SimpleQueue()
        heard = replace(spawns[1], wake=os.dup(spawns[1].wake or 0), wake_others=())
        said = replace(spawns[0], wake=os.dup(spawns[0].wake or 0))
        _open_wakes(heard, inbox)
        wake = _open_wakes(replace(said, wake_others=own(said.wake_others)), SimpleQueue())
        assert wake is not None
        for step in range(2000):
            wake(step)
        frames = [inbox.get(timeout=PATIENCE_S) for _ in range(2000)]
        assert [decode(f) for f in frames if f] == [Wake(step) for step in range(2000)]


def test_waking_a_leader_that_is_gone_is_no_error() -> None:
    with ExitStack() as ends:
        spawns = _rank_spawns(RankPlace(0, Layout(1, 2, True)), ends)
        first = spawns[0]
        assert first.wake is not None
        mine = replace(first, wake=os.dup(first.wake), wake_others=own(first.wake_others))
    # The stack has closed the other leader's end.
    wake = _open_wakes(mine, SimpleQueue())
    assert wake is not None
    wake(1)


def test_who_was_left_alone_says_so() -> None:
    def failure(cause: Exception) -> EngineDead:
        try:
            raise EngineDead("the engine failed") from cause
        except EngineDead as error:
            return error

    assert is_after_another(failure(CollectiveError("waited in vain")))
    assert is_after_another(BrokenPipeError())
    assert not is_after_another(failure(RuntimeError("the device caught fire")))
    lost = last_words(CollectiveError("waited in vain"), is_starting=True)
    assert lost == Died("waited in vain", after_another=True, kind="CollectiveError")
    assert decode(encode(lost)) == lost
    assert last_words(CollectiveError("waited in vain")).kind == ""


def test_descriptors_of_a_post_are_all_that_a_process_must_inherit() -> None:
    with ExitStack() as ends:
        for spawn in _rank_spawns(RankPlace(0, Layout(2, 2, True)), ends):
            *sockets, beats, store, board = spawn.descriptors
            for fd in sockets:
                with closing(socket.socket(fileno=os.dup(fd))) as sock:
                    assert sock.family == socket.AF_UNIX
            assert spawn.beats == beats
            assert (spawn.place.store, spawn.place.collectives) == (path_of(store), path_of(board))
            assert len(set(spawn.descriptors)) == len(spawn.descriptors)
