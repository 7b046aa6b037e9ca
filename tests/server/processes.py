"""`serve_echo` as a process: started, asked, and watched until it and its engine are gone."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tests.patience import PATIENCE_S, wait_for
from tests.server.serving import JSON

NO_HEADERS: Mapping[str, str] = {}

ROOT = Path(__file__).parents[2]


class Process:
    """`serve_echo` running."""

    def __init__(
        self,
        behaviour: str,
        log: IO[str],
        *,
        max_files: int | None = None,
        engine: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.log = log
        # Bound here and never listening: the server can bind it too, and no connection of another
        # test is given this port before that.
        self.reserved = socket.socket()
        self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.reserved.bind(("127.0.0.1", 0))
        self.port = self.reserved.getsockname()[1]
        arguments = [
            behaviour,
            json.dumps({"port": self.port, **options}),
            json.dumps(engine or {}),
        ]
        command = [sys.executable, "-m", "tests.server.serve_echo", *arguments]
        if max_files is not None:
            command = ["bash", "-c", f'ulimit -n {max_files}; exec "$@"', "bash", *command]
        self.popen = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self.log,  # a pipe without a reader would fill up and stop the server
            text=True,
        )
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == "loading\n"
        self.engine_pids: list[int] = []

    def await_ready(self) -> str:
        """The URL and the command that were printed; notes the engine's process."""
        assert self.popen.stdout is not None
        url = self.popen.stdout.readline().strip()
        assert url == f"http://127.0.0.1:{self.port}"
        return self.popen.stdout.readline().strip()

    def find_engine(self, num_ranks: int = 1) -> None:
        def are_all_found() -> bool:
            # In the order in which they were started: numbers begin again when they are used up.
            # The thread that started them may end meanwhile, and they move to another one.
            files = Path(f"/proc/{self.popen.pid}/task").glob("*/children")
            with contextlib.suppress(OSError):
                self.engine_pids = [int(pid) for f in files for pid in f.read_text().split()]
            return len(self.engine_pids) == num_ranks

        wait_for(are_all_found)

    def request(
        self, method: str, path: str, headers: Any = NO_HEADERS, **fields: Any
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            body = json.dumps(fields) if fields else None
            connection.request(method, path, body, {**JSON, **headers})
            reply = connection.getresponse()
            replied = {name.lower(): value for name, value in reply.getheaders()}
            return reply.status, replied, reply.read()
        finally:
            connection.close()

    def open_stream(
        self, headers: Any = NO_HEADERS, path: str = "/v1/completions", **fields: Any
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = json.dumps({"stream": True, **fields})
        # So the response owns the socket: the connection is not kept here.
        asked = {**JSON, "Connection": "close", **headers}
        connection.request("POST", path, body, asked)
        return connection.getresponse()

    def await_exit(self, within_s: float = PATIENCE_S) -> tuple[int, str]:
        """(exit code, stderr); asserts that it left in time and that no engine stayed."""
        self.popen.wait(within_s)
        for pid in self.engine_pids:
            wait_for(lambda pid=pid: not is_running(pid))  # type: ignore[misc]
        self.log.seek(0)
        return self.popen.returncode, self.log.read()


def resident_bytes(pid: int) -> int:
    """The memory of a process."""
    return memory_bytes(pid, "VmRSS")


def memory_bytes(pid: int, field: str) -> int:
    """A field of /proc/PID/status that is a number of kB."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def processes_of(group: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
        state, _, its_group = after_name[:3]
        if int(its_group) == group and state != "Z":
            found.append(int(folder.name))
    return found


@contextlib.contextmanager
def running(
    behaviour: str = "",
    *,
    wait: bool = True,
    max_files: int | None = None,
    engine: dict[str, Any] | None = None,
    num_ranks: int = 1,
    **options: Any,
) -> Iterator[Process]:
    with tempfile.TemporaryFile("w+") as log:
        process = Process(behaviour, log, max_files=max_files, engine=engine, **options)
        try:
            if wait:
                process.await_ready()
                process.find_engine(num_ranks)
            yield process
        finally:
            process.popen.kill()
            process.popen.communicate()
            process.reserved.close()
