"""Plan connections of a replica that spans machines: see peers.py for what they carry.

The process that starts the ranks of a machine opens them, proves that it knows the cluster key, and
hands each socket to its rank. For a rank they are as the socket pairs of one machine.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from queue import SimpleQueue

from paceline.engine import link
from paceline.errors import EngineDead, PacelineError
from paceline.parallel.placement import Layout

logger = logging.getLogger(__name__)
_OPEN_S = 30.0  # for all connections of a machine
_LOOK_S = 0.2  # how often `check` is called


@dataclass(frozen=True, slots=True)
class PlanLinks:
    """What a machine needs to connect the ranks that it has."""

    layout: Layout
    leaders: Mapping[int, str]  # by peer with a leader on another machine: HOST:PORT of the leader
    here: Collection[int]  # ranks of this machine
    key: bytes
    timeout_s: float  # --stall-timeout

    def open(
        self,
        ends: contextlib.ExitStack,
        listener: socket.socket | None,
        source: str | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> dict[int, socket.socket]:
        """By peer: the socket between it and its leader, one of which is here. `ends` closes them.

        A machine has leaders with peers elsewhere, or peers with leaders elsewhere, never both
        (placement.node_part). So machines do not wait for each other in a circle.
        """
        give_up_s = time.monotonic() + _OPEN_S
        found = {
            peer: ends.enter_context(self._dial(peer, source, give_up_s))
            for peer in self.leaders
            if peer in self.here
        }
        awaited = {peer for peer in self.leaders if self.layout.leader_of(peer) in self.here}
        arrived: SimpleQueue[tuple[int, socket.socket]] = SimpleQueue()
        while awaited and listener is not None:
            check()
            if time.monotonic() > give_up_s:
                raise EngineDead(f"ranks {sorted(awaited)} did not connect in {_OPEN_S:g} s.")
            self._accept(listener, arrived)
            while not arrived.empty():
                peer, sock = arrived.get()
                ends.enter_context(sock)
                if peer in awaited:
                    found[peer] = sock
                    awaited.discard(peer)
        return found

    def _dial(self, peer: int, source: str | None, give_up_s: float) -> socket.socket:
        host, _, port = self.leaders[peer].rpartition(":")
        sock = link.dial(
            (host, int(port)), source, self.key, give_up_s, f"the leader of rank {peer}"
        )
        link.send_json(sock, {"rank": peer})
        link.keep_alive(sock, self.timeout_s)
        return sock

    def _accept(
        self, listener: socket.socket, arrived: SimpleQueue[tuple[int, socket.socket]]
    ) -> None:
        """Wait a moment for a connection. A thread talks to it, so that one that is slow or does
        not know the key holds up no other."""
        listener.settimeout(_LOOK_S)
        try:
            sock, (host, *_) = listener.accept()
        except TimeoutError:
            return
        threading.Thread(target=self._meet, args=(sock, host, arrived), daemon=True).start()

    def _meet(
        self, sock: socket.socket, host: str, arrived: SimpleQueue[tuple[int, socket.socket]]
    ) -> None:
        try:
            rank = int(link.admit(sock, self.key)["rank"])
            link.keep_alive(sock, self.timeout_s)
            arrived.put((rank, sock))
        except (PacelineError, OSError, KeyError, TypeError, ValueError) as error:
            logger.warning("refused a connection from %s: %s", host, error)
            sock.close()
