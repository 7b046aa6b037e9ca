"""Starts the ranks of an engine, each in a process of its own (or one in a thread), and ends them.

Imports neither torch nor the worker: both are resolved by name on the engine's side.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from paceline.engine.boot import Post
from paceline.engine.messages import Stop, encode
from paceline.engine.transport import Channel, ChannelClosed, connected_pair
from paceline.errors import EngineDead
from paceline.parallel.placement import Layout, Seat

DEFAULT_FACTORY = "paceline.runner.startup:build_runner"
_WORKER = "paceline.engine.worker"
_ALONE = Post()
_STOP_S = 1.0  # a rank that does not read for so long is not asked, but killed
# A plain interpreter rather than multiprocessing's spawn: that one imports the caller's main
# module again, so a script without an `if __name__ == "__main__"` guard could not use `LLM`.
_BOOTSTRAP = (
    "import json, sys; fd, factory, post, alone, path = sys.argv[1:]; "
    f"sys.path[:] = json.loads(path); from {_WORKER} import main; "
    "main(int(fd), factory, post, die_with_parent=alone == '1')"
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


class EngineProcess:
    """One rank in its own process."""

    def __init__(self, factory: str = DEFAULT_FACTORY, post: Post = _ALONE) -> None:
        if not sys.executable:
            raise EngineDead("sys.executable is empty, so no engine process can be started.")
        front, engine = connected_pair()
        # The kernel sends the parent-death signal when the *thread* that started us ends, so only
        # a main thread may ask for it. Everybody else relies on the end of the socket.
        in_main = threading.current_thread() is threading.main_thread()
        arguments = [factory, post.encode(), str(int(in_main)), json.dumps(sys.path)]
        command = [sys.executable, "-P", "-c", _BOOTSTRAP, str(engine.fileno()), *arguments]
        with engine, _interrupt_blocked():
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[engine.fileno(), *post.descriptors]
            )
        self.channel = Channel(front)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask_to_stop(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ChannelClosed):
                self.channel.send(encode(Stop()), _STOP_S)

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
    factory: str, layout: Layout, folder: str, *, may_use_gpu: bool = False
) -> list[EngineProcess]:
    """All ranks, in rank order, each waiting for its `boot.Start` frame. All of them or none."""
    started: list[EngineProcess] = []
    with contextlib.ExitStack() as ends, _interrupt_blocked():
        try:
            for post in _posts(layout, folder, ends):
                started.append(EngineProcess(factory, replace(post, may_use_gpu=may_use_gpu)))
        except BaseException:
            for process in started:
                process.end(0.0)
                process.channel.close()
            raise
    return started


def _posts(layout: Layout, folder: str, ends: contextlib.ExitStack) -> list[Post]:
    """Who sits where and who talks to whom. The sockets live until `ends` closes them here."""
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
            Seat(rank, layout, folder),
            tuple(plans[rank]),
            wake.get(rank),
            tuple(wake_others[rank]),
        )
        for rank in plans
    ]


@contextlib.contextmanager
def _interrupt_blocked() -> Iterator[None]:
    """Hold Ctrl-C back in this thread and in a process started meanwhile.

    The child inherits the mask and lifts it when it ignores SIGINT; without this a Ctrl-C in its
    first milliseconds would print a traceback of the interpreter's own start.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
