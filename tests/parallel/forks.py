"""Engine processes without the seconds that importing torch takes: forks of one prepared process.

Stands in for subprocess.Popen where engine/launch starts its ranks. Everything after the fork is
the real thing: own process, own sockets, own groups.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from paceline.engine import launch

_HIGH = 700  # descriptors move up here before they get their numbers
_MAX_BYTES = 1 << 16


class Nursery:
    """The prepared process. It has one thread, so that forking it is safe."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.parallel.forks", str(theirs.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
            )

    def ask(self, question: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        socket.send_fds(self._socket, [json.dumps(question).encode()], list(descriptors))
        return json.loads(self._socket.recv(_MAX_BYTES))

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)


class ForkedProcess:
    """What engine/launch uses of a Popen."""

    nursery: Nursery

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> None:
        # The arguments of the bootstrap: descriptor, factory, post, whether it is alone, sys.path.
        arguments = list(command[command.index("-c") + 2 :])
        question = {"arguments": arguments[:3], "numbers": list(pass_fds)}
        self.pid: int = self.nursery.ask(question, pass_fds)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.nursery.ask({"poll": self.pid})
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


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Within it, engines of this process fork their ranks."""
    ForkedProcess.nursery = nursery = Nursery()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{launch.__name__}.subprocess.Popen", ForkedProcess)
        try:
            yield
        finally:
            nursery.close()


def _serve(control: socket.socket) -> None:
    import paceline.engine.worker
    import paceline.runner.startup  # noqa: F401

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
            _become_rank(control, question, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(json.dumps(pid).encode())


def _become_rank(control: socket.socket, question: dict[str, Any], got: list[int]) -> None:
    from paceline.engine.worker import main

    try:
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in got]
        control.close()
        for fd in got:
            os.close(fd)
        for number, fd in zip(question["numbers"], high, strict=True):
            os.dup2(fd, number)
            os.close(fd)
        fd, factory, post = question["arguments"]
        main(int(fd), factory, post, die_with_parent=False)
    finally:
        os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(socket.socket(fileno=int(sys.argv[1])))
