"""TCP connections between the machines of an engine: both ends prove that they know the key.

Each end sends a random challenge, and answers the other's with an HMAC of both. Then frames of
JSON, or those of `transport.py`. Nothing is encrypted, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import time
from typing import Any

from paceline.config import NodeConfig, cluster_key_from_env
from paceline.engine.transport import framed, read_exactly, read_frame
from paceline.errors import ConfigError, EngineDead, PacelineError

_MAGIC = b"paceline-link-1\n"
_SIZE = 32  # bytes of a challenge and of an answer
_MAX_BYTES = 1 << 20
HANDSHAKE_S = 10.0  # how long an end has to prove that it knows the key
_RETRY_S = 0.2
_PROBES = 3
_SHORTEST_KEY = 8


def key_of(nodes: NodeConfig) -> bytes:
    key = nodes.cluster_key or cluster_key_from_env() or ""
    if len(key) < _SHORTEST_KEY:
        raise ConfigError(
            "Several machines need a secret of at least 8 characters, the same on each: set "
            "PACELINE_CLUSTER_KEY, or give --cluster-key, which other users see in the process "
            "list."
        )
    return key.encode()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on this address only. Port 0: a free one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"This machine cannot listen on {host} port {port}: {error.strerror or error}. Give "
            "an address of this machine and a free port."
        ) from None


def _answer(key: bytes, role: bytes, challenges: bytes) -> bytes:
    return hmac.digest(key, _MAGIC + role + challenges, hashlib.sha256)


def admit(sock: socket.socket, key: bytes) -> dict[str, Any]:
    """The listening side of a new connection: what the other end says first. Raises PacelineError
    if it does not know the key, and OSError if it takes longer than HANDSHAKE_S."""
    give_up_s = time.monotonic() + HANDSHAKE_S
    sock.settimeout(HANDSHAKE_S)
    mine = secrets.token_bytes(_SIZE)
    sock.sendall(_MAGIC + mine)
    reply = read_exactly(sock, 2 * _SIZE, give_up_s)
    both = mine + (reply or b"")[:_SIZE]
    if reply is None or not hmac.compare_digest(reply[_SIZE:], _answer(key, b"node", both)):
        raise PacelineError("it has another cluster key")
    sock.sendall(_answer(key, b"front", both))
    hello = read_json(sock, give_up_s)
    if hello is None:
        raise PacelineError("it closed the connection")
    return hello


def dial(
    address: tuple[str, int], source: str | None, key: bytes, give_up_s: float, who: str = "node 0"
) -> socket.socket:
    """A node's side: connect to the front, which may start later than this node, or to the node
    `who`."""
    name = f"{who} at {address[0]} port {address[1]}"
    while True:
        left_s = give_up_s - time.monotonic()
        try:
            origin = None if source is None else (source, 0)
            sock = socket.create_connection(address, max(left_s, _RETRY_S), origin)
            break
        except OSError as error:
            if left_s <= 0:
                raise EngineDead(f"{name} does not answer: {error.strerror or error}.") from None
            time.sleep(_RETRY_S)
    try:
        _prove(sock, key, name)
    except OSError as error:
        sock.close()
        raise EngineDead(f"{name} does not answer as a node of Paceline: {error}.") from None
    except BaseException:
        sock.close()
        raise
    return sock


def _prove(sock: socket.socket, key: bytes, name: str) -> None:
    give_up_s = time.monotonic() + HANDSHAKE_S
    greeting = read_exactly(sock, len(_MAGIC) + _SIZE, give_up_s)
    if greeting is None or not greeting.startswith(_MAGIC):
        raise EngineDead(f"{name} is no node of Paceline, or one of another version.")
    mine = secrets.token_bytes(_SIZE)
    both = greeting[len(_MAGIC) :] + mine
    sock.sendall(mine + _answer(key, b"node", both))
    reply = read_exactly(sock, _SIZE, give_up_s)
    if reply is None:
        raise ConfigError(f"{name} has another cluster key. Give all nodes the same one.")
    if not hmac.compare_digest(reply, _answer(key, b"front", both)):
        raise ConfigError(f"{name} does not know the cluster key: it may not be your front.")


def keep_alive(sock: socket.socket, timeout_s: float) -> None:
    """No deadline for an end that is quiet, and one for a machine that is gone: the kernel closes
    the connection if the other kernel does not answer for about `timeout_s`."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every_s = max(1, min(int(timeout_s / _PROBES), 3600))
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        sock.setsockopt(socket.IPPROTO_TCP, option, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES - 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


def send_json(sock: socket.socket, value: dict[str, Any]) -> None:
    sock.sendall(framed(json.dumps(value).encode()))


def read_json(sock: socket.socket, give_up_s: float | None = None) -> dict[str, Any] | None:
    """None: the other end is closed, gone, or sent something else."""
    with contextlib.suppress(OSError, ValueError):
        data = read_frame(sock, give_up_s, _MAX_BYTES)
        value = None if data is None else json.loads(data)
        return value if isinstance(value, dict) else None
    return None
