"""The sockets between ranks: who can talk to whom, and that nobody else can."""

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
from paceline.engine import launch
from paceline.engine.boot import Failed, Post, is_after_another
from paceline.engine.cluster import Cluster
from paceline.engine.launch import _posts, path_of
from paceline.engine.messages import Died, Wake, decode, encode
from paceline.engine.worker import _open_wakes, _wake_driver
from paceline.errors import CollectiveError, EngineDead
from paceline.parallel.placement import Layout
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
        posts = _posts(layout, ends)
        assert [post.place.rank for post in posts] == list(range(layout.num_ranks))
        assert [len(post.plans) for post in posts] == num_plans
        assert [len(post.wake_others) for post in posts] == num_wakes
        assert [post.wake is not None for post in posts] == [n > 0 for n in num_wakes]
        assert [Post.decode(post.encode()) for post in posts] == posts


@pytest.mark.parametrize(("device", "may_use_gpu"), [("auto", True), ("cpu", False)])
def test_ranks_of_a_cpu_leave_the_gpu_alone(
    device: str, may_use_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    posts: list[Post] = []
    monkeypatch.setattr(launch, "EngineProcess", lambda factory, post: posts.append(post))
    monkeypatch.setattr(Cluster, "__init__", lambda *parts: None)
    Cluster.launch(EngineConfig.from_keywords(model="", device=device, data_parallel_size=2))
    assert [Post.decode(post.encode()).may_use_gpu for post in posts] == [may_use_gpu] * 2


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
        posts = _posts(Layout(3, 2), ends)
        for leader, peers in ((0, (1, 2)), (3, (4, 5))):
            for place, peer in enumerate(peers):
                sending = ends.enter_context(
                    socket.socket(fileno=os.dup(posts[leader].plans[place]))
                )
                taking = ends.enter_context(socket.socket(fileno=os.dup(posts[peer].plans[0])))
                sending.sendall(b"for %d" % peer)
                assert taking.recv(16) == b"for %d" % peer


def test_a_leader_wakes_all_others_and_not_itself() -> None:
    with ExitStack() as ends:
        posts = _posts(Layout(2, 3, True), ends)
        leaders = [posts[rank] for rank in (0, 2, 4)]
        inboxes: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in leaders]
        wakes = []
        for post, inbox in zip(leaders, inboxes, strict=True):
            assert post.wake is not None
            mine = replace(post, wake=os.dup(post.wake), wake_others=own(post.wake_others))
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
        posts = _posts(Layout(1, 2, True), ends)
        inbox: SimpleQueue[bytes | None] = SimpleQueue()
        heard = replace(posts[1], wake=os.dup(posts[1].wake or 0), wake_others=())
        said = replace(posts[0], wake=os.dup(posts[0].wake or 0))
        _open_wakes(heard, inbox)
        wake = _open_wakes(replace(said, wake_others=own(said.wake_others)), SimpleQueue())
        assert wake is not None
        for step in range(2000):
            wake(step)
        frames = [inbox.get(timeout=PATIENCE_S) for _ in range(2000)]
        assert [decode(f) for f in frames if f] == [Wake(step) for step in range(2000)]


def test_waking_a_leader_that_is_gone_is_no_error() -> None:
    with ExitStack() as ends:
        posts = _posts(Layout(1, 2, True), ends)
        assert posts[0].wake is not None
        mine = replace(posts[0], wake=os.dup(posts[0].wake), wake_others=own(posts[0].wake_others))
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
    lost = Failed.because(CollectiveError("waited in vain"))
    assert Failed.decode(lost.encode()) == lost
    assert lost.after_another
    assert str(lost.to_error("rank 1 (replica 0): ")) == "rank 1 (replica 0): waited in vain"
    assert decode(encode(Died("why", True))) == Died("why", after_another=True)


def test_descriptors_of_a_post_are_all_that_a_process_must_inherit() -> None:
    with ExitStack() as ends:
        for post in _posts(Layout(2, 2, True), ends):
            *sockets, beats, store, board = post.descriptors
            for fd in sockets:
                with closing(socket.socket(fileno=os.dup(fd))) as sock:
                    assert sock.family == socket.AF_UNIX
            assert post.beats == beats
            assert (post.place.store, post.place.collectives) == (path_of(store), path_of(board))
            assert len(set(post.descriptors)) == len(post.descriptors)
