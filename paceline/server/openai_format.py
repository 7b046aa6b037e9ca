"""What replies of chat and of text completions have in common, in OpenAI's form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from msgspec import UNSET, UnsetType

from paceline.server import replies as wire
from paceline.server.failures import Failure
from paceline.server.job import ChoiceDelta, Job
from paceline.server.logprobs import prompt_logprobs
from paceline.server.requests import GenerateFields
from paceline.server.service import Service

Body = TypeVar("Body", bound=GenerateFields)
# Continuous usage, null until the last chunk, or no such field: as stream_options asks.
ChunkUsage = wire.Usage | UnsetType | None


class OpenAIFormat(ABC, Generic[Body]):
    """A ReplyFormat: ids, usage, prompt fields, errors and the end of a stream."""

    chunk_type: type[wire.ChatChunk] | type[wire.TextReply]

    def __init__(self, service: Service, body: Body, *, shows_logprobs: bool) -> None:
        self._service = service
        self._body = body
        self._shows_logprobs = shows_logprobs
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.continuous_usage_stats)
        self._begun: set[int] = set()  # choices whose first chunk was sent

    @abstractmethod
    def chunks(self, job: Job, delta: ChoiceDelta, usage: ChunkUsage) -> Iterable[Any]:
        """Chunks for new output of one choice; each shows `usage`."""

    def events(self, job: Job, delta: ChoiceDelta) -> Iterable[bytes]:
        usage: ChunkUsage = UNSET
        if self._include_usage:
            usage = self._usage(job) if self._continuous_usage else None
        return map(wire.to_event, self.chunks(job, delta, usage))

    def ping_events(self, job: Job) -> bytes:
        return wire.PING_EVENT

    def last_events(self, job: Job) -> bytes:
        if not self._include_usage:
            return wire.DONE_EVENT
        last = self._chunk(job, self._usage(job))
        last.metrics = self._metrics(job)
        return wire.to_event(last) + wire.DONE_EVENT

    def error_events(self, failure: Failure) -> bytes:
        return wire.to_event(failure.reply) + wire.DONE_EVENT

    def _usage(self, job: Job) -> wire.Usage:
        return job.usage()

    def _metrics(self, job: Job) -> wire.ReplyMetrics | UnsetType:
        """How the drafts did, if the server shows it. Only for one sequence."""
        steps = job.generations[0].metrics.spec_steps
        info = self._service.info
        if steps is None or info is None or not (info.max_k or steps):
            return UNSET
        level = self._service.options.per_request_spec_decode_metrics
        return wire.ReplyMetrics(
            _spec_decode_metrics(steps, info.max_k, detailed=level == "detailed")
        )

    def _chunk(self, job: Job, usage: ChunkUsage, *choices: Any) -> Any:
        return self.chunk_type(**self._head(job), choices=list(choices), usage=usage)

    def _head(self, job: Job) -> dict[str, Any]:
        spec = job.spec
        return {
            "id": spec.id,
            "created": spec.created,
            "model": spec.model,
            "system_fingerprint": self._service.fingerprint,
        }

    @property
    def _shows_tokens(self) -> bool:
        asked = self._body.return_token_ids or self._body.return_token_sources
        return bool(asked or self._shows_logprobs)

    def _show_tokens(self, choice: Any, delta: ChoiceDelta) -> None:
        """Add to a choice what the request asks for about its tokens."""
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
        if self._body.return_token_sources:
            text_of = self._service.tokenizer.token_text
            tokens = zip(delta.token_ids, delta.sources, strict=True)
            choice.token_sources = [wire.TokenOrigin(text_of(t), source) for t, source in tokens]

    def _prompt_token_ids(self, job: Job, prompt_idx: int = 0) -> list[int] | UnsetType:
        if not self._body.return_token_ids:
            return UNSET
        return job.generations[prompt_idx].prompt_token_ids

    def _prompt_logprobs(self, job: Job, prompt_idx: int = 0) -> wire.PromptLogprobs | UnsetType:
        top, tables = self._body.prompt_logprobs, job.prompt_logprobs[prompt_idx]
        return UNSET if top is None or tables is None else prompt_logprobs(tables, top)


def _spec_decode_metrics(
    steps: Sequence[tuple[int, int]], max_k: int, *, detailed: bool
) -> wire.SpecDecodeMetrics:
    """In vLLM's form. `steps`: drafts verified and accepted by each step that had some."""
    # Forced tokens of a grammar are drafts too, and may be more.
    histogram = [0] * (max([max_k, *(accepted for _, accepted in steps)]) + 1)
    for _, accepted in steps:
        histogram[accepted] += 1
    num_drafted = sum(drafted for drafted, _ in steps)
    num_accepted = sum(accepted for _, accepted in steps)
    metrics = wire.SpecDecodeMetrics(
        mean_acceptance_length=1 + num_accepted / max(1, len(steps)),
        draft_acceptance_rate=num_accepted / max(1, num_drafted),
        acceptance_histogram=histogram,
        num_spec_steps=len(steps),
        num_accepted_draft_tokens=num_accepted,
        num_draft_tokens=num_drafted,
        num_spec_tokens=max_k,
    )
    if detailed:
        metrics.per_step_accepted = [accepted for _, accepted in steps]
        metrics.per_step_drafted = [drafted for drafted, _ in steps]
    return metrics
