"""What the endpoints stand on: the engine's client, whether it may be used, who uses it now.

Owns admission, the pump and the way down (drain, death). Never parses and never encodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from paceline import __version__
from paceline.errors import (
    EngineDead,
    InvalidRequest,
    NotFound,
    Overloaded,
    PacelineError,
    nearest,
    shown,
)
from paceline.observe.metrics import Metrics
from paceline.request import SamplingParams
from paceline.server.failures import NotReady
from paceline.server.job import Job, JobSpec
from paceline.server.options import ServerOptions
from paceline.server.pace import Pace
from paceline.server.turns import Turns
from paceline.step import RunnerInfo

if TYPE_CHECKING:
    from paceline.engine.assembly import Delta, Generation
    from paceline.engine.stats import EngineStats
    from paceline.text.chat import ChatTemplate
    from paceline.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
R = TypeVar("R")

LOADING_RETRY_S = 5
DRAINING_RETRY_S = 10
PUMP_INTERVAL_S = 1.0
# A body this small is prepared within a few milliseconds; another thread would not pay off.
_INLINE_BYTES = 8192
_LARGE_BODY = 1 << 18
_TRIM_AFTER_S = 1.0


class Client(Protocol):
    """The face of engine.client.EngineClient that the server uses."""

    info: RunnerInfo

    @property
    def stats(self) -> EngineStats: ...
    @property
    def num_leaving(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def default_sampling(self) -> Mapping[str, Any]: ...
    def load_chat_template(self, override: str | None) -> ChatTemplate: ...
    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> object: ...
    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        on_deltas: Callable[[list[Delta]], None],
        prompt: str | None = None,
        priority: int = 0,
    ) -> Generation: ...
    def abort(self, request_id: str) -> None: ...
    def fileno(self) -> int: ...
    def pump(self, timeout_s: float | None = 0.0) -> int: ...
    def close(self, grace_s: float = ...) -> None: ...


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: ids for the engine, and its text when there is one."""

    token_ids: Sequence[int]
    text: str | None = None


class Service:
    """One engine, shared by every request. All of it runs on the event loop's thread."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.metrics = Metrics()
        self.state = State.LOADING
        self.death: EngineDead | None = None
        self.jobs: set[Job] = set()
        self.fingerprint = ""
        self.model_names: tuple[str, ...] = options.served_model_name
        self.on_change: Callable[[], None] = lambda: None  # a job ended, or the engine died
        self._client: Client | None = None
        self._template: ChatTemplate | None = None
        self._num_open = 0  # sequences of all jobs
        self._pace = Pace()
        self.body_bytes = 0  # of requests that are being read or prepared
        self._will_trim = False
        self._reader: tuple[asyncio.AbstractEventLoop, int] | None = None
        self.turns = Turns()  # of requests that begin
        # Large bodies are parsed and long texts tokenised here, so that streams go on meanwhile.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="paceline-text")
        # Waits for processes that render the templates of requests, one at a time.
        self._slow_pool = ThreadPoolExecutor(1, thread_name_prefix="paceline-template")

    # ---- the engine

    def attach(self, client: Client) -> None:
        """The engine serves from now on."""
        if self.options.chat_template is not None:
            self._template = client.load_chat_template(self.options.chat_template)
        self._client = client
        if not self.model_names:
            self.model_names = (client.info.model_name or "default",)
        self.fingerprint = _fingerprint(client.info)
        self.metrics.attach(client.stats, self.model_names[0])
        if self.state is State.LOADING:
            self.state = State.READY

    def start_pump(self) -> None:
        """Read the engine's answers as they come. Needs the running loop; twice is once."""
        if self._client is not None and self._reader is None:
            loop, fd = asyncio.get_running_loop(), self._client.fileno()
            loop.add_reader(fd, self._pump)
            self._reader = (loop, fd)
            self._pump_now_and_then()

    def _pump_now_and_then(self) -> None:
        """An engine that hangs has no answers: `pump` is what gives it up."""
        if self._reader is not None:
            self._reader[0].call_later(PUMP_INTERVAL_S, self._pump_now_and_then)
            self._pump()

    def stop_pump(self) -> None:
        if self._reader is not None:
            loop, fd = self._reader
            self._reader = None
            loop.remove_reader(fd)

    def close(self) -> None:
        self.stop_pump()
        for pool in (self._pool, self._slow_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def client(self) -> Client:
        """The client of an engine that takes requests; raises why there is none."""
        if self.death is not None:
            raise self.death
        if self.state is State.DRAINING:
            raise NotReady("The server is shutting down.", retry_after_s=DRAINING_RETRY_S)
        if self._client is None:
            raise NotReady("The model is still loading.", retry_after_s=LOADING_RETRY_S)
        return self._client

    @property
    def info(self) -> RunnerInfo | None:
        return None if self._client is None else self._client.info

    @property
    def tokenizer(self) -> Tokenizer:
        """For requests that run: it is there until the end, also while draining."""
        assert self._client is not None
        return self._client.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        if self._template is None:
            self._template = self.client.load_chat_template(None)
        return self._template

    def _pump(self) -> None:
        client = self._client
        assert client is not None
        try:
            client.pump(0.0)
        except EngineDead as error:
            self._die(error)

    def _die(self, error: EngineDead) -> None:
        """Every open request has been told by now; new ones are."""
        if self.death is None:
            logger.error("%s", error)
        self.stop_pump()
        self.death, self.state = error, State.DEAD
        for job in list(self.jobs):
            job.fail(error)
        self.on_change()

    # ---- requests

    def resolve_model(self, name: str | None) -> str:
        """The name that the reply carries: the first, whichever was asked for."""
        if name is None or name in self.model_names:
            return self.model_names[0]
        raise NotFound(
            f"The model {shown(name)} does not exist; this server has "
            f"{', '.join(map(repr, self.model_names))}.{nearest(name, self.model_names)}",
            param="model",
            code="model_not_found",
        )

    async def off_loop(self, size: int, work: Callable[[], R]) -> R:
        """Run work on a body or a text of `size`: here when small, else in a thread."""
        if size <= _INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def forget_body(self, size: int) -> None:
        """A body is no longer held. After large ones the C library gives its memory back."""
        self.body_bytes -= size
        if size > _LARGE_BODY and not self._will_trim:
            self._will_trim = True
            asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._will_trim = False
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._pool.submit(_malloc_trim)

    async def apart(self, work: Callable[[], R]) -> R:
        """Run work that waits, such as for another process."""
        return await asyncio.get_running_loop().run_in_executor(self._slow_pool, work)

    def check_room(self, num_sequences: int) -> None:
        """Raise when that many more sequences are too many."""
        limit = self.options.max_waiting
        if num_sequences > limit:
            raise InvalidRequest(
                f"The request asks for {num_sequences} sequences; this server takes {limit} at a "
                "time (--max-waiting). Split it.",
                param="n",
            )
        # A client that left frees its place when the engine has let go of its sequences.
        num_held = self._num_open + (0 if self._client is None else self._client.num_leaving)
        if num_held + num_sequences > limit:
            retry_s = self._pace.retry_after_s(self._num_open, time.monotonic())
            raise Overloaded(
                f"{num_held} sequences wait or run and at most {limit} may (--max-waiting); "
                f"try again in {retry_s} s.",
                retry_after_s=retry_s,
            )

    def submit(
        self, spec: JobSpec, prompts: Sequence[Prompt], params: SamplingParams, priority: int
    ) -> Job:
        """Queue every prompt, or none of them."""
        client = self.client
        job = Job(spec, self.metrics.latencies)
        self.check_room(job.num_choices)
        for prompt in prompts if len(prompts) > 1 else ():
            client.check(prompt.token_ids, params)
        self.jobs.add(job)
        if client.stats.num_waiting == 0:
            self._pace.restart(time.monotonic())
        self._num_open += job.num_choices
        try:
            for i, prompt in enumerate(prompts):
                job.generations.append(
                    client.submit(
                        f"{spec.id}-{i}" if len(prompts) > 1 else spec.id,
                        prompt.token_ids,
                        params,
                        on_deltas=job.sink(i),
                        prompt=prompt.text,
                        priority=priority,
                    )
                )
        except BaseException:
            self.end(job)
            raise
        return job

    def end(self, job: Job) -> None:
        """The request is answered, or its client is gone: stop what still runs. Twice is once."""
        if job not in self.jobs:
            return
        self.jobs.discard(job)
        self._num_open -= job.num_choices
        if job.finished:
            self._pace.end(job.num_choices, time.monotonic())
        if self._client is not None and self.death is None:
            for generation in job.generations:
                if not generation.finished:
                    self._client.abort(generation.request_id)
        self.on_change()

    # ---- the way down

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        if self.state is not State.DEAD:
            self.state = State.DRAINING
        self.on_change()

    def fail_all(self, error: PacelineError) -> None:
        for job in list(self.jobs):
            job.fail(error)


def _malloc_trim() -> None:
    """Without it glibc keeps what large texts and their tokens took, for each thread anew."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _fingerprint(info: RunnerInfo) -> str:
    """Same software, same weights as far as sizes tell, same kind of device: same fingerprint."""
    facts = (
        f"{__version__} {info.model_name} {info.device} {info.dtype} {info.vocab_size} "
        f"{info.weights_bytes} {info.max_k}"
    )
    return "fp_" + hashlib.blake2b(facts.encode(), digest_size=5).hexdigest()
