"""The other machines of an engine, as the front sees them: who has joined, and ranks over there.

Each runs `node.py`, which joins here, starts ranks when it is told to, and says how they ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from paceline import __version__
from paceline.config import EngineConfig
from paceline.engine import link
from paceline.engine.launch import EngineHandle, EngineProcess, start_ranks, tell_to_stop
from paceline.engine.life import RankWatch
from paceline.engine.plan_links import PlanLinks
from paceline.engine.transport import Channel
from paceline.errors import EngineDead, PacelineError
from paceline.parallel.placement import Layout, NodePart, RankPlace, layout_of, node_part

logger = logging.getLogger(__name__)

_REPORT_S = 2.0  # a node has this long to say how a rank ended
_START_S = 60.0  # and this long to start its processes
_MOST_STRANGERS = 64  # connections that have not proved that they know the key
# Options that may differ between nodes.
_OF_ONE_NODE = {
    "node_rank", "headless", "data_parallel_size_local", "data_parallel_start_rank",
    "node_address", "cluster_key", "join_timeout", "max_restarts", "master_addr",
    "data_parallel_address", "nnodes",
}  # fmt: skip


def shared_options(config: EngineConfig) -> dict[str, Any]:
    """What all nodes must agree on, as it is after JSON."""
    values = {k: v for k, v in config.flat().items() if k not in _OF_ONE_NODE}
    agreed: dict[str, Any] = json.loads(json.dumps({**values, "version": __version__}))
    return agreed


class RemoteNode:
    """A machine that has joined. `Nodes` reads what it sends."""

    def __init__(self, sock: socket.socket, hello: dict[str, Any], changed: threading.Condition):
        self._socket = sock
        self._changed = changed
        self._lock = threading.Lock()
        self.number = int(hello["node"])
        self.ranks = [int(r) for r in hello["ranks"]]
        self.address = str(hello["address"])
        self.name = f"node {self.number} at {self.address}{hello['label']}"
        self.is_gone = False
        self.ports: dict[tuple[int, str], int] = {}  # by launch and use
        self.exits: dict[tuple[int, int], tuple[int, str]] = {}  # (launch, rank): code, reason
        self.verdicts: dict[tuple[int, int], str] = {}
        self.failures: dict[int, str] = {}  # by launch: why it could not start ranks

    def tell(self, **order: Any) -> None:
        with self._lock, contextlib.suppress(OSError):  # the reader notices the end
            link.send_json(self._socket, order)

    def read(self) -> None:
        """Take its reports until it is gone."""
        while (report := link.read_json(self._socket)) is not None:
            with self._changed:
                self._take(report)
                self._changed.notify_all()
        with self._changed:
            self.is_gone = True
            self._changed.notify_all()
        self._socket.close()

    def _take(self, report: dict[str, Any]) -> None:
        launch = int(report["launch"])
        match report["kind"]:
            case "reserved":
                self.ports[launch, str(report["use"])] = int(report["port"])
            case "failed":
                self.failures[launch] = str(report["reason"])
            case "ended":
                which = (launch, int(report["rank"]))
                self.exits[which] = (int(report["code"]), str(report["reason"]))
                if report["verdict"]:
                    self.verdicts[which] = str(report["verdict"])

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True)
class RemoteRank:
    """A rank of another machine: see launch.EngineHandle."""

    node: RemoteNode
    launch: int
    rank: int  # in its group
    channel: Channel
    changed: threading.Condition

    @property
    def host(self) -> str:
        return self.node.name

    @property
    def pid(self) -> None:
        return None

    def ask_to_stop(self) -> None:
        tell_to_stop(self.channel)

    def end(self, grace_s: float) -> None:
        if not self._has_ended(grace_s):
            self.kill()
            self._has_ended(_REPORT_S)

    def kill(self) -> None:
        self.node.tell(do="kill", launch=self.launch, rank=self.rank)
        self.channel.cut()

    def exit_reason(self) -> str:
        if self._has_ended(_REPORT_S) and (self.launch, self.rank) in self.node.exits:
            return self.node.exits[self.launch, self.rank][1]
        if self.node.is_gone:
            return f"{self.node.name} is gone: its connection is closed"
        return "the engine process closed its connection, and its node has not said why"

    def was_killed(self) -> bool:
        self._has_ended(_REPORT_S)
        code, _ = self.node.exits.get((self.launch, self.rank), (None, ""))
        return self.node.is_gone if code is None else code == -signal.SIGKILL

    def _has_ended(self, timeout_s: float) -> bool:
        def is_known() -> bool:
            return self.node.is_gone or (self.launch, self.rank) in self.node.exits

        with self.changed:
            return self.changed.wait_for(is_known, timeout_s)


@dataclass(slots=True)
class NodesWatch:
    """See life.GroupWatch: every machine watches its ranks."""

    launch: int
    here: RankWatch | None
    others: Sequence[RemoteNode]

    @property
    def verdicts(self) -> dict[int, str]:
        found = dict(self.here.verdicts) if self.here is not None else {}
        for node in self.others:
            found |= {r: text for (n, r), text in node.verdicts.items() if n == self.launch}
        return found

    def start(self) -> None:
        if self.here is not None:
            self.here.start()
        for node in self.others:
            node.tell(do="watch", launch=self.launch)

    def end(self) -> None:
        if self.here is not None:
            self.here.end()


@dataclass(slots=True)
class _Launch:
    """A group that is being started, and the connections of its ranks that have come."""

    number: int
    arrived: dict[int, socket.socket] = field(default_factory=dict)
    listeners: dict[str, socket.socket] = field(default_factory=dict)  # of this machine, by use


class Nodes:
    """Listens for the other machines as long as the engine lives: one that died may join again."""

    def __init__(
        self, config: EngineConfig, part: NodePart | None = None, *, any_port: bool = False
    ) -> None:
        """`part`: what this machine has, if the options do not say it."""
        nodes = config.nodes
        assert nodes.address is not None
        self._listener = link.listen(nodes.address, 0 if any_port else nodes.master_port)
        nodes = replace(nodes, master_port=self._listener.getsockname()[1])
        config = replace(config, nodes=nodes)
        self._config = config
        self._key = link.key_of(nodes)
        self._part = node_part(config) if part is None else part
        self._address = nodes.node_address or nodes.address or ""
        self._options = shared_options(config)
        self._changed = threading.Condition()
        self._joined: dict[int, RemoteNode] = {}
        self._refusals: list[str] = []
        self._launches: dict[int, _Launch] = {}
        self._num_launches = 0
        self._is_closed = False
        self._strangers = threading.Semaphore(_MOST_STRANGERS)
        self._run(self._accept)

    @staticmethod
    def _run(job: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=job, args=arguments, name="paceline-nodes", daemon=True).start()

    # ---- connections

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                return  # closed
            if self._strangers.acquire(blocking=False):
                self._run(self._meet, sock, str(peer[0]))
            else:
                sock.close()

    def _meet(self, sock: socket.socket, peer: str) -> None:
        node: RemoteNode | None = None
        is_kept = False
        try:
            hello = link.admit(sock, self._key)
            link.keep_alive(sock, self._config.device.stall_timeout)
            if hello["kind"] == "rank":
                self._arrive(sock, hello)
            else:
                node = self._join(sock, hello)
            is_kept = True
        except (PacelineError, OSError, KeyError, TypeError, ValueError) as error:
            logger.warning("refused a connection from %s: %s", peer, error)
            with self._changed:
                self._refusals = [*self._refusals[-3:], f"{peer}: {error}"]
        finally:
            self._strangers.release()
            if not is_kept:
                sock.close()
        if node is not None:
            node.read()

    def _arrive(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        with self._changed:
            launch = self._launches.get(int(hello["launch"]))
            if launch is None:
                raise PacelineError("no group waits for this rank")
            launch.arrived[int(hello["rank"])] = sock
            self._changed.notify_all()

    def _join(self, sock: socket.socket, hello: dict[str, Any]) -> RemoteNode:
        node = RemoteNode(sock, hello, self._changed)
        with self._changed:
            refusal = self._objection(node, hello["options"])
            link.send_json(sock, {"refusal": refusal})  # before any order
            if refusal is None:
                self._joined[node.number] = node
                self._changed.notify_all()
        if refusal is not None:
            raise PacelineError(refusal)
        logger.info("%s has joined with ranks %s", node.name, node.ranks)
        return node

    def _objection(self, node: RemoteNode, options: dict[str, Any]) -> str | None:
        for name, value in self._options.items():
            if options.get(name) != value:
                return (
                    f"node {node.number} has {name} {options.get(name)!r}, node 0 has {value!r}; "
                    "start all nodes with the same version and the same options."
                )
        for other in self._joined.values():
            if other.is_gone:
                continue
            if other.number == node.number:
                return f"{other.name} has joined already; give each node its own --node-rank."
            if set(other.ranks) & set(node.ranks):
                return f"{other.name} has ranks {other.ranks}, which this node has too."
        if set(self._part.ranks) & set(node.ranks):
            return f"node 0 has ranks {list(self._part.ranks)}, which this node has too."
        return None

    # ---- waits

    def await_all(self) -> dict[int, RemoteNode | None]:
        """The node of each rank of the engine, when every rank has one; None: this machine. Raises
        which is missing."""
        limit_s = self._config.nodes.join_timeout
        needed = set(range(layout_of(self._config).num_ranks))

        def missing() -> list[int]:
            return sorted(needed - set(self._homes()))

        with self._changed:  # so that no node is lost between the wait and the answer
            if missing():
                logger.info("waiting for the nodes of ranks %s", missing())
            self._wait(lambda: not missing(), limit_s, lambda: self._absent(missing(), limit_s))
            return self._homes()

    def _absent(self, ranks: list[int], limit_s: float) -> str:
        num_nodes = self._config.nodes.nnodes
        present = {n.number for n in self._joined.values() if not n.is_gone}
        absent = [str(n) for n in range(1, num_nodes) if n not in present]
        names = f"node {' and '.join(absent)} (ranks {ranks})" if absent else (
            f"the nodes of ranks {ranks}"
        )  # fmt: skip
        refused = f" Refused: {'; '.join(self._refusals)}." if self._refusals else ""
        return (
            f"{names} did not join within {limit_s:g} s (--join-timeout). Start each with the same "
            f"options and --headless; they must reach {self._config.nodes.address} port "
            f"{self._config.nodes.master_port}.{refused}"
        )

    def _wait(self, is_done: Callable[[], bool], limit_s: float, error: Callable[[], str]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or is_done(), limit_s)
            if self._is_closed:
                raise EngineDead("The engine was closed.")
            if not is_done():
                raise EngineDead(error())

    def _homes(self) -> dict[int, RemoteNode | None]:
        """The node of each rank that has one; None: this machine."""
        homes: dict[int, RemoteNode | None] = dict.fromkeys(self._part.ranks)
        for node in self._joined.values():
            if not node.is_gone:
                homes |= dict.fromkeys(node.ranks, node)
        return homes

    # ---- groups

    def start_group(
        self, config: EngineConfig, where: RankPlace, factory: str
    ) -> tuple[list[EngineHandle], NodesWatch]:
        """Start the ranks of a group, each on its machine. In rank order."""
        homes = self.await_all()
        with self._changed:
            self._num_launches += 1
            launch = self._launches[self._num_launches] = _Launch(self._num_launches)
        parts: dict[RemoteNode | None, list[int]] = {}
        for rank in range(where.layout.num_ranks):
            parts.setdefault(homes[where.first_rank + rank], []).append(rank)
        others = {node: ranks for node, ranks in parts.items() if node is not None}
        may_use_gpu = config.device.device != "cpu"
        watch, leaders = None, dict[int, str]()
        started: dict[int, EngineHandle] = {}
        with contextlib.ExitStack() as ends:
            try:
                if len(parts) > 1:
                    store = self._reserve(launch, homes[where.first_rank], "store", ends)
                    where = replace(where, store=store)
                    leaders = self._reserve_plans(launch, where, homes, ends)
                for node, ranks in others.items():
                    place = self._place(where, homes, node)
                    order = {"launch": launch.number, "place": asdict(place), "ranks": ranks}
                    order |= {"factory": factory, "may_use_gpu": may_use_gpu, "leaders": leaders}
                    node.tell(do="start", **order)
                if None in parts:
                    links = self._links(where.layout, leaders, parts[None])
                    local, beats = start_ranks(
                        partial(EngineProcess, factory),
                        self._place(where, homes, None),
                        parts[None],
                        launch.listeners.get("store"),
                        links.open(
                            ends,
                            launch.listeners.get("plans"),
                            check=lambda: self._check(launch, others),
                        ),
                        may_use_gpu=may_use_gpu,
                    )
                    started |= local
                    watch = RankWatch(beats, local, config.device.stall_timeout, where.first_rank)
                for node, ranks in others.items():
                    started |= self._await_ranks(launch, node, ranks)
            except BaseException:
                for handle in started.values():
                    handle.kill()
                for sock in launch.arrived.values():
                    sock.close()
                raise
            finally:
                with self._changed:
                    del self._launches[launch.number]
        return [started[rank] for rank in sorted(started)], NodesWatch(
            launch.number, watch, list(others)
        )

    def _links(self, layout: Layout, leaders: dict[int, str], here: list[int]) -> PlanLinks:
        return PlanLinks(layout, leaders, here, self._key, self._config.device.stall_timeout)

    def _place(
        self, where: RankPlace, homes: dict[int, RemoteNode | None], node: RemoteNode | None
    ) -> RankPlace:
        """The group's first rank, as the ranks of one node see it."""
        mine = sorted(rank for rank, home in homes.items() if home is node)
        address = self._address if node is None else node.address
        return replace(
            where,
            address=address if where.store else "",
            first_local=mine[0],
            num_local=len(mine),
        )

    def _reserve_plans(
        self,
        launch: _Launch,
        where: RankPlace,
        homes: dict[int, RemoteNode | None],
        ends: contextlib.ExitStack,
    ) -> dict[int, str]:
        """See PlanLinks.leaders."""
        found: dict[int, str] = {}
        listening: dict[RemoteNode | None, str] = {}
        for rank in range(where.layout.num_ranks):
            home = homes[where.first_rank + where.layout.leader_of(rank)]
            if home is not homes[where.first_rank + rank]:
                if home not in listening:
                    listening[home] = self._reserve(launch, home, "plans", ends)
                found[rank] = listening[home]
        return found

    def _reserve(
        self, launch: _Launch, node: RemoteNode | None, use: str, ends: contextlib.ExitStack
    ) -> str:
        """Bind a port on a machine, which ranks of others connect to. Returns HOST:PORT."""
        if node is None:
            assert self._config.nodes.address is not None
            listener = ends.enter_context(link.listen(self._config.nodes.address, 0))
            launch.listeners[use] = listener
            host, port = listener.getsockname()[:2]
            return f"{host}:{port}"
        node.tell(do="reserve", launch=launch.number, use=use)
        which = (launch.number, use)
        self._wait(
            lambda: which in node.ports or node.is_gone, _START_S, lambda: f"{node.name} hangs."
        )
        self._check(launch, [node])
        return f"{node.address}:{node.ports[which]}"

    def _check(self, launch: _Launch, nodes: Iterable[RemoteNode]) -> None:
        """Raises why a group cannot start."""
        if self._is_closed:
            raise EngineDead("The engine was closed.")
        for node in nodes:
            if launch.number in node.failures:
                raise EngineDead(f"{node.name}: {node.failures[launch.number]}")
            if node.is_gone:
                raise EngineDead(f"{node.name} is gone: its connection is closed")

    def _await_ranks(
        self, launch: _Launch, node: RemoteNode, ranks: list[int]
    ) -> dict[int, EngineHandle]:
        def is_over() -> bool:
            return (
                node.is_gone or launch.number in node.failures or set(ranks) <= set(launch.arrived)
            )

        self._wait(
            is_over, _START_S, lambda: f"{node.name} has not started its ranks in {_START_S:g} s."
        )
        self._check(launch, [node])
        return {
            rank: RemoteRank(
                node, launch.number, rank, Channel(launch.arrived.pop(rank)), self._changed
            )
            for rank in ranks
        }

    # ---- the end

    def cancel_waits(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        self.cancel_waits()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for node in self._joined.values():
            node.tell(do="end")
            node.hang_up()
