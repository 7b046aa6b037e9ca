"""Several machines: who may join, what each refusal says, and how a machine's end is heard.

A machine is a thread of the test with a loopback address of its own; its ranks are processes.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.engine import link
from paceline.engine.client import EngineClient
from paceline.engine.node import Node, run_node
from paceline.engine.nodes import Nodes, RemoteNode
from paceline.errors import ConfigError, EngineDead, PacelineError
from paceline.parallel.placement import RankPlace, layout_of, node_part
from tests.engine.echo_client import FACTORY, echo_front, pump_for_ever, pump_until_finished, submit
from tests.patience import PATIENCE_S, wait_for
from tests.ports import free_port

KEY = "a key of the tests"


def options(port: int, **changes: Any) -> dict[str, Any]:
    common = {"model": "delay_s=0.005", "data_parallel_size": 2, "nnodes": 2, "device": "cpu"}
    where = {"master_addr": "127.0.0.1", "master_port": port, "cluster_key": KEY}
    return {**common, **where, "join_timeout": PATIENCE_S, "stall_timeout": 10, **changes}


def front_config(port: int, **changes: Any) -> EngineConfig:
    return EngineConfig.from_keywords(**options(port, **changes))


def node_config(port: int, **changes: Any) -> EngineConfig:
    mine = {"headless": True, "node_rank": 1, "node_address": "127.0.0.2", **changes}
    return EngineConfig.from_keywords(**options(port, **mine))


class Machine(threading.Thread):
    """A headless node. `error` is what it ended with."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(daemon=True)
        self.config = config
        self.node: Node | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.node = Node(self.config, node_part(self.config))
            self.node.serve()
        except Exception as error:
            self.error = error

    def cut_off(self) -> None:
        """What the others see when the machine is gone."""
        assert self.node is not None
        self.node._control.shutdown(socket.SHUT_RDWR)
        self.join(PATIENCE_S)


@contextlib.contextmanager
def listening(**changes: Any) -> Iterator[tuple[Nodes, int]]:
    port = free_port()
    nodes = Nodes(front_config(port, **changes))
    try:
        yield nodes, port
    finally:
        nodes.close()


@contextlib.contextmanager
def engine(port: int, **changes: Any) -> Iterator[EngineClient]:
    config = front_config(port, **changes)
    client = EngineClient.start(config, factory=FACTORY, front=echo_front())
    try:
        yield client
    finally:
        client.close()


# ---- who may join


def test_a_node_that_comes_before_its_front_waits_for_it() -> None:
    port = free_port()
    early = Machine(node_config(port))
    nodes = Nodes(front_config(port))
    nodes.await_all()
    nodes.close()
    early.join(PATIENCE_S)
    assert early.error is None, "the front ended in order"


def test_a_node_hears_that_it_may_join_before_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order that came first was taken for the answer."""
    joined_before: list[int] = []
    send = link.send_json

    def answer(sock: socket.socket, value: dict[str, Any]) -> None:
        if "refusal" in value:
            joined_before.append(len(nodes._joined))
        send(sock, value)

    with listening() as (nodes, port):
        monkeypatch.setattr(link, "send_json", answer)
        Machine(node_config(port))
        nodes.await_all()
        assert joined_before == [0]


def test_a_node_that_is_lost_as_a_group_starts_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was there a moment before."""
    with listening() as (nodes, port):
        machine = Machine(node_config(port))
        wait_for(lambda: bool(nodes._joined))
        await_all = nodes.await_all

        def lose_it_first() -> dict[int, RemoteNode | None]:
            homes = await_all()
            machine.cut_off()
            wait_for(lambda: nodes._joined[1].is_gone)
            return homes

        monkeypatch.setattr(nodes, "await_all", lose_it_first)
        config = front_config(port)
        where = RankPlace(0, layout_of(config).groups()[1], first_rank=1, num_others=1)
        with pytest.raises(EngineDead, match=r"node 1 at 127\.0\.0\.2 is gone"):
            nodes.start_group(config, where, FACTORY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster_key": "another key"}, "has another cluster key"),
        ({"model": "other"}, r"node 1 has model 'other', node 0 has 'delay_s=0.005'"),
        ({"seed": 3}, "node 1 has seed 3, node 0 has 0"),
        ({"data_parallel_start_rank": 1, "nnodes": 4, "node_rank": 3}, None),
    ],
)
def test_a_node_that_does_not_fit_is_refused_with_the_reason(
    changes: dict[str, Any], message: str | None
) -> None:
    with listening() as (nodes, port):
        machine = Machine(node_config(port, **{"data_parallel_size_local": 1, **changes}))
        if message is None:  # any number will do, as long as no other node has its ranks
            nodes.await_all()
            return
        machine.join(PATIENCE_S)
        with pytest.raises(ConfigError, match=message):
            raise machine.error or AssertionError("it joined")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as (_, port):
        monkeypatch.setattr("paceline.engine.nodes.__version__", "9.9")
        with pytest.raises(ConfigError, match=r"node 1 has version '9\.9', node 0 has"):
            run_node(node_config(port))


def test_a_second_node_with_the_same_number_is_refused() -> None:
    with listening() as (nodes, port):
        first = Machine(node_config(port))
        nodes.await_all()
        with pytest.raises(ConfigError, match=r"node 1 at 127\.0\.0\.2 has joined already"):
            run_node(node_config(port))
        assert first.is_alive()


def test_two_nodes_with_the_same_replicas_are_refused() -> None:
    with listening(data_parallel_size=4, data_parallel_size_local=2, nnodes=3) as (nodes, port):
        common = {"data_parallel_size": 4, "data_parallel_size_local": 1, "nnodes": 3}
        Machine(node_config(port, **common, data_parallel_start_rank=2))
        later = node_config(port, **common, data_parallel_start_rank=2, node_rank=2)
        wait_for(lambda: bool(nodes._joined))
        with pytest.raises(ConfigError, match=r"node 1 at .* has ranks \[2\], which this node"):
            run_node(later)


def test_a_node_that_is_missing_is_named_with_the_refusals() -> None:
    with listening(join_timeout=1.0, data_parallel_size=3, nnodes=3) as (nodes, port):
        common = {"data_parallel_size": 3, "nnodes": 3}
        Machine(node_config(port, **common))
        with pytest.raises(ConfigError, match="another cluster key"):
            run_node(node_config(port, **common, node_rank=2, cluster_key="wrong key"))
        with pytest.raises(EngineDead, match=r"node 2 \(ranks \[2\]\) did not join within 1 s"):
            nodes.await_all()
        with pytest.raises(EngineDead, match=r"Refused: 127\.0\.0\.2: it has another cluster key"):
            nodes.await_all()


def test_a_front_that_never_comes_is_an_error_after_the_join_timeout() -> None:
    with pytest.raises(EngineDead, match=r"node 0 at 127\.0\.0\.1 port .* does not answer"):
        run_node(node_config(free_port(), join_timeout=1))


def test_a_front_that_does_not_know_the_key_learns_nothing_and_is_refused() -> None:
    """A node proves itself first, but each proof holds for one connection only."""

    def pretend(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(b"paceline-link-1\n" + bytes(32))
            sock.recv(64)
            sock.sendall(bytes(32))

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=pretend, args=(server,), daemon=True).start()
        with pytest.raises(ConfigError, match="does not know the cluster key"):
            run_node(node_config(server.getsockname()[1]))


def test_a_node_reads_that_it_has_joined_before_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front gives orders to nodes that are in its list."""
    with listening() as (nodes, port):
        was_listed: list[bool] = []
        send = link.send_json

        def watched(sock: socket.socket, value: dict[str, Any]) -> None:
            if "refusal" in value:
                was_listed.append(bool(nodes._joined))
            send(sock, value)

        monkeypatch.setattr(link, "send_json", watched)
        Machine(node_config(port))
        nodes.await_all()
        assert was_listed == [False]


def test_noise_on_the_port_is_closed_and_the_front_goes_on() -> None:
    with listening() as (nodes, port):
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n" * 8):
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(noise)
        Machine(node_config(port))
        nodes.await_all()


def test_a_key_is_needed_and_never_shown() -> None:
    with pytest.raises(ConfigError, match="PACELINE_CLUSTER_KEY"):
        link.key_of(front_config(1, cluster_key="short").nodes)
    assert KEY not in str(front_config(1).flat())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_parallel_size": 3}, "data_parallel_size 3 does not divide over nnodes 2"),
        ({"data_parallel_size": 1, "tensor_parallel_size": 3}, "nor tensor_parallel_size 3 over"),
        ({"data_parallel_size": 4, "tensor_parallel_size": 3, "nnodes": 6}, "does not divide over"),
        ({"node_rank": 1}, "every other node needs --headless"),
        ({"headless": True}, "Node 0 has the first ranks"),
        ({"node_rank": 2}, "node_rank is 2"),
        ({"master_addr": None}, "Several machines need --master-addr"),
        ({"data_parallel_address": "10.0.0.9"}, "both mean node 0"),
        ({"data_parallel_start_rank": 1}, "Node 0 has the first ranks"),
        ({"data_parallel_size_local": 3}, "would have 3 ranks from 0 on"),
        ({"check_collectives": True}, "needs one machine"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        node_part(front_config(1, **changes))


def test_the_options_of_data_parallel_alone_name_the_same_nodes() -> None:
    shape = {"nnodes": 1, "data_parallel_size": 4, "data_parallel_size_local": 2}
    there = {"data_parallel_start_rank": 2, "headless": True}
    assert node_part(front_config(1, **shape)).ranks == (0, 1)
    part = node_part(front_config(1, **shape, **there))
    assert (part.number, part.ranks) == (1, (2, 3))


# ---- an engine on two machines


TWO_REPLICAS = {"data_parallel_size": 2}
ONE_REPLICA = {"data_parallel_size": 1, "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    "shape",
    [TWO_REPLICAS, {**TWO_REPLICAS, "enable_expert_parallel": True}, ONE_REPLICA],
    ids=["replicas", "experts", "one replica"],
)
def test_requests_on_two_machines_get_their_tokens_and_both_end(shape: dict[str, Any]) -> None:
    port = free_port()
    machine = Machine(node_config(port, **shape))
    with engine(port, **shape) as client:
        streams = [submit(client, str(i), "abc", max_tokens=9) for i in range(4)]
        pump_until_finished(client, *streams)
        assert [s.text() for s in streams] == ["abcabcabc"] * 4
    machine.join(PATIENCE_S)
    assert not machine.is_alive()
    assert machine.error is None


@pytest.mark.parametrize(
    ("shape", "name"), [(TWO_REPLICAS, "rank 1 (replica 1"), (ONE_REPLICA, "rank 1 (replica 0")]
)
def test_a_machine_that_is_gone_is_named(shape: dict[str, Any], name: str) -> None:
    port = free_port()
    machine = Machine(node_config(port, **shape))
    with engine(port, **shape) as client:
        streams = [submit(client, str(i), "abc", max_tokens=400) for i in range(2)]
        while not all(s.deltas for s in streams):
            client.pump(1.0)
        machine.cut_off()
        with pytest.raises(EngineDead, match=re.escape(f"{name}, node 1 at 127.0.0.2)")):
            pump_for_ever(client)
    assert isinstance(machine.error, PacelineError)


@pytest.mark.parametrize(
    "shape", [{**TWO_REPLICAS, "enable_expert_parallel": True}, ONE_REPLICA], ids=["ep", "tp"]
)
def test_requests_go_on_when_the_machine_joins_again(shape: dict[str, Any]) -> None:
    """A group that spans machines: its ranks on both of them start again."""
    port = free_port()
    machine = Machine(node_config(port, **shape))
    with engine(port, **shape, max_restarts=2) as client:
        streams = [submit(client, str(i), "abc", max_tokens=300) for i in range(2)]
        while not all(s.deltas for s in streams):
            client.pump(1.0)
        machine.cut_off()
        again = Machine(node_config(port, **shape))
        pump_until_finished(client, *streams)
        assert [s.text() for s in streams] == ["abc" * 100] * 2
    again.join(PATIENCE_S)
    assert again.error is None


def test_a_rank_of_another_machine_that_dies_is_started_again_there() -> None:
    port = free_port()
    machine = Machine(node_config(port))
    with engine(port, max_restarts=2) as client:
        streams = [submit(client, str(i), "abc", max_tokens=300) for i in range(2)]
        while not all(s.deltas for s in streams):
            client.pump(1.0)
        assert machine.node is not None
        (group,) = machine.node._groups.values()
        group.ranks[0].kill()
        pump_until_finished(client, *streams)
        assert [s.text() for s in streams] == ["abc" * 100] * 2
        node = machine.node
        wait_for(lambda: (client.pump(0.1), len(node._groups) == 1)[1])
    machine.join(PATIENCE_S)


def test_a_front_that_dies_ends_the_node_and_its_ranks() -> None:
    port = free_port()
    machine = Machine(node_config(port))
    with engine(port) as client:
        nodes = client._supervisor._nodes
        assert nodes is not None
        assert machine.node is not None
        pids = [p.pid for g in machine.node._groups.values() for p in g.ranks.values()]
        assert pids
        for node in nodes._joined.values():
            node.hang_up()
        machine.join(PATIENCE_S)
        with pytest.raises(EngineDead, match=r"node 0 at .* is gone"):
            raise machine.error or AssertionError("it ended in order")
        assert not machine.node._groups or all(
            not p.is_running for g in machine.node._groups.values() for p in g.ranks.values()
        )


@pytest.mark.parametrize(
    ("tensor", "data", "number", "num_nodes", "ranks"),
    [
        (1, 4, 1, 2, (2, 3)),
        (2, 2, 1, 2, (2, 3)),
        (4, 1, 1, 2, (2, 3)),
        (4, 2, 3, 4, (6, 7)),
        (2, 2, 2, 4, (2,)),
    ],
)
def test_ranks_are_divided_over_the_machines_in_order(
    tensor: int, data: int, number: int, num_nodes: int, ranks: tuple[int, ...]
) -> None:
    sizes = {"tensor_parallel_size": tensor, "data_parallel_size": data, "nnodes": num_nodes}
    config = front_config(1, **sizes)
    there = replace(config, nodes=replace(config.nodes, headless=True, node_rank=number))
    assert node_part(there).ranks == ranks
