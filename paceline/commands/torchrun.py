"""`torchrun ... -m paceline serve`: what its processes become.

The first process of each machine starts this machine's ranks, as without torchrun: on the first
machine it is the front, on others a headless node. The other processes only live as long as it
does, because torchrun ends everything when one of its processes ends.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from argparse import Namespace

from paceline.config import EngineConfig, Torchrun
from paceline.errors import ConfigError, EngineDead

_APPEAR_S = 60.0
_RETRY_S = 0.05


def set_nodes(args: Namespace, torchrun: Torchrun) -> None:
    """Flags for several machines, from torchrun's environment. Flags that were given win."""
    num_nodes = torchrun.world_size // torchrun.local_world_size
    if num_nodes == 1:
        return
    number = torchrun.rank // torchrun.local_world_size
    found = {"nnodes": num_nodes, "node_rank": number, "master_addr": torchrun.master_addr}
    for name, value in found.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.headless = number > 0


def check_ranks(config: EngineConfig, torchrun: Torchrun) -> None:
    tensor, data = config.device.tensor_parallel_size, config.device.data_parallel_size
    if tensor * data != torchrun.world_size:
        raise ConfigError(
            f"torchrun has started {torchrun.world_size} processes, and --tensor-parallel-size "
            f"{tensor} x --data-parallel-size {data} are {tensor * data} ranks. Make them equal."
        )


def _meeting_point() -> str:
    """An abstract socket of the processes that one torchrun has started. It carries nothing."""
    return f"\0paceline-torchrun-{os.getppid()}"


def lead_others() -> socket.socket:
    """Of the first process: the others live as long as this socket is open."""
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(_meeting_point())
    sock.listen(128)
    return sock


def live_with_first() -> None:
    """Of the other processes: return when the first one has ended."""
    for number in (signal.SIGINT, signal.SIGTERM):  # it decides when to end
        signal.signal(number, signal.SIG_IGN)
    give_up_s = time.monotonic() + _APPEAR_S
    with socket.socket(socket.AF_UNIX) as sock:
        while sock.connect_ex(_meeting_point()):
            if time.monotonic() > give_up_s:
                raise EngineDead("The first process of this torchrun has not started a server.")
            time.sleep(_RETRY_S)
        sock.recv(1)  # nothing is ever sent: it returns at the end
