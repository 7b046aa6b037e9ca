"""A contender in a separate process: starts it, sends jobs, closes it. Measures nothing.

All contenders stay alive during a run and alternate, so an idle one must use no CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol, cast

from bench.peers.job import About, Job, Peer, Timing

_KINDS = {
    "paceline": "bench.peers.paceline_peer:PacelinePeer",
    "transformers": "bench.peers.transformers_peer:TransformersPeer",
    "llama.cpp": "bench.peers.llamacpp_peer:LlamaCppPeer",
}
_PACKAGES = {"paceline": "paceline", "transformers": "transformers", "llama.cpp": "xllamacpp"}
_CLOSE_S = 20.0


@dataclass(frozen=True)
class Entry:
    """A contender: its name in the table, the kind of engine, and its options."""

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)

    def why_not(self) -> str | None:
        """None, or why this contender cannot run here and what to do."""
        package = _PACKAGES[self.kind]
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed; pip install '.[bench]'"
        return None


class Runs(Protocol):
    """Runs jobs: a contender's process, or a fake in a test."""

    def run(self, job: Job) -> Timing: ...


class ContenderFailed(RuntimeError):
    """The contender's process raised or died; the message holds its traceback."""


class Contender:
    """A contender's process. It loads in the background; `wait` returns when it is ready."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        context = multiprocessing.get_context("spawn")
        self._channel, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(theirs, _KINDS[entry.kind], entry.options), name=entry.name
        )
        self._process.start()
        theirs.close()

    def wait(self) -> About:
        """Its description; call once, before the first job."""
        return cast(About, self._receive())

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def run(self, job: Job) -> Timing:
        self._channel.send(job)
        return cast(Timing, self._receive())

    def _receive(self) -> object:
        try:
            answer = self._channel.recv()
        except EOFError:
            self._process.join(_CLOSE_S)
            code = self._process.exitcode
            raise ContenderFailed(f"{self.entry.name} ended with code {code}") from None
        if isinstance(answer, _Failure):
            raise ContenderFailed(f"{self.entry.name} failed:\n{answer.text}")
        return answer

    def close(self) -> None:
        self._channel.close()  # ends its loop
        self._process.join(_CLOSE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@dataclass(frozen=True)
class _Failure:
    text: str


def _work(channel: Connection, factory: str, options: dict[str, Any]) -> None:
    """Main function of the process: build, send the description, then run jobs."""
    try:
        module, _, name = factory.partition(":")
        peer: Peer = getattr(importlib.import_module(module), name)(**options)
        channel.send(peer.about)
        while True:
            try:
                job: Job = channel.recv()
            except EOFError:
                break
            channel.send(peer.run(job))
        peer.close()
    except BaseException:
        channel.send(_Failure(traceback.format_exc()))
