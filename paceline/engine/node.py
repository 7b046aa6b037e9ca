"""A headless node: joins the front on node 0, and starts and ends ranks as it is told.

The rank processes are those of one machine. Their socket to the front is a TCP connection that this
process has opened; afterwards it only watches heartbeats and reports how each rank ended.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from dataclasses import dataclass
from typing import Any

from paceline.config import EngineConfig
from paceline.engine import link
from paceline.engine.boot import RankSpawn, decode_place
from paceline.engine.launch import RankProcess, start_ranks
from paceline.engine.life import RankWatch
from paceline.engine.nodes import shared_options
from paceline.engine.plan_links import PlanLinks
from paceline.errors import ConfigError, EngineDead
from paceline.parallel.placement import NodePart, node_part

logger = logging.getLogger(__name__)

_POLL_S = 0.1  # how often the ranks are looked at
_CALL_S = 30.0  # for the connection of a rank, when the front is there


@dataclass(slots=True)
class _Group:
    """The ranks of one launch that run here."""

    ranks: dict[int, RankProcess]
    watch: RankWatch

    def end(self) -> None:
        self.watch.end()
        for process in self.ranks.values():
            process.kill()
        for process in self.ranks.values():
            process.end(0.0)


class Node:
    """This machine's part of an engine."""

    def __init__(self, config: EngineConfig, part: NodePart, label: str = "") -> None:
        """Connect to the front, and join it. `label`: what else names this machine."""
        nodes = config.nodes
        assert nodes.address is not None
        self._config = config
        self._key = link.key_of(nodes)
        self._front = (nodes.address, nodes.master_port)
        self._groups: dict[int, _Group] = {}  # by launch
        self._listeners: dict[tuple[int, str], socket.socket] = {}  # by launch and use
        self._control = self._call(nodes.join_timeout)
        self._address = nodes.node_address or str(self._control.getsockname()[0])
        hello = {"kind": "node", "node": part.number, "ranks": part.ranks}
        hello["label"] = f", {label}" if label else ""
        options = shared_options(config)
        link.send_json(self._control, {**hello, "address": self._address, "options": options})
        reply = link.read_json(self._control)
        if reply is None or reply["refusal"] is not None:
            self._control.close()
            why = "it closed the connection" if reply is None else reply["refusal"]
            raise ConfigError(f"{self._name} refused this node: {why}")
        link.keep_alive(self._control, config.device.stall_timeout)
        logger.info("joined %s as node %d", self._name, part.number)

    @property
    def _name(self) -> str:
        return f"node 0 at {self._front[0]} port {self._front[1]}"

    def _call(self, timeout_s: float) -> socket.socket:
        give_up_s = time.monotonic() + timeout_s
        return link.dial(self._front, self._config.nodes.node_address, self._key, give_up_s)

    def serve(self) -> None:
        """Do what the front says until it ends. Raises EngineDead if it is gone."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        try:
            while True:
                if poll.poll(_POLL_S * 1000):
                    order = link.read_json(self._control)
                    if order is None:
                        raise EngineDead(f"{self._name} is gone: its connection is closed.")
                    if order["do"] == "end":
                        return
                    self._obey(order)
                self._report_ends()
        finally:
            for group in self._groups.values():
                group.end()
            for listener in self._listeners.values():
                listener.close()
            self._control.close()

    def _obey(self, order: dict[str, Any]) -> None:
        launch = int(order["launch"])
        group = self._groups.get(launch)
        match order["do"]:
            case "reserve":
                listener = self._listeners[launch, order["use"]] = link.listen(self._address, 0)
                port = listener.getsockname()[1]
                self._report(launch, "reserved", use=order["use"], port=port)
            case "start":
                try:
                    self._start(launch, order)
                except (OSError, EngineDead, ConfigError) as error:
                    self._report(launch, "failed", reason=str(error))
            case "watch" if group is not None:
                group.watch.start()
            case "kill" if group is not None and order["rank"] in group.ranks:
                group.ranks[order["rank"]].kill()

    def _start(self, launch: int, order: dict[str, Any]) -> None:
        place = decode_place(order["place"])

        def start(spawn: RankSpawn) -> RankProcess:
            sock = self._call(_CALL_S)
            link.send_json(sock, {"kind": "rank", "launch": launch, "rank": spawn.place.rank})
            link.keep_alive(sock, self._config.device.stall_timeout)
            return RankProcess(str(order["factory"]), spawn, sock)

        leaders = {int(peer): str(address) for peer, address in order["leaders"].items()}
        with contextlib.ExitStack() as ends:
            mine = {use: ends.enter_context(sock) for use, sock in self._take_listeners(launch)}
            links = PlanLinks(
                place.layout, leaders, order["ranks"], self._key, self._config.device.stall_timeout
            )
            opened = links.open(ends, mine.get("plans"), self._config.nodes.node_address)
            ranks, beats = start_ranks(
                *(start, place, order["ranks"], mine.get("store"), opened),
                may_use_gpu=order["may_use_gpu"],
            )
        watch = RankWatch(beats, ranks, self._config.device.stall_timeout, place.first_rank)
        self._groups[launch] = _Group(ranks, watch)

    def _take_listeners(self, launch: int) -> list[tuple[str, socket.socket]]:
        mine = [which for which in self._listeners if which[0] == launch]
        return [(use, self._listeners.pop((launch, use))) for _, use in mine]

    def _report_ends(self) -> None:
        for launch, group in list(self._groups.items()):
            for rank, process in list(group.ranks.items()):
                if process.is_running:
                    continue
                self._report(
                    launch, "ended", rank=rank, code=process.exit_code(),
                    reason=process.exit_reason(), verdict=group.watch.verdicts.get(rank, ""),
                )  # fmt: skip
                del group.ranks[rank]
            if not group.ranks:
                group.watch.end()
                del self._groups[launch]

    def _report(self, launch: int, kind: str, **values: Any) -> None:
        try:
            link.send_json(self._control, {"kind": kind, "launch": launch, **values})
        except OSError as error:
            raise EngineDead(f"{self._name} is gone: {error}.") from None


def run_node(config: EngineConfig, part: NodePart | None = None, label: str = "") -> None:
    """Serve one front, then return. `part`: what this machine has, if the options do not say it."""
    Node(config, node_part(config) if part is None else part, label).serve()
