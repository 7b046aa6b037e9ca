"""Runs a list of prompts to their ends: a bounded window of them at a time, results in order.

Owns no engine; aborts what it has submitted when it is left early.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from paceline.engine.assembly import Delta, Generation, TokenTable
from paceline.engine.client import EngineClient
from paceline.engine.interrupt import InterruptFlag
from paceline.request import CompletionOutput, RequestOutput, SamplingParams

# How many times the engine's slots may be submitted and unfinished: enough that it never waits
# for the front, and few enough that a million prompts cost neither side memory.
_WINDOW_PER_SLOT = 4
# Ctrl-C is looked for between two pumps.
_PUMP_S = 0.1


class Progress(Protocol):
    """Who wants to know how far it is."""

    def update(self, done: int, tokens: int = 0, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to complete."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0


class Batch:
    """One list of jobs. `run` once."""

    def __init__(
        self,
        client: EngineClient,
        jobs: list[Job],
        request_ids: Iterator[str],
        progress: Progress | None = None,
    ) -> None:
        self._client = client
        self._jobs = jobs
        self._request_ids = request_ids
        self._progress = progress
        self._window = _WINDOW_PER_SLOT * client.num_slots
        self._open: dict[int, Generation] = {}
        self._outputs: dict[int, RequestOutput] = {}
        self._failed: Generation | None = None

    def run(self) -> list[RequestOutput]:
        """All results in the order of the jobs. A job that cannot be served raises before any is
        submitted; an engine that fails raises, and what was open is aborted.
        """
        for job in self._jobs:
            self._client.check(job.prompt_token_ids, job.params)
        order = range(len(self._jobs))
        # Within the window the engine orders; across windows it is up to us.
        waiting = iter(sorted(order, key=lambda i: self._jobs[i].priority))
        with InterruptFlag() as interrupt:
            try:
                job_idx = next(waiting, None)
                while job_idx is not None or self._open:
                    while job_idx is not None and self._may_submit():
                        self._submit(job_idx)
                        job_idx = next(waiting, None)
                    self._client.pump(_PUMP_S)
                    interrupt.check()
                    if self._failed is not None and self._failed.error is not None:
                        raise self._failed.error
            except BaseException:
                for generation in self._open.values():
                    self._client.abort(generation.request_id)
                raise
        return [self._outputs[i] for i in order]

    def _may_submit(self) -> bool:
        return self._client.has_room and self._client.num_open < self._window

    def _submit(self, job_idx: int) -> None:
        job = self._jobs[job_idx]
        parts = [_Sum(i) for i in range(job.params.n)]

        def on_deltas(deltas: list[Delta]) -> None:
            self._take(job_idx, parts, deltas)

        self._open[job_idx] = self._client.submit(
            next(self._request_ids),
            job.prompt_token_ids,
            job.params,
            on_deltas=on_deltas,
            prompt=job.prompt,
            priority=job.priority,
        )

    def _take(self, job_idx: int, parts: list[_Sum], deltas: list[Delta]) -> None:
        for delta in deltas:
            parts[delta.index].take(delta)
        generation = self._open[job_idx]
        if self._progress is not None:
            self._progress.update(int(generation.finished), sum(len(d.token_ids) for d in deltas))
        if not generation.finished:
            return
        del self._open[job_idx]
        if generation.error is not None:
            self._failed = generation
        self._outputs[job_idx] = RequestOutput(
            request_id=generation.request_id,
            prompt=generation.prompt,
            prompt_token_ids=generation.prompt_token_ids,
            outputs=[part.to_output() for part in parts],
            finished=True,
            metrics=generation.metrics,
            prompt_logprobs=parts[0].prompt_logprobs,
        )


class _Sum:
    """The deltas of one sequence, added up."""

    def __init__(self, index: int) -> None:
        self._output = CompletionOutput(index)
        self._texts: list[str] = []
        self.prompt_logprobs: list[TokenTable | None] | None = None

    def take(self, delta: Delta) -> None:
        output = self._output
        self._texts.append(delta.text)
        output.token_ids.extend(delta.token_ids)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.logprobs is not None:
            if output.logprobs is None:
                output.logprobs = []
            output.logprobs.extend(delta.logprobs)
        output.finish_reason = delta.finish_reason
        output.stop_reason = delta.stop_reason

    def to_output(self) -> CompletionOutput:
        output = self._output
        output.text = "".join(self._texts)
        if output.logprobs is not None:
            pairs = zip(output.token_ids, output.logprobs, strict=True)
            output.cumulative_logprob = sum(table[token].logprob for token, table in pairs)
        return output
