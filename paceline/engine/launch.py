"""Starts the engine in a process of its own (or a thread), watches it and stops it.

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
from typing import Protocol

from paceline.engine.messages import Stop, encode
from paceline.engine.transport import Channel, ChannelClosed, connected_pair
from paceline.errors import EngineDead

DEFAULT_FACTORY = "paceline.runner.startup:build_runner"
_WORKER = "paceline.engine.worker"
# A plain interpreter rather than multiprocessing's spawn: that one imports the caller's main
# module again, so a script without an `if __name__ == "__main__"` guard could not use `LLM`.
_BOOTSTRAP = (
    "import json, sys; fd, factory, alone, path = sys.argv[1:]; sys.path[:] = json.loads(path); "
    f"from {_WORKER} import main; main(int(fd), factory, die_with_parent=alone == '1')"
)


class EngineHandle(Protocol):
    """A started engine."""

    channel: Channel

    @property
    def pid(self) -> int | None:
        """None when it is no process of its own."""

    def stop(self, grace_s: float) -> None:
        """End it: by asking, and after `grace_s` without asking. Returns when it is gone."""

    def exit_reason(self) -> str:
        """Why it is gone, as far as can be told from outside."""


class EngineProcess:
    """The engine in its own process."""

    def __init__(self, factory: str = DEFAULT_FACTORY) -> None:
        if not sys.executable:
            raise EngineDead("sys.executable is empty, so no engine process can be started.")
        front, engine = connected_pair()
        # The kernel sends the parent-death signal when the *thread* that started us ends, so only
        # a main thread may ask for it. Everybody else relies on the end of the socket.
        in_main = threading.current_thread() is threading.main_thread()
        arguments = [str(engine.fileno()), factory, str(int(in_main)), json.dumps(sys.path)]
        command = [sys.executable, "-P", "-c", _BOOTSTRAP, *arguments]
        with engine, _interrupt_blocked():
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[engine.fileno()]
            )
        self.channel = Channel(front)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, grace_s: float) -> None:
        if grace_s > 0 and self._process.poll() is None:
            with contextlib.suppress(ChannelClosed):
                self.channel.send(encode(Stop()))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self._process.kill()
        self._process.wait()
        self.channel.close()

    def exit_reason(self) -> str:
        try:
            code = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            return f"the engine process (pid {self.pid}) closed its end and hangs"
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"the engine process (pid {self.pid}) was killed by {name}{hint}"
        return f"the engine process (pid {self.pid}) exited with code {code}"


class EngineThread:
    """The engine in a thread of this process, over the same messages: for tests and debugging."""

    def __init__(self, factory: str = DEFAULT_FACTORY) -> None:
        front, engine = connected_pair()
        self.channel = Channel(front)
        self._thread = threading.Thread(
            target=self._run, args=(engine, factory), name="paceline-engine", daemon=True
        )
        self._thread.start()

    @property
    def pid(self) -> None:
        return None

    @staticmethod
    def _run(sock: socket.socket, factory: str) -> None:
        with sock:  # whatever happens, the front sees the end of it
            importlib.import_module(_WORKER).serve_in_thread(sock, factory)

    def stop(self, grace_s: float) -> None:
        self.channel.close()  # ends the loop, as a Stop would
        self._thread.join(max(grace_s, 0.5))  # an exit under its feet would abort in C++

    def exit_reason(self) -> str:
        return "the engine thread ended"


def launch(factory: str = DEFAULT_FACTORY, *, in_process: bool = False) -> EngineHandle:
    """Start an engine that imports `factory` and then waits for its `boot.Start` frame."""
    return EngineThread(factory) if in_process else EngineProcess(factory)


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
