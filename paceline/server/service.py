"""State that all endpoints share: the engine's client, readiness, and the open requests.

Admits requests, reads the engine's messages, drains, and handles the death of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
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
    ConfigError,
    EngineDead,
    InvalidRequest,
    MissingExtra,
    NotFound,
    Overloaded,
    PacelineError,
    nearest,
    shown,
)
from paceline.request import SamplingParams
from paceline.server.failures import NotReady
from paceline.server.job import Job, JobSpec
from paceline.server.metrics import Metrics
from paceline.server.options import ServerOptions
from paceline.server.response_store import ResponseStore
from paceline.server.retry_after import RetryEstimate
from paceline.server.start_queue import StartQueue
from paceline.step import RunnerInfo
from paceline.text.response_formats import AUTO, NONE, ResponseFormat, pick_format
from paceline.text.response_parser import check_template, load_library

if TYPE_CHECKING:
    from paceline.engine.outputs import Delta, Generation
    from paceline.engine.stats import EngineStats
    from paceline.text.chat import ChatTemplate
    from paceline.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
R = TypeVar("R")

LOADING_RETRY_S = 5
DRAINING_RETRY_S = 10
PUMP_INTERVAL_S = 1.0
# A smaller body is prepared in a few milliseconds, so a thread would only cost time.
_INLINE_BYTES = 8192
_LARGE_BODY = 1 << 18
_TRIM_AFTER_S = 1.0
_RESTART_LOOK_S = 0.05


class Client(Protocol):
    """The part of engine.client.EngineClient that the server uses."""

    info: RunnerInfo
    on_trace: Callable[[int, bytes], None] | None

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
        on_error: Callable[[PacelineError], None] | None = None,
        prompt: str | None = None,
        priority: int = 0,
        replica: int | None = None,
    ) -> Generation: ...
    def abort(self, request_id: str) -> None: ...
    def drain_rank(self, rank: int, grace_s: float) -> None: ...
    def is_restarting(self, rank: int) -> bool: ...
    def fileno(self) -> int: ...
    def pump(self, timeout_s: float | None = 0.0) -> int: ...
    def start_trace(self) -> None: ...
    def read_trace(self, *, stop: bool = False) -> None: ...
    def close(self, grace_s: float = ...) -> None: ...


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt's token ids, and its text if there is one."""

    token_ids: Sequence[int]
    text: str | None = None


class Service:
    """One engine, shared by all requests. Every method runs on the event loop's thread."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.metrics = Metrics(also_as_vllm=options.metrics_compat == "vllm")
        self.state = State.LOADING
        self.engine_error: EngineDead | None = None
        self.jobs: set[Job] = set()
        self.fingerprint = ""
        self.model_names: tuple[str, ...] = options.served_model_name
        # Called when a job ends or the engine dies.
        self.on_change: Callable[[], None] = lambda: None
        self._client: Client | None = None
        self._template: ChatTemplate | None = None
        self._response_format: ResponseFormat | None = None
        self._can_parse = False  # the format was checked, with the library that parses answers
        self.why_no_calls = (
            "the format of this model's tool calls is not known, or --tool-call-parser is none. "
            "Choose one with --tool-call-parser."
        )
        self._num_open = 0  # sequences of all jobs
        self._retry_estimate = RetryEstimate()
        self.body_bytes = 0  # of requests that are read or prepared now
        self._will_trim = False
        self._reader: tuple[asyncio.AbstractEventLoop, int] | None = None
        self.start_queue = StartQueue()
        self.responses = ResponseStore(
            options.max_stored_responses, options.max_stored_response_bytes
        )
        # Parses large bodies and tokenises long texts, so that the event loop stays free.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="paceline-text")
        # Waits for the processes that render templates of requests, one at a time.
        self._slow_pool = ThreadPoolExecutor(1, thread_name_prefix="paceline-template")

    # ---- the engine

    def attach(self, client: Client) -> None:
        """Serve with this engine from now on."""
        if self.options.chat_template is not None:
            self._template = client.load_chat_template(self.options.chat_template)
        named = {self.options.tool_call_parser, self.options.reasoning_parser} - {AUTO, NONE}
        if named:
            load_library()  # raises now if it is missing
        self._client = client
        if not self.model_names:
            self.model_names = (client.info.model_name or "default",)
        self.fingerprint = _fingerprint(client.info)
        self.metrics.attach(client.stats, client.info, self.model_names[0])
        if self.state is State.LOADING:
            self.state = State.READY

    def start_pump(self) -> None:
        """Read the engine's messages as they arrive. Needs a running loop; idempotent."""
        if self._client is not None and self._reader is None:
            loop, fd = asyncio.get_running_loop(), self._client.fileno()
            loop.add_reader(fd, self._pump)
            self._reader = (loop, fd)
            self._pump_periodically()

    def _pump_periodically(self) -> None:
        """A hung engine sends nothing; `pump` detects that and raises EngineDead."""
        if self._reader is not None:
            self._reader[0].call_later(PUMP_INTERVAL_S, self._pump_periodically)
            self._pump()
            self._refuse_late_jobs(time.monotonic())

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
        """The client of a ready engine. Raises EngineDead or NotReady if there is none."""
        if self.engine_error is not None:
            raise self.engine_error
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
        """For running requests; also available while draining."""
        assert self._client is not None
        return self._client.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        if self._template is None:
            self._template = self.client.load_chat_template(None)
        return self._template

    async def response_format(self, *, with_tools: bool) -> ResponseFormat:
        """How to read this model's answers. The first call may load a library in a thread."""
        layout = self._response_format or self._pick_format(self.chat_template.response_template)
        is_needed = layout.reasoning_field is not None or (with_tools and layout.reads_calls)
        if is_needed and not self._can_parse:
            check = functools.partial(check_template, layout)
            try:
                await asyncio.get_running_loop().run_in_executor(self._pool, check)
            except MissingExtra as error:
                logger.warning("%s. Reasoning and tool calls are not parsed.", error)
                self.why_no_calls, layout = f"{error}.", ResponseFormat()
            except ConfigError as error:
                logger.warning("%s. The chat template decides instead.", error)
                layout = self._pick_format(None)
            self._can_parse = True
        self._response_format = layout
        return layout

    def _pick_format(self, own: Mapping[str, Any] | None) -> ResponseFormat:
        template, options = self.chat_template, self.options
        return pick_format(
            options.tool_call_parser,
            options.reasoning_parser,
            own,
            template.text_with_tools,
            writes_tools=template.knows_tools,
        )

    def _pump(self) -> None:
        client = self._client
        assert client is not None
        try:
            client.pump(0.0)
        except EngineDead as error:
            self._on_engine_death(error)

    def _on_engine_death(self, error: EngineDead) -> None:
        """Fail all open requests. New requests get the same error."""
        if self.engine_error is None:
            logger.error("%s", error)
        self.stop_pump()
        self.engine_error, self.state = error, State.DEAD
        self.fail_all(error)
        self.on_change()

    # ---- requests

    def resolve_model(self, name: str | None) -> str:
        """The name for the reply: always the first served name. Raises for an unknown name."""
        if name is None or name in self.model_names:
            return self.model_names[0]
        raise NotFound(
            f"The model {shown(name)} does not exist; this server has "
            f"{', '.join(map(repr, self.model_names))}.{nearest(name, self.model_names)}",
            param="model",
            code="model_not_found",
        )

    async def off_loop(self, size: int, work: Callable[[], R]) -> R:
        """Run work on a body or text of this size: directly if it is small, else in a thread."""
        if size <= _INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def release_body(self, size: int) -> None:
        """A body was freed. After a large one, malloc is told to return memory to the system."""
        self.body_bytes -= size
        if size > _LARGE_BODY and not self._will_trim:
            self._will_trim = True
            asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._will_trim = False
        with contextlib.suppress(RuntimeError):  # the pool was closed
            self._pool.submit(_malloc_trim)

    async def in_template_thread(self, work: Callable[[], R]) -> R:
        """Run work that waits for a template's process."""
        return await asyncio.get_running_loop().run_in_executor(self._slow_pool, work)

    def check_room(self, num_sequences: int) -> None:
        """Raise if the server cannot take this many more sequences."""
        limit = self.options.max_waiting
        if num_sequences > limit:
            raise InvalidRequest(
                f"The request asks for {num_sequences} sequences; the limit is {limit} "
                "(--max-waiting). Split the request.",
                param="n",
            )
        # Sequences of a disconnected client count until the engine has released them.
        num_held = self._num_open + (0 if self._client is None else self._client.num_leaving)
        if num_held + num_sequences > limit:
            retry_s = self._retry_estimate.retry_after_s(self._num_open, time.monotonic())
            raise Overloaded(
                f"{num_held} sequences wait or run; the limit is {limit} (--max-waiting). "
                f"Try again in {retry_s} s.",
                retry_after_s=retry_s,
            )

    def _check_wait(self, now_s: float) -> None:
        """Raise if a new request would wait longer than `max_queue_wait`."""
        limit_s, stats = self.options.max_queue_wait, self.client.stats
        if limit_s is None or not stats.num_waiting:
            return
        wait_s = self._retry_estimate.seconds_for(stats.num_waiting, now_s)
        if wait_s > limit_s:
            raise self._late(f"A new request would wait about {wait_s:.0f} s", now_s)

    def _refuse_late_jobs(self, now_s: float) -> None:
        """Fail jobs that have waited longer than `max_queue_wait`."""
        limit_s = self.options.max_queue_wait
        for job in list(self.jobs) if limit_s is not None else ():
            waits = not any(generation.was_admitted for generation in job.generations)
            if limit_s is not None and waits and now_s - job.spec.arrival_s > limit_s:
                job.fail(self._late(f"The request has waited for {limit_s:g} s", now_s))

    def _late(self, what: str, now_s: float) -> Overloaded:
        retry_s = self._retry_estimate.retry_after_s(self._num_open, now_s)
        return Overloaded(
            f"{what}; the limit is {self.options.max_queue_wait:g} s (--max-queue-wait). "
            f"Try again in {retry_s} s.",
            retry_after_s=retry_s,
        )

    def submit(
        self,
        spec: JobSpec,
        prompts: Sequence[TokenizedPrompt],
        params: SamplingParams,
        priority: int,
    ) -> Job:
        """Submit all prompts, or none if one is invalid."""
        client = self.client
        job = Job(spec, self.metrics.latencies)
        self.check_room(job.num_choices)
        self._check_wait(time.monotonic())
        for prompt in prompts if len(prompts) > 1 else ():
            client.check(prompt.token_ids, params)
        self.jobs.add(job)
        if client.stats.num_waiting == 0:
            self._retry_estimate.restart(time.monotonic())
        self._num_open += job.num_choices
        try:
            for i, prompt in enumerate(prompts):
                job.generations.append(
                    client.submit(
                        f"{spec.id}-{i}" if len(prompts) > 1 else spec.id,
                        prompt.token_ids,
                        params,
                        on_deltas=job.delta_handler(i),
                        on_error=job.fail,
                        prompt=prompt.text,
                        priority=priority,
                        replica=spec.replica,
                    )
                )
        except BaseException:
            self.end(job)
            raise
        for generation in job.generations:
            generation.wants_sources = spec.wants_sources
        if self.options.per_request_spec_decode_metrics != "none" and job.num_choices == 1:
            metrics = job.generations[0].metrics
            metrics.spec_steps = metrics.spec_steps or []
        return job

    def end(self, job: Job) -> None:
        """The reply was sent or the client disconnected: abort running sequences. Idempotent."""
        if job not in self.jobs:
            return
        self.jobs.discard(job)
        self._num_open -= job.num_choices
        if job.finished:
            self._retry_estimate.end(job.num_choices, time.monotonic())
        if self._client is not None and self.engine_error is None:
            for generation in job.generations:
                if not generation.finished:
                    self._client.abort(generation.request_id)
        self.on_change()

    async def restart_rank(self, rank: int) -> None:
        """Restart a rank, and return when it serves again. Raises EngineDead if it does not."""
        client = self.client
        client.drain_rank(rank, self.options.drain_timeout)
        while client.is_restarting(rank):
            if self.engine_error is not None:
                raise self.engine_error
            await asyncio.sleep(_RESTART_LOOK_S)

    # ---- shutdown

    def drain(self) -> None:
        """Take no new requests; running requests continue."""
        if self.state is not State.DEAD:
            self.state = State.DRAINING
        self.on_change()

    def fail_all(self, error: PacelineError) -> None:
        for job in list(self.jobs):
            job.fail(error)


def _malloc_trim() -> None:
    """Return freed memory to the system; glibc keeps it otherwise, separately for each thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _fingerprint(info: RunnerInfo) -> str:
    """Equal for the same version, device and, as far as sizes show, weights."""
    facts = (
        f"{__version__} {info.model_name} {info.device} {info.dtype} {info.vocab_size} "
        f"{info.weights_bytes} {info.max_k} {info.kv_cache_dtype}"
    )
    return "fp_" + hashlib.blake2b(facts.encode(), digest_size=5).hexdigest()
