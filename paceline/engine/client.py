"""The front's interface to an engine: submit, pump, abort. The server, `LLM` and the CLI use it.

Has no thread and no lock: one thread calls `submit`, `abort` and `pump`. It either loops on `pump`
or gives `fileno` to its event loop. Never imports torch.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.config import EngineConfig
from paceline.engine.admission import Admission
from paceline.engine.front import Front, load_front
from paceline.engine.launch import DEFAULT_FACTORY
from paceline.engine.messages import (
    Control,
    StepMessage,
    Traced,
    encode,
    encode_abort,
    encode_submit,
    join_submits,
)
from paceline.engine.open_requests import OpenRequests
from paceline.engine.outputs import Delta, Generation
from paceline.engine.router import Router
from paceline.engine.stats import DIED, DRAINED, EngineStats
from paceline.engine.supervisor import Back, Change, Lost, Supervisor
from paceline.errors import (
    EngineDead,
    InvalidRequest,
    Overloaded,
    PacelineError,
    RequestFailed,
)
from paceline.observe.log import RequestLogger, current_level
from paceline.observe.trace import Span, unpack_spans
from paceline.request import EngineRequest, RequestMetrics, SamplingParams
from paceline.step import RunnerInfo
from paceline.text.chat import ChatTemplate, load_chat_template
from paceline.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Sink = Callable[[list[Delta]], None]
_CLOSE_GRACE_S = 5.0
MOST_UNSENT_BYTES = 64 << 20  # messages that a replica has not read; a prompt token has 4 bytes


class EngineClient:
    """A running engine. Build it with `start`."""

    def __init__(
        self, config: EngineConfig, supervisor: Supervisor, info: RunnerInfo, front: Front
    ) -> None:
        self.config = config
        self.info = info  # sizes are those of one replica
        self.front = front
        num_replicas = supervisor.num_replicas
        self.stats = EngineStats(num_replicas=num_replicas)
        self._supervisor = supervisor
        router = Router(num_replicas, num_replicas * info.num_pages * info.page_size)
        self.requests = OpenRequests(router, front, self.stats)
        self._admission = Admission(config, info, front)
        self._next_uid = 1
        self._is_draining = False
        self._holds_submits = False
        self._dead: EngineDead | None = None
        self._traced: dict[int, bytes] = {}  # by replica, for `take_trace`
        self._untraced: set[int] = set()  # replicas whose trace has not come
        # Ranks that restart when their requests have finished, or at this time.
        self._draining_ranks: dict[int, float] = {}
        # Gets (replica, packed spans) for each `read_trace` and replica, instead of `take_trace`.
        self.on_trace: Callable[[int, bytes], None] | None = None
        self._templates: dict[str | None, ChatTemplate] = {}
        # Without a call of `close` the engine ends with its client, or with the interpreter.
        self._finalizer = weakref.finalize(self, supervisor.stop, _CLOSE_GRACE_S)

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        in_process: bool = False,
        progress: Callable[[str, float], None] | None = None,
        factory: str = DEFAULT_FACTORY,
        front: Front | None = None,
    ) -> EngineClient:
        """Start an engine and return when it serves. `progress` gets (stage, fraction).

        `in_process` runs the engine in a thread of this process. `factory` is the function that
        builds the runner (`module:function`). `front` replaces what the model's files say.
        """
        supervisor = Supervisor(config, factory, in_process=in_process)
        try:
            # The engine imports torch meanwhile. It looks for the model after the front has found
            # it, so that a model is downloaded once.
            if front is None:
                front = load_front(config)
            supervisor.begin(config, current_level())
            return cls(config, supervisor, supervisor.await_ready(progress), front)
        except BaseException:
            supervisor.stop(0.0)
            raise

    # ---- the model

    @property
    def tokenizer(self) -> Tokenizer:
        if self.front.tokenizer is None:
            raise InvalidRequest(
                "This engine runs with skip_tokenizer_init: give prompt_token_ids instead of text.",
                param="prompt",
            )
        return self.front.tokenizer

    def load_chat_template(self, override: str | None) -> ChatTemplate:
        """The model's template, or the one in `override` (a file or its text)."""
        if self.front.text_files is None:
            raise InvalidRequest("This engine has no model files, so no chat template.")
        if override not in self._templates:
            self._templates[override] = load_chat_template(self.front.text_files, override)
        return self._templates[override]

    @property
    def default_sampling(self) -> dict[str, Any]:
        return dict(self.front.default_sampling)

    # ---- requests

    @property
    def num_open(self) -> int:
        """Sequences submitted and not finished."""
        return self.requests.num_open

    @property
    def num_leaving(self) -> int:
        """Aborted sequences that the engine has not ended yet."""
        return len(self.requests.leaving)

    @property
    def has_room(self) -> bool:
        """Whether `submit` can queue one more; False if an engine does not read its messages."""
        replicas = range(self._supervisor.num_replicas)
        return all(self._supervisor.num_unsent_bytes(r) <= MOST_UNSENT_BYTES for r in replicas)

    @property
    def is_alive(self) -> bool:
        has_ended = self._dead is not None or self._supervisor.has_stopped
        return not has_ended and self._finalizer.alive

    @property
    def engine_pids(self) -> list[int]:
        """One for each rank that does not restart, in rank order; empty for an engine in this
        process."""
        return self._supervisor.pids

    @property
    def num_slots(self) -> int:
        """Sequences that can run at once, in all replicas together."""
        return self.info.num_slots * self._supervisor.num_replicas

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> EngineRequest:
        """Raise what `submit` would raise for this request, without submitting it."""
        return self._admission.check(prompt_token_ids, params)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        on_deltas: Sink,
        on_error: Callable[[PacelineError], None] | None = None,
        prompt: str | None = None,
        priority: int = 0,
        replica: int | None = None,
    ) -> Generation:
        """Queue a request; never waits. `pump` calls `on_deltas` with its deltas. `replica`: the
        one that shall run it; None: the router chooses.

        If `on_deltas` raises, this request is aborted and `on_error` is called; other requests go
        on. Raises Overloaded without `has_room`.
        """
        self._check_serves()
        if not self.has_room:
            raise Overloaded(
                f"Over {MOST_UNSENT_BYTES >> 20} MiB of requests wait for the engine to read them; "
                "try again later."
            )
        if replica is not None and replica not in range(self.stats.num_replicas):
            raise InvalidRequest(
                f"The request asks for data-parallel rank {replica}; this server has ranks 0 to "
                f"{self.stats.num_replicas - 1}.",
                param="X-data-parallel-rank",
            )
        if request_id in self.requests.by_id:
            raise InvalidRequest(f"Request id {request_id!r} is in use.", param="request_id")
        checked = self._admission.check(prompt_token_ids, params)
        now = time.monotonic()
        generation = Generation(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(checked.prompt_token_ids),
            params=params,
            on_deltas=on_deltas,
            metrics=RequestMetrics(arrival_time=now),
            on_error=on_error,
            replica=replica,
        )
        requests = self._admission.split(checked, self._next_uid, priority=priority, arrival_s=now)
        self._next_uid += len(requests)
        self.requests.add(generation, requests)
        if self._holds_submits:
            return generation
        try:
            self._send_unplaced()
        except EngineDead:
            self.requests.forget(generation, generation.open_uids)  # this raise tells the caller
            raise
        self.stats.num_held = self.requests.num_held
        return generation

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is submitted inside reaches each engine as one message, so that its first step has
        all of it."""
        self._holds_submits = True
        try:
            yield
        finally:
            self._holds_submits = False
            with contextlib.suppress(EngineDead):  # `pump` reports it
                self._send_unplaced()
            self.stats.num_held = self.requests.num_held

    def abort(self, request_id: str) -> None:
        """Forget a request: its sink is not called again. Unknown (finished) ids are ignored.

        Its sequences count as `num_leaving` until the engine says that they have ended.
        """
        self.requests.abort(request_id)
        self._flush_aborts()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running requests are not disturbed."""
        self._check_serves()
        self._supervisor.send_all(encode(Control.RESET_PREFIX_CACHE))

    # ---- traces

    def start_trace(self) -> None:
        """Have the engine record the stages of every step; it keeps the newest steps."""
        self._check_serves()
        self._supervisor.send_all(encode(Control.START_TRACE))

    def read_trace(self, *, stop: bool = False) -> None:
        """Ask for what was recorded since the last call; `pump` gives it to `on_trace`."""
        self._check_serves()
        self._supervisor.send_all(encode(Control.TAKE_TRACE if stop else Control.READ_TRACE))

    def take_trace(self) -> list[Span]:
        """What all replicas have recorded since `start_trace`. Pumps until it has come."""
        self._check_serves()
        self._untraced = set(self._supervisor.serving)
        self._supervisor.send_all(encode(Control.TAKE_TRACE))
        while self._untraced:
            self.pump(None)
        traced, self._traced = self._traced, {}
        return [span for r in sorted(traced) for span in unpack_spans(traced[r], r)]

    # ---- the engine's answers

    def fileno(self) -> int:
        """Readable when `pump` has something to do."""
        return self._supervisor.fileno()

    def pump(self, timeout_s: float | None = 0.0) -> int:
        """Take what has arrived, waiting up to `timeout_s` for it, and call the sinks.

        Returns the number of deltas. Raises EngineDead if the engine has ended (after a drain: from
        the second call on); by then every open request has ended with finish_reason "error".
        """
        if self._dead is not None:
            raise self._dead
        for replica, message in self._supervisor.receive(timeout_s):
            match message:
                case StepMessage():
                    self.requests.take_step(replica, message)
                case Traced(spans=spans) if self.on_trace is not None:
                    self.on_trace(replica, spans)
                case Traced(spans=spans):
                    self._traced[replica] = spans
                    self._untraced.discard(replica)
        self._flush_aborts()
        self._restart_drained_ranks()
        for change in self._supervisor.take_changes():
            self._take_change(change)
        if self._supervisor.death is not None:
            self._dead = EngineDead(self._supervisor.death)
            self.requests.end_all(self._dead)
        count = self._deliver()
        self.stats.num_held = self.requests.num_held
        if self._dead is not None and not self._supervisor.has_stopped:
            raise self._dead
        return count

    def drain(self) -> None:
        """Take no more requests; the engine stops when the open ones have finished.

        Keep pumping until `num_open` is 0, then close.
        """
        if self.is_alive and not self._is_draining:
            self._is_draining = True
            self._supervisor.send_all(encode(Control.DRAIN))

    def drain_rank(self, rank: int, grace_s: float) -> None:
        """Restart a rank, with all ranks that restart together with it. They take no new requests;
        what has not finished in `grace_s` goes on elsewhere or after the restart.

        Keep pumping until `is_restarting(rank)` is False.
        """
        self._check_serves()
        if not 0 <= rank < self._supervisor.layout.num_ranks:
            raise InvalidRequest(
                f"There is no rank {rank}; the ranks are 0 to "
                f"{self._supervisor.layout.num_ranks - 1}.",
                param="rank",
            )
        if not self._supervisor.can_restart:
            raise InvalidRequest("This engine is a thread and cannot be restarted.", param="rank")
        ranks, replicas = self._supervisor.group_of_rank(rank)
        if not self.is_restarting(rank):
            self._draining_ranks[ranks.start] = time.monotonic() + grace_s
            self.requests.router.closed |= {*replicas}
            self._restart_drained_ranks()

    def is_restarting(self, rank: int) -> bool:
        """Whether a rank drains or restarts."""
        ranks, replicas = self._supervisor.group_of_rank(rank)
        is_serving = replicas.start in self._supervisor.serving
        return ranks.start in self._draining_ranks or not is_serving

    def close(self, grace_s: float = _CLOSE_GRACE_S) -> None:
        """Stop the engine and drop running requests. A second call does nothing."""
        if self._finalizer.detach() is not None:
            self._supervisor.stop(grace_s)

    # ---- inside

    def _flush_aborts(self) -> None:
        for replica, uids in self.requests.take_aborts().items():
            with contextlib.suppress(EngineDead):  # `pump` reports it
                self._supervisor.send(replica, encode_abort(uids))

    def _send_unplaced(self) -> None:
        placed: dict[int, list[bytes]] = {}
        for replica, request in self.requests.place():
            placed.setdefault(replica, []).append(encode_submit(request))
        for replica, submits in placed.items():
            self._supervisor.send(replica, join_submits(submits))

    def _restart_drained_ranks(self) -> None:
        for rank, give_up_s in list(self._draining_ranks.items()):
            replicas = self._supervisor.group_of_rank(rank)[1]
            num_open = sum(self.requests.router.num_open[r] for r in replicas)
            if not num_open or time.monotonic() >= give_up_s:
                del self._draining_ranks[rank]
                self._supervisor.restart_rank(rank, "A restart was asked for.")

    def _take_change(self, change: Change) -> None:
        """Replicas have ended, or are back: their requests find other replicas, or these."""
        closed = self.requests.router.closed
        if isinstance(change, Back):
            closed -= {*change.replicas}
            for replica in change.replicas:
                self.stats.ranks[replica].is_restarting = False
        else:
            closed |= {*change.replicas}
        if isinstance(change, Lost):
            self._untraced -= {*change.replicas}
            tensor_parallel = self._supervisor.layout.tensor_parallel
            self._draining_ranks.pop(change.replicas.start * tensor_parallel, None)  # done so
            self.stats.restarts[change.cause] += 1
            retry = self.config.device.retry or change.cause == DRAINED
            error = EngineDead(change.reason)
            num_slots = self.info.num_slots if change.cause == DIED else 0
            for replica in change.replicas:
                self.stats.lose(replica, change.cause, change.reason)
                self.requests.lose(replica, error, retry=retry, num_slots=num_slots)
        with contextlib.suppress(EngineDead):  # `pump` reports it
            self._send_unplaced()
            if self._is_draining and isinstance(change, Back):
                for replica in change.replicas:
                    self._supervisor.send(replica, encode(Control.DRAIN))

    def _deliver(self) -> int:
        """Call the sinks."""
        count = 0
        for generation, deltas in self.requests.take_deltas().items():
            if generation.is_aborted:
                continue  # the sink of another request aborted it
            count += len(deltas)
            try:
                generation.on_deltas(deltas)
            except Exception as error:
                self._fail(generation, error)
            if generation.finished:
                generation.drop_sinks()
        return count

    def _fail(self, generation: Generation, error: Exception) -> None:
        """A sink raised: end its request and tell its owner. Other requests go on."""
        RequestLogger(logger, generation.request_id).exception("a sink failed")
        generation.error = RequestFailed(
            f"The front failed on this request ({type(error).__name__}); its log says why."
        )
        on_error = generation.on_error
        self.abort(generation.request_id)
        if on_error is not None:
            try:
                on_error(generation.error)
            except Exception:
                RequestLogger(logger, generation.request_id).exception("its owner failed too")

    def _check_serves(self) -> None:
        if self._dead is not None:
            raise self._dead
        if not self._finalizer.alive:
            raise EngineDead("The engine was closed.")
        if self._is_draining:
            raise EngineDead("The engine is shutting down and takes no more requests.")
