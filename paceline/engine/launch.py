"""Starts the ranks of an engine, each in a process of its own (or one in a thread), and ends them.

Imports neither torch nor the worker: both are resolved by name on the engine's side.
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
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Protocol

from paceline.engine.boot import Post
from paceline.engine.life import Beats
from paceline.engine.messages import Stop, encode
from paceline.engine.transport import Channel, ChannelClosed, connected_pair
from paceline.errors import EngineDead
from paceline.parallel.placement import Layout, RankPlace

DEFAULT_FACTORY = "paceline.runner.startup:build_runner"
_WORKER = "paceline.engine.worker"
_ALONE = Post()
_STOP_S = 1.0  # a rank that does not read for so long is not asked, but killed
_MFD_CLOEXEC = 1
_Process = subprocess.Popen[bytes]
# A plain interpreter rather than multiprocessing's spawn: that one imports the caller's main
# module again, so a script without an `if __name__ == "__main__"` guard could not use `LLM`.
_BOOTSTRAP = (
    "import json, sys; fd, factory, post, parent, path = sys.argv[1:]; "
    f"sys.path[:] = json.loads(path); from {_WORKER} import main; "
    "main(int(fd), factory, post, parent=int(parent))"
)


class EngineHandle(Protocol):
    """A started rank."""

    channel: Channel

    @property
    def pid(self) -> int | None:
        """None when it is no process of its own."""

    def ask_to_stop(self) -> None:
        """Say that it should end; returns at once."""

    def end(self, grace_s: float) -> None:
        """Wait `grace_s` for its end, then end it without asking. Returns when it is gone."""

    def kill(self) -> None:
        """End it without asking; returns at once."""

    def exit_reason(self) -> str:
        """Why it is gone, as far as can be told from outside."""

    def was_killed(self) -> bool:
        """By somebody from outside, without a chance to speak. For one that is gone."""


class _Starter(threading.Thread):
    """Starts processes, and lives as long as this one. The kernel sends a rank its parent-death
    signal when the *thread* that started it ends, and a caller's thread may end any time."""

    _latest: _Starter | None = None

    def __init__(self) -> None:
        super().__init__(name="paceline-starter", daemon=True)
        self._jobs: SimpleQueue[tuple[list[str], list[int], Future[_Process]]] = SimpleQueue()

    @classmethod
    def of_this_process(cls) -> _Starter:
        if cls._latest is None or not cls._latest.is_alive():  # a fork has none of its threads
            cls._latest = cls()
            cls._latest.start()
        return cls._latest

    def start_process(self, command: list[str], descriptors: list[int]) -> _Process:
        started: Future[_Process] = Future()
        self._jobs.put((command, descriptors, started))
        return started.result()

    def run(self) -> None:
        # A rank inherits the mask and lifts it when it ignores SIGINT; without this a Ctrl-C in
        # its first milliseconds would print a traceback of the interpreter's own start.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while True:
            command, descriptors, started = self._jobs.get()
            try:
                started.set_result(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)
                )
            except BaseException as error:
                started.set_exception(error)


class EngineProcess:
    """One rank in its own process."""

    def __init__(self, factory: str = DEFAULT_FACTORY, post: Post = _ALONE) -> None:
        if not sys.executable:
            raise EngineDead("sys.executable is empty, so no engine process can be started.")
        front, engine = connected_pair()
        arguments = [factory, post.encode(), str(os.getpid()), json.dumps(sys.path)]
        command = [sys.executable, "-P", "-c", _BOOTSTRAP, str(engine.fileno()), *arguments]
        with engine:
            descriptors = [engine.fileno(), *post.descriptors]
            self._process = _Starter.of_this_process().start_process(command, descriptors)
        self.channel = Channel(front)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask_to_stop(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ChannelClosed):
                self.channel.send(encode(Stop()))
                self.channel.flush(_STOP_S)

    def end(self, grace_s: float) -> None:
        if grace_s > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self._process.kill()
        self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    def exit_reason(self) -> str:
        code = self._exit_code()
        if code is None:
            return f"the engine process (pid {self.pid}) closed its end and hangs"
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"the engine process (pid {self.pid}) was killed by {name}{hint}"
        return f"the engine process (pid {self.pid}) exited with code {code}"

    def was_killed(self) -> bool:
        return self._exit_code() == -signal.SIGKILL

    def _exit_code(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(2.0)
        return None


class EngineThread:
    """The engine in a thread of this process, over the same messages: for tests and debugging."""

    def __init__(self, factory: str = DEFAULT_FACTORY, post: Post = _ALONE) -> None:
        front, engine = connected_pair()
        self.channel = Channel(front)
        self._thread = threading.Thread(
            target=self._run, args=(engine, factory, post), name="paceline-engine", daemon=True
        )
        self._thread.start()

    @property
    def pid(self) -> None:
        return None

    @staticmethod
    def _run(sock: socket.socket, factory: str, post: Post) -> None:
        with sock:  # whatever happens, the front sees the end of it
            importlib.import_module(_WORKER).serve_in_thread(sock, factory, post)

    def ask_to_stop(self) -> None:
        self.channel.close()  # ends the loop, as a Stop would

    def end(self, grace_s: float) -> None:
        self.channel.close()
        self._thread.join(max(grace_s, 0.5))  # an exit under its feet would abort in C++

    def kill(self) -> None:
        self.channel.close()

    def exit_reason(self) -> str:
        return "the engine thread ended"

    def was_killed(self) -> bool:
        return False


def start_ranks(
    factory: str, layout: Layout, *, may_use_gpu: bool = False
) -> tuple[list[EngineProcess], Beats]:
    """All ranks, in rank order, each waiting for its `boot.Start` frame. All of them or none."""
    started: list[EngineProcess] = []
    with contextlib.ExitStack() as ends, _interrupt_blocked():
        posts = _posts(layout, ends)
        assert posts[0].beats is not None
        beats = Beats(posts[0].beats, layout.num_ranks)
        try:
            for post in posts:
                started.append(EngineProcess(factory, replace(post, may_use_gpu=may_use_gpu)))
        except BaseException:
            for process in started:
                process.end(0.0)
                process.channel.close()
            raise
    return started, beats


def _posts(layout: Layout, ends: contextlib.ExitStack) -> list[Post]:
    """Who sits where, who talks to whom, what all share. It is open here until `ends` closes it."""
    shared = [shared_file("beats", ends)]
    if layout.num_ranks > 1:
        shared += [shared_file("store", ends), shared_file("collectives", ends)]
    plans: dict[int, list[int]] = {rank: [] for rank in range(layout.num_ranks)}
    wake: dict[int, int] = {}
    wake_others: dict[int, list[int]] = {rank: [] for rank in plans}
    for replica in range(layout.data_parallel):
        leader, *peers = layout.replica(replica)
        for peer in peers:
            near, far = (ends.enter_context(end) for end in connected_pair())
            plans[leader].append(near.fileno())
            plans[peer].append(far.fileno())
    leaders = layout.leaders()
    if layout.spreads_experts and len(leaders) > 1:  # else replicas do not know each other
        for leader in leaders:
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            inward, outward = (ends.enter_context(end) for end in pair)
            wake[leader] = inward.fileno()
            for other in leaders:
                if other != leader:
                    wake_others[other].append(outward.fileno())
    return [
        Post(
            RankPlace(rank, layout, *map(path_of, shared[1:])),
            tuple(plans[rank]),
            wake.get(rank),
            tuple(wake_others[rank]),
            tuple(shared),
        )
        for rank in plans
    ]


def shared_file(name: str, ends: contextlib.ExitStack) -> int:
    """The descriptor of an empty file in memory, which is gone with the last process that has it:
    no folder can be full of it, and none has to be cleared.

    Not os.memfd_create: a Python that was built for an older libc lacks it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.memfd_create(f"paceline-{name}".encode(), _MFD_CLOEXEC))
    if fd < 0:
        reason = os.strerror(ctypes.get_errno())
        raise EngineDead(f"No file in memory can be made for the ranks to share: {reason}.")
    ends.callback(os.close, fd)
    return fd


def path_of(fd: int) -> str:
    """Where a process that has this descriptor opens its file once more."""
    return f"/proc/self/fd/{fd}"


@contextlib.contextmanager
def _interrupt_blocked() -> Iterator[None]:
    """Hold Ctrl-C back in this thread: no rank may be lost between its start and its handle."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
