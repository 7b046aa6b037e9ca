"""The front's hold on an engine: submit, pump, abort. Everything that serves a user stands on it.

Has no thread and no lock: `submit`, `abort` and `pump` belong to one thread, which either loops
on `pump` or gives `fileno` to its event loop. Never imports torch.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline import errors
from paceline.config import EngineConfig
from paceline.engine.admission import Admission, Checked
from paceline.engine.assembly import Assembly, Delta, Generation
from paceline.engine.cluster import Cluster
from paceline.engine.front import Front, load_front
from paceline.engine.launch import DEFAULT_FACTORY
from paceline.engine.messages import (
    Drain,
    ResetPrefixCache,
    StartTrace,
    StepMessage,
    TakeTrace,
    Traced,
    encode,
    encode_abort,
    encode_submit,
)
from paceline.engine.router import Router
from paceline.engine.stats import EngineStats
from paceline.errors import EngineDead, InvalidRequest, Overloaded, PacelineError
from paceline.observe.log import RequestLogger, current_level
from paceline.observe.trace import Span, unpack_spans
from paceline.request import Done, RequestMetrics, SamplingParams
from paceline.scheduler.events import Ended, Events
from paceline.step import RunnerInfo
from paceline.text.chat import ChatTemplate, load_chat_template
from paceline.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Sink = Callable[[list[Delta]], None]
_CLOSE_GRACE_S = 5.0
MOST_UNSENT_BYTES = 64 << 20  # of messages that a replica has not taken; a prompt has 4 per token


class EngineClient:
    """A running engine. Build it with `start`."""

    def __init__(
        self, config: EngineConfig, cluster: Cluster, info: RunnerInfo, front: Front
    ) -> None:
        self.config = config
        self.info = info  # of one replica
        self.front = front
        self.stats = EngineStats(num_replicas=cluster.num_replicas)
        self._cluster = cluster
        self._router = Router(cluster.num_replicas)
        self._admission = Admission(config, info, front)
        self._generations: dict[str, Generation] = {}
        self._open: dict[int, Assembly] = {}
        self._leaving: set[int] = set()  # aborted by `abort`; the engine has not let go of them
        self._next_uid = 1
        self._is_draining = False
        self._dead: EngineDead | None = None
        self._to_abort: dict[int, list[int]] = {}  # by replica
        self._traced: dict[int, bytes] = {}  # traces that came, by replica, for `take_trace`
        self._templates: dict[str | None, ChatTemplate] = {}
        # An engine outlives neither its client nor the interpreter, also when nobody calls close.
        self._finalizer = weakref.finalize(self, cluster.stop, _CLOSE_GRACE_S)

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

        `in_process` runs the engine in a thread of this process. `factory` names what builds the
        runner there (`module:function`). `front` replaces what the model's files say.
        """
        cluster = Cluster.launch(config, factory, in_process=in_process)
        try:
            # The engine imports torch meanwhile; it looks for the model once we have found it, so
            # that a model is fetched once.
            if front is None:
                front = load_front(config)
            cluster.begin(config, current_level())
            return cls(config, cluster, cluster.await_ready(progress), front)
        except BaseException:
            cluster.stop(0.0)
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

    @property
    def chat_template(self) -> ChatTemplate:
        return self.load_chat_template(None)

    def load_chat_template(self, override: str | None) -> ChatTemplate:
        """The model's own template, or the one in `override` (a file or the text of it)."""
        if self.front.text_files is None:
            raise InvalidRequest("This engine has no model files, so no chat template.")
        if override not in self._templates:
            self._templates[override] = load_chat_template(self.front.text_files, override)
        return self._templates[override]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.front.eos_token_ids

    @property
    def default_sampling(self) -> dict[str, Any]:
        return dict(self.front.default_sampling)

    # ---- requests

    @property
    def num_open(self) -> int:
        """Sequences submitted and not finished."""
        return len(self._open)

    @property
    def num_leaving(self) -> int:
        """Sequences that were aborted and that the engine has not let go of yet."""
        return len(self._leaving)

    @property
    def has_room(self) -> bool:
        """Whether `submit` can queue one more; False while an engine takes no messages."""
        replicas = range(self._cluster.num_replicas)
        return all(self._cluster.num_unsent_bytes(r) <= MOST_UNSENT_BYTES for r in replicas)

    @property
    def is_alive(self) -> bool:
        has_ended = self._dead is not None or self._cluster.has_stopped
        return not has_ended and self._finalizer.alive

    @property
    def engine_pid(self) -> int | None:
        """Of the first rank; None for an engine in this process."""
        return next(iter(self.engine_pids), None)

    @property
    def engine_pids(self) -> list[int]:
        """Of every rank, in rank order."""
        return self._cluster.pids

    @property
    def num_slots(self) -> int:
        """Sequences that can run at once, in all replicas together."""
        return self.info.num_slots * self._cluster.num_replicas

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Checked:
        """Raise what `submit` would raise for this request, without submitting it."""
        return self._admission.check(prompt_token_ids, params)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        on_deltas: Sink,
        prompt: str | None = None,
        priority: int = 0,
    ) -> Generation:
        """Queue a request; never waits. Its deltas come to `on_deltas` from within `pump`.

        A sink that raises loses its request, which is aborted, and nothing else. Raises Overloaded
        without `has_room`.
        """
        self._check_serves()
        if not self.has_room:
            raise Overloaded(
                f"Over {MOST_UNSENT_BYTES >> 20} MiB of requests wait for the engine to read them; "
                "try again later."
            )
        if request_id in self._generations:
            raise InvalidRequest(f"Request id {request_id!r} is in use.", param="request_id")
        checked = self._admission.check(prompt_token_ids, params)
        now = time.monotonic()
        generation = Generation(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=checked.prompt_token_ids,
            params=params,
            on_deltas=on_deltas,
            metrics=RequestMetrics(arrival_time=now),
        )
        requests = self._admission.requests(
            checked, self._next_uid, priority=priority, arrival_s=now
        )
        self._next_uid += len(requests)
        self._generations[request_id] = generation
        replica = self._router.assign([request.uid for request in requests])
        for index, request in enumerate(requests):
            self._open[request.uid] = Assembly(
                generation, index, self.front.tokenizer, self.front.eos_token_ids
            )
            generation.open_uids.add(request.uid)
        try:
            for request in requests:
                self._cluster.send(replica, encode_submit(request))
        except EngineDead:
            self._forget(generation, generation.open_uids)  # the caller is told here, once
            raise
        self.stats.num_held = self._router.num_held
        return generation

    def abort(self, request_id: str) -> None:
        """Forget a request: its sink is not called again. Unknown (finished) ids are ignored.

        Its sequences are `num_leaving` until the engine says that it has let go of them.
        """
        generation = self._generations.get(request_id)
        if generation is not None:
            self._abort(generation)
            self._flush_aborts()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running requests are not disturbed."""
        self._check_serves()
        self._cluster.send_all(encode(ResetPrefixCache()))

    # ---- what the loop does with its time

    def start_trace(self) -> None:
        """Have the engine record the stages of every step; it keeps the newest."""
        self._check_serves()
        self._cluster.send_all(encode(StartTrace()))

    def take_trace(self) -> list[Span]:
        """What all replicas recorded since `start_trace`. Pumps until it is there."""
        self._check_serves()
        self._cluster.send_all(encode(TakeTrace()))
        while len(self._traced) < self._cluster.num_replicas:
            self.pump(None)
        traced, self._traced = self._traced, {}
        return [span for r in sorted(traced) for span in unpack_spans(traced[r], r)]

    # ---- the engine's answers

    def fileno(self) -> int:
        """Readable when `pump` has something to do."""
        return self._cluster.fileno()

    def pump(self, timeout_s: float | None = 0.0) -> int:
        """Take what has arrived, waiting up to `timeout_s` for it, and call the sinks.

        Returns the number of deltas. Raises EngineDead once the engine is gone (after a drain: from
        the second call on); by then every open request has ended with finish_reason "error".
        """
        if self._dead is not None:
            raise self._dead
        news: dict[Generation, list[Delta]] = {}
        for replica, message in self._cluster.receive(timeout_s):
            match message:
                case StepMessage():
                    self._take_step(replica, message, news)
                case Traced(spans=spans):
                    self._traced[replica] = spans
        self._flush_aborts()
        if self._cluster.is_over:
            self._die(news)
        count = self._deliver(news)
        self.stats.num_held = self._router.num_held
        if self._dead is not None and not self._cluster.has_stopped:
            raise self._dead
        return count

    def drain(self) -> None:
        """Take no more requests; the engine stops when those it has are finished.

        Keep pumping until `num_open` is 0, then close.
        """
        if self.is_alive and not self._is_draining:
            self._is_draining = True
            self._cluster.send_all(encode(Drain()))

    def close(self, grace_s: float = _CLOSE_GRACE_S) -> None:
        """Stop the engine; what runs is dropped. A second call does nothing."""
        if self._finalizer.detach() is not None:
            self._cluster.stop(grace_s)

    # ---- inside

    def _take_step(
        self, replica: int, message: StepMessage, news: dict[Generation, list[Delta]]
    ) -> None:
        self.stats.take(message, replica)
        if message.events:
            self._take_events(message.events)
        uids: list[int] = message.uid_B.tolist()
        for entry in message.prompt_logprobs:
            if (assembly := self._open.get(uids[entry.row])) is not None:
                assembly.take_prompt_logprobs(entry)
        logprobs = {entry.row: entry for entry in message.logprobs}
        now = time.monotonic()
        rows = zip(
            uids,
            message.count_B.tolist(),
            message.token_BW.tolist(),
            message.done_B.tolist(),
            message.num_drafts_B.tolist(),
            message.num_accepted_B.tolist(),
            strict=True,
        )
        for row, (uid, count, tokens, done, num_drafts, num_accepted) in enumerate(rows):
            assembly = self._open.get(uid)
            if assembly is None:
                continue  # aborted here while the engine was still at it
            metrics = assembly.generation.metrics
            metrics.num_steps += 1
            metrics.num_draft_tokens += num_drafts
            metrics.num_accepted_tokens += num_accepted
            if not count and not done:
                continue
            if count and metrics.first_token_time is None:
                metrics.first_token_time = now
            delta = assembly.take(tokens[:count], Done(done), logprobs.get(row))
            self._add(news, assembly, uid, delta)
            if assembly.finished and not done:
                # a stop string: the engine does not know yet
                self._to_abort.setdefault(replica, []).append(uid)
        for ended in message.events.ended:
            if ended.uid in self._leaving:
                self._let_go(ended.uid)
            # Of several ranks it may not be this one that failed first: `_die` finds out.
            if ended.error != EngineDead.__name__ or self._cluster.num_ranks == 1:
                self._take_end(ended, news)

    def _take_events(self, events: Events) -> None:
        for uid, num_cached in events.admitted:
            assembly = self._open.get(uid)
            # Only the first admission: a resumed request finds its own pages again.
            if assembly is not None and not assembly.was_admitted:
                assembly.was_admitted = True
                assembly.generation.metrics.num_cached_tokens += num_cached
                self.stats.num_cached_tokens += num_cached
                self.stats.num_prompt_tokens += len(assembly.generation.prompt_token_ids)
        for uid in events.preempted:
            if (assembly := self._open.get(uid)) is not None:
                assembly.generation.metrics.num_preemptions += 1

    def _take_end(self, ended: Ended, news: dict[Generation, list[Delta]]) -> None:
        assembly = self._open.get(ended.uid)
        if assembly is None:
            return
        if ended.reason:
            assembly.generation.error = _error_named(ended.error, ended.reason)
        self._add(news, assembly, ended.uid, assembly.end(ended))

    def _add(
        self, news: dict[Generation, list[Delta]], assembly: Assembly, uid: int, delta: Delta
    ) -> None:
        generation = assembly.generation
        news.setdefault(generation, []).append(delta)
        self.stats.num_generated_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.stats.finished[delta.finish_reason] += 1
            self._forget(generation, [uid])

    def _forget(self, generation: Generation, uids: Iterable[int]) -> None:
        for uid in list(uids):
            if uid not in self._leaving:
                self._router.release(uid)
            del self._open[uid]
            generation.open_uids.discard(uid)
        if not generation.open_uids:
            generation.finished = True
            generation.metrics.finished_time = time.monotonic()
            del self._generations[generation.request_id]

    def _abort(self, generation: Generation) -> None:
        generation.is_aborted = True
        self._leaving |= generation.open_uids
        for uid in generation.open_uids:
            self._to_abort.setdefault(self._router.owner(uid), []).append(uid)
        self.stats.finished["abort"] += len(generation.open_uids)
        self._forget(generation, generation.open_uids)

    def _let_go(self, uid: int) -> None:
        """The engine has nothing left of an aborted sequence: its place is free."""
        self._leaving.remove(uid)
        self._router.release(uid)

    def _flush_aborts(self) -> None:
        to_abort, self._to_abort = self._to_abort, {}
        for replica, uids in to_abort.items():
            with contextlib.suppress(EngineDead):  # `pump` is who reports it
                self._cluster.send(replica, encode_abort(uids))

    def _deliver(self, news: dict[Generation, list[Delta]]) -> int:
        count = 0
        for generation, deltas in news.items():
            if generation.is_aborted:
                continue  # by the sink of another one
            count += len(deltas)
            try:
                generation.on_deltas(deltas)
            except Exception:
                RequestLogger(logger, generation.request_id).exception("a sink failed")
                self.abort(generation.request_id)
        return count

    def _check_serves(self) -> None:
        if self._dead is not None:
            raise self._dead
        if not self._finalizer.alive:
            raise EngineDead("The engine was closed.")
        if self._is_draining:
            raise EngineDead("The engine is shutting down and takes no more requests.")

    def _die(self, news: dict[Generation, list[Delta]]) -> None:
        """A rank is gone: end the others and what is open, and raise from here on."""
        for uid in list(self._leaving):
            self._let_go(uid)
        if self._cluster.has_stopped and not self._open:
            self._dead = EngineDead("The engine has stopped, as it was asked to.")
            return
        self._dead = EngineDead(self._cluster.death_notice())
        if self._cluster.num_ranks > 1:
            self._cluster.kill()
        for uid, assembly in list(self._open.items()):
            assembly.generation.error = self._dead
            self._take_end(Ended(uid, Done.ERROR), news)


def _error_named(name: str, message: str) -> PacelineError:
    kind = getattr(errors, name, None) if name else None
    if isinstance(kind, type) and issubclass(kind, PacelineError):
        return kind(message)
    return EngineDead(message)
