"""Starts the ranks of an engine, each in its process (or a single one in a thread), and ends them.

Imports neither torch nor the worker: the engine's side imports both by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Protocol, TypeVar

from paceline.engine.boot import RankSpawn
from paceline.engine.life import Beats
from paceline.engine.messages import Control, encode
from paceline.engine.transport import Channel, ChannelClosed, connected_pair
from paceline.errors import EngineDead
from paceline.parallel.placement import RankPlace

DEFAULT_FACTORY = "paceline.runner.startup:build_runner"
_WORKER = "paceline.engine.worker"
_ALONE = RankSpawn()
_STOP_S = 1.0  # a rank that does not read its Stop in this time is killed
_MFD_CLOEXEC = 1
_Process = subprocess.Popen[bytes]
_NO_LINKS: Mapping[int, socket.socket] = {}
# A plain interpreter and not multiprocessing's spawn, which imports the caller's main module
# again: a script without an `if __name__ == "__main__"` guard could not use `LLM`.
_BOOTSTRAP = (
    "import json, sys; fd, factory, spawn, parent, path = sys.argv[1:]; "
    f"sys.path[:] = json.loads(path); from {_WORKER} import main; "
    "main(int(fd), factory, spawn, parent=int(parent))"
)


class EngineHandle(Protocol):
    """A started rank."""

    channel: Channel

    @property
    def host(self) -> str:
        """The machine, if it is another one; else empty."""

    @property
    def pid(self) -> int | None:
        """None if it is a thread, or on another machine."""

    def ask_to_stop(self) -> None:
        """Ask it to end; returns at once."""

    def end(self, grace_s: float) -> None:
        """Wait `grace_s` for its end, then kill it. Returns when it has ended."""

    def kill(self) -> None:
        """End it at once, without waiting."""

    def exit_reason(self) -> str:
        """Why it has ended, from its exit code."""

    def was_killed(self) -> bool:
        """Whether SIGKILL ended it, so that it could not report. For a rank that has ended."""


class _Starter(threading.Thread):
    """A thread that starts processes and never ends. The kernel sends a rank its parent-death
    signal when the *thread* that started it ends, and a caller's thread may end at any time."""

    _latest: _Starter | None = None

    def __init__(self) -> None:
        super().__init__(name="paceline-starter", daemon=True)
        self._jobs: SimpleQueue[tuple[list[str], list[int], Future[_Process]]] = SimpleQueue()

    @classmethod
    def of_this_process(cls) -> _Starter:
        if (
            cls._latest is None or not cls._latest.is_alive()
        ):  # a forked process does not have the thread
            cls._latest = cls()
            cls._latest.start()
        return cls._latest

    def start_process(self, command: list[str], descriptors: list[int]) -> _Process:
        started: Future[_Process] = Future()
        self._jobs.put((command, descriptors, started))
        return started.result()

    def run(self) -> None:
        # A rank inherits the mask and lifts it after it has ignored SIGINT. Without the mask a
        # Ctrl-C in its first milliseconds would print a traceback from the interpreter's start.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while True:
            command, descriptors, started = self._jobs.get()
            try:
                started.set_result(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)
                )
            except BaseException as error:
                started.set_exception(error)


class RankProcess:
    """A process with one rank, which talks to its front over the socket `engine`."""

    def __init__(self, factory: str, spawn: RankSpawn, engine: socket.socket) -> None:
        """Closes `engine` here."""
        if not sys.executable:
            raise EngineDead("sys.executable is empty, so no engine process can be started.")
        arguments = [factory, spawn.encode(), str(os.getpid()), json.dumps(sys.path)]
        command = [sys.executable, "-P", "-c", _BOOTSTRAP, str(engine.fileno()), *arguments]
        with engine:
            descriptors = [engine.fileno(), *spawn.descriptors]
            self._process = _Starter.of_this_process().start_process(command, descriptors)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self, grace_s: float) -> None:
        if grace_s > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self._process.kill()
        self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    def discard(self) -> None:
        self.end(0.0)

    def exit_reason(self) -> str:
        code = self.exit_code()
        if code is None:
            return f"the engine process (pid {self.pid}) closed its socket and has not exited"
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"the engine process (pid {self.pid}) was killed by {name}{hint}"
        return f"the engine process (pid {self.pid}) exited with code {code}"

    def was_killed(self) -> bool:
        return self.exit_code() == -signal.SIGKILL

    def exit_code(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(2.0)
        return None


class EngineProcess(RankProcess):
    """One rank in its own process on the front's machine."""

    host = ""

    def __init__(self, factory: str = DEFAULT_FACTORY, spawn: RankSpawn = _ALONE) -> None:
        front, engine = connected_pair()
        super().__init__(factory, spawn, engine)
        self.channel = Channel(front)

    def discard(self) -> None:
        super().discard()
        self.channel.close()

    def ask_to_stop(self) -> None:
        if self._process.poll() is None:
            tell_to_stop(self.channel)


def tell_to_stop(channel: Channel) -> None:
    with contextlib.suppress(ChannelClosed):
        channel.send(encode(Control.STOP))
        channel.flush(_STOP_S)


class EngineThread:
    """The engine in a thread of this process, over the same messages: for tests and debugging."""

    host = ""

    def __init__(self, factory: str = DEFAULT_FACTORY, spawn: RankSpawn = _ALONE) -> None:
        front, engine = connected_pair()
        self.channel = Channel(front)
        self._thread = threading.Thread(
            target=self._run, args=(engine, factory, spawn), name="paceline-engine", daemon=True
        )
        self._thread.start()

    @property
    def pid(self) -> None:
        return None

    @staticmethod
    def _run(sock: socket.socket, factory: str, spawn: RankSpawn) -> None:
        with sock:  # closed in every case, so that the front notices the end
            importlib.import_module(_WORKER).serve_in_thread(sock, factory, spawn)

    def ask_to_stop(self) -> None:
        self.channel.close()  # ends the loop, as a Stop would

    def end(self, grace_s: float) -> None:
        self.channel.close()
        self._thread.join(
            max(grace_s, 0.5)
        )  # the interpreter must not exit while it runs: C++ would abort

    def kill(self) -> None:
        self.channel.close()

    def exit_reason(self) -> str:
        return "the engine thread ended"

    def was_killed(self) -> bool:
        return False


_AnyProcess = TypeVar("_AnyProcess", bound=RankProcess)


def start_ranks(
    start: Callable[[RankSpawn], _AnyProcess],
    where: RankPlace,
    here: Sequence[int] | None = None,
    listener: socket.socket | None = None,
    plan_links: Mapping[int, socket.socket] = _NO_LINKS,
    *,
    may_use_gpu: bool = False,
) -> tuple[dict[int, _AnyProcess], Beats]:
    """Start the ranks of a group that are on this machine, or none. `here` None: all. In rank
    order; each waits for its `boot.Start` frame. `where` is the place of the group's first rank.

    `listener`: the group's first rank is here, and other machines find its store by this socket.
    `plan_links`: see plan_links.py.
    """
    started: dict[int, _AnyProcess] = {}
    with contextlib.ExitStack() as ends, _interrupt_blocked():
        spawns = _rank_spawns(where, ends, here, plan_links)
        assert spawns[0].beats is not None
        beats = Beats(spawns[0].beats, where.layout.num_ranks)
        if listener is not None:
            place = replace(spawns[0].place, store_fd=listener.fileno())
            spawns[0] = replace(spawns[0], place=place)
        try:
            for spawn in spawns:
                started[spawn.place.rank] = start(replace(spawn, may_use_gpu=may_use_gpu))
        except BaseException:
            for process in started.values():
                process.discard()
            raise
    return started, beats


def _rank_spawns(
    where: RankPlace,
    ends: contextlib.ExitStack,
    here: Sequence[int] | None = None,
    plan_links: Mapping[int, socket.socket] = _NO_LINKS,
) -> list[RankSpawn]:
    """The place and the descriptors of each rank. They are open here until `ends` closes them."""
    layout = where.layout
    plans: dict[int, list[int]] = {
        rank: [] for rank in (range(layout.num_ranks) if here is None else here)
    }
    is_whole = len(plans) == layout.num_ranks
    shared = [shared_file("beats", ends)]
    store, collectives = where.store, ""
    if layout.num_ranks > 1:
        if is_whole:
            shared.append(shared_file("store", ends))
            store = path_of(shared[-1])
        shared.append(shared_file("collectives", ends))
        collectives = path_of(shared[-1])
    wake: dict[int, int] = {}
    wake_others: dict[int, list[int]] = {rank: [] for rank in plans}
    for rank in plans:
        leader = layout.leader_of(rank)
        if leader != rank and leader in plans:
            near, far = (ends.enter_context(end) for end in connected_pair())
            plans[leader].append(near.fileno())
            plans[rank].append(far.fileno())
    for peer, sock in plan_links.items():  # the leader is here, or the peer
        plans[peer if peer in plans else layout.leader_of(peer)].append(sock.fileno())
    leaders = layout.leaders()
    is_joint = layout.spreads_experts and len(leaders) > 1  # else replicas are independent
    if is_joint and is_whole:
        for leader in leaders:
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            inward, outward = (ends.enter_context(end) for end in pair)
            wake[leader] = inward.fileno()
            for other in leaders:
                if other != leader:
                    wake_others[other].append(outward.fileno())
    return [
        RankSpawn(
            replace(where, rank=rank, store=store, collectives=collectives),
            tuple(plans[rank]),
            wake.get(rank),
            tuple(wake_others[rank]),
            tuple(shared),
            wakes_by_front=is_joint and not is_whole,
        )
        for rank in plans
    ]


def shared_file(name: str, ends: contextlib.ExitStack) -> int:
    """The descriptor of an empty file in memory, which ends with the last process that has it.

    Calls libc because os.memfd_create is missing in a Python that was built for an older libc.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.memfd_create(f"paceline-{name}".encode(), _MFD_CLOEXEC))
    if fd < 0:
        reason = os.strerror(ctypes.get_errno())
        raise EngineDead(
            f"memfd_create failed, and the ranks need a shared file in memory: {reason}."
        )
    ends.callback(os.close, fd)
    return fd


def path_of(fd: int) -> str:
    """The path by which a process that has this descriptor opens the file again."""
    return f"/proc/self/fd/{fd}"


@contextlib.contextmanager
def _interrupt_blocked() -> Iterator[None]:
    """Delay Ctrl-C in this thread, so that every started rank gets a handle that can end it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
