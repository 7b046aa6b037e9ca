"""Processes without the seconds that importing torch takes: forks of one prepared process.

`Forked` runs any function; `forked_ranks` stands in for subprocess.Popen where engine/launch starts
its ranks. Everything after the fork is the real thing: own process, own sockets, own groups.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engine import launch
from tests.patience import PATIENCE_S

_HIGH = 700  # descriptors move up here before they get their numbers
_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class Prepared:
    """What a prepared process has imported, and which variables it was started with."""

    modules: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


RANKS = Prepared(("paceline.engine.worker", "paceline.runner.startup"))


class Nursery:
    """The prepared process. It has one thread, so that forking it is safe."""

    def __init__(self, prepared: Prepared) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.parallel.forks", str(theirs.fileno())]
        command += prepared.modules
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= dict(prepared.environment)
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
            )

    def ask(self, question: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        with self._lock:  # an engine's watch asks too
            socket.send_fds(self._socket, [json.dumps(question).encode()], list(descriptors))
            return json.loads(self._socket.recv(_MAX_BYTES))

    def close(self) -> None:
        self._socket.close()
        self._process.wait(PATIENCE_S)


@cache
def nursery(prepared: Prepared) -> Nursery:
    """One of this process for each preparation, from when it is first needed to the end."""
    made = Nursery(prepared)
    atexit.register(made.close)
    return made


class Forked:
    """A function, named as "module:function", in a new process, with the interface of Popen."""

    def __init__(
        self,
        function: str,
        *arguments: Any,
        keywords: Mapping[str, Any] | None = None,
        descriptors: Sequence[tuple[int, int]] = (),
        prepared: Prepared = RANKS,
    ) -> None:
        """`descriptors`: pairs of one that is open here and the number that it gets there."""
        question = {
            "function": function,
            "arguments": arguments,
            "keywords": dict(keywords or {}),
            "numbers": [number for _, number in descriptors],
        }
        self._nursery = nursery(prepared)
        self.pid: int = self._nursery.ask(question, [here for here, _ in descriptors])
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        give_up_s = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > give_up_s:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(0.002)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _forked_rank(command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> Forked:
    # The arguments of the bootstrap: descriptor, factory, post, the front's pid, sys.path.
    fd, factory, post = command[command.index("-c") + 2 :][:3]
    return Forked(
        "paceline.engine.worker:main",
        *(int(fd), factory, post),
        keywords={"parent": None},
        descriptors=[(fd, fd) for fd in pass_fds],
    )


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Within it, engines of this process fork their ranks. Other processes start as ever."""
    stand_in = SimpleNamespace(
        Popen=_forked_rank,
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "subprocess", stand_in)
        yield


def _serve(control: socket.socket, modules: Sequence[str]) -> None:
    for name in modules:
        import_module(name)
    codes: dict[int, int] = {}
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _MAX_BYTES, 64)
        if not data:
            return
        question = json.loads(data)
        if "poll" in question:
            pid = question["poll"]
            if pid not in codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            control.send(json.dumps(codes.get(pid)).encode())
            continue
        pid = os.fork()
        if not pid:
            _become(control, question, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(json.dumps(pid).encode())


def _become(control: socket.socket, question: dict[str, Any], got: list[int]) -> None:
    code = 1
    try:
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in got]
        control.close()
        for fd in got:
            os.close(fd)
        for number, fd in zip(question["numbers"], high, strict=True):
            os.dup2(fd, number)
            os.close(fd)
        module, _, name = question["function"].partition(":")
        getattr(import_module(module), name)(*question["arguments"], **question["keywords"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # nothing of the prepared process is to end twice


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
