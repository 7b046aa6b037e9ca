"""Ports for servers of the tests."""

from __future__ import annotations

import socket

_RESERVED: list[socket.socket] = []


def free_port(host: str = "127.0.0.1") -> int:
    """Bound until this process ends, and never listening: a server can bind it too, and no other
    socket of the machine is given it before that."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, 0))
    _RESERVED.append(sock)
    return int(sock.getsockname()[1])
