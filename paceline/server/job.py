"""One HTTP request while it generates: its sequences, and the output that was not sent yet.

Output that arrives while the client reads slowly is joined into one pending delta per choice, so
the memory of a stream is bounded by its output.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from paceline.errors import InvalidRequest, PacelineError
from paceline.request import SamplingParams
from paceline.server.failures import GenerationFailed
from paceline.server.metrics import Latencies
from paceline.server.params import with_client_names
from paceline.server.replies import CompletionTokensDetails, PromptTokensDetails, Usage

if TYPE_CHECKING:
    from paceline.engine.outputs import Delta, Generation, TokenSource, TokenTable


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What is known of a request before it is submitted."""

    id: str
    model: str
    created: int  # unix seconds
    arrival_s: float  # time.monotonic, when the body had arrived
    num_prompts: int
    n: int
    stream: bool
    # The first delta of a choice shows the prompt's logprobs, so it waits for them.
    needs_prompt_logprobs: bool = False
    # max_tokens 0 with echo: the engine samples one token, which the reply omits.
    prompt_only: bool = False
    wants_sources: bool = False  # the reply says where each token came from
    replica: int | None = None  # the request names it in X-data-parallel-rank
    # Fields of SamplingParams that have another name in this API -> that name.
    field_names: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class ChoiceDelta:
    """New output of one choice since its last delta was taken."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenTable] = field(default_factory=list)
    sources: list[TokenSource] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        if delta.text:
            self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs += delta.logprobs
        if delta.sources:
            self.sources += delta.sources
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


class Job:
    """Choice c is sequence c % n of prompt c // n."""

    def __init__(self, spec: JobSpec, latencies: Latencies) -> None:
        self.spec = spec
        self.generations: list[Generation] = []
        self.prompt_logprobs: list[list[TokenTable | None] | None] = [None] * spec.num_prompts
        self.num_tokens = [0] * self.num_choices  # output tokens per choice
        self.error: PacelineError | None = None
        self.is_disconnected = False  # the client went away
        self._latencies = latencies
        self._pending: dict[int, ChoiceDelta] = {}
        self._num_open = self.num_choices
        self._last_token_s = [0.0] * self.num_choices
        self._waiter: asyncio.Future[None] | None = None

    @property
    def num_choices(self) -> int:
        return self.spec.num_prompts * self.spec.n

    @property
    def finished(self) -> bool:
        """Every choice has its last delta, which may not be taken yet."""
        return self._num_open == 0

    @property
    def is_over(self) -> bool:
        return self.finished or self.is_disconnected or self.error is not None

    # ---- the engine's side

    def delta_handler(self, prompt_idx: int) -> Callable[[list[Delta]], None]:
        """The `on_deltas` callback of one prompt."""
        first = prompt_idx * self.spec.n

        def take(deltas: list[Delta]) -> None:
            now = time.monotonic()
            for delta in deltas:
                if delta.prompt_logprobs is not None:
                    self.prompt_logprobs[prompt_idx] = delta.prompt_logprobs
                self._add(first + delta.index, delta, now)
            if self.is_over or self.spec.stream:
                self.wake()

        return take

    def fail(self, error: PacelineError) -> None:
        if not self.is_over:
            self.error = error
        self.wake()

    def disconnect(self) -> None:
        """The client went away."""
        self.is_disconnected = True
        self.wake()

    def _add(self, choice: int, delta: Delta, now: float) -> None:
        count = len(delta.token_ids)
        if count:
            self._measure(choice, count, now)
        if delta.finish_reason is not None:
            self._num_open -= 1
            self._latencies.e2e_request_latency.observe(now - self.spec.arrival_s)
            if delta.finish_reason in ("abort", "error"):
                generation = self.generations[choice // self.spec.n]
                error = generation.error or _ended_early(delta, generation.params)
                if isinstance(error, InvalidRequest):
                    with_client_names(error, self.spec.field_names)
                self.error = self.error or error
        if self.spec.prompt_only:
            delta.text, delta.token_ids, delta.logprobs, delta.sources = "", [], None, None
            delta.stop_reason = None
            if delta.finish_reason is not None:
                delta.finish_reason = "length"
        else:
            self.num_tokens[choice] += count
        pending = self._pending.get(choice)
        if pending is None:
            pending = self._pending[choice] = ChoiceDelta(choice)
        pending.add(delta)

    def _measure(self, choice: int, count: int, now: float) -> None:
        last = self._last_token_s[choice]
        if last:
            self._latencies.inter_token_latency.observe((now - last) / count, count)
        else:
            self._latencies.time_to_first_token.observe(now - self.spec.arrival_s)
        self._last_token_s[choice] = now

    # ---- the reader's side

    async def wait(self) -> None:
        """Return now if the job is over or has output to stream, else after the next `wake`."""
        if not (self.is_over or (self.spec.stream and self._ready())):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> list[ChoiceDelta]:
        """The pending deltas, at most one per choice, in the order of choices."""
        return [self._pending.pop(choice) for choice in self._ready()]

    def _ready(self) -> list[int]:
        if not self.spec.needs_prompt_logprobs or self.is_over:
            return sorted(self._pending)
        have = self.prompt_logprobs
        return sorted(c for c in self._pending if have[c // self.spec.n] is not None)

    # ---- accounting

    def log_summary(self) -> str:
        used = self.usage()
        return (
            f"{self.spec.id} {used.prompt_tokens} prompt + {used.completion_tokens} completion "
            "tokens"
        )

    def usage(self) -> Usage:
        prompt = sum(len(g.prompt_token_ids) for g in self.generations)
        completion = sum(self.num_tokens)
        accepted = sum(g.metrics.num_accepted_tokens for g in self.generations)
        drafted = sum(g.metrics.num_draft_tokens for g in self.generations)
        forced: int | UnsetType = UNSET
        if any(g.params.structured_outputs is not None for g in self.generations):
            forced = sum(g.metrics.num_forced_tokens for g in self.generations)
        cached = sum(_cached_once(g, self.spec.n) for g in self.generations)
        return Usage(
            prompt,
            completion,
            prompt + completion,
            PromptTokensDetails(cached),
            CompletionTokensDetails(0, accepted, max(0, drafted - accepted), forced),
        )


def _cached_once(generation: Generation, n: int) -> int:
    """Cached tokens of the prompt, counted once as the prompt itself is.

    The metric sums over n sequences. All but the first hit the prompt that the first computed, so
    what exceeds n - 1 whole prompts was cached before the request came.
    """
    of_siblings = (n - 1) * len(generation.prompt_token_ids)
    return max(0, generation.metrics.num_cached_tokens - of_siblings)


def _ended_early(delta: Delta, params: SamplingParams) -> PacelineError:
    if delta.finish_reason == "abort":
        return GenerationFailed("The request was aborted by the server.")
    # The device could sample no token: all are forbidden, or the logits are NaN.
    names = ("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens")
    used = [name for name in (*names, "logits_processors") if getattr(params, name)]
    if params.allowed_token_ids or params.bad_words or (len(used) > 1 and used[0] == names[0]):
        return InvalidRequest(
            f"The output cannot go on: {', '.join(used)} together leave no token to sample here.",
            param=used[0],
        )
    by = " or ".join(("the model", *(params.logits_processors or ())))
    return GenerationFailed(f"The output cannot go on: {by} gave logits that are NaN or infinite.")
