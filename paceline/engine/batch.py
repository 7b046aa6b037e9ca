"""Runs a list of prompts to their ends: a bounded window of them at a time, results in order.

Owns no engine. If it is left early it aborts what it has submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.engine.client import EngineClient
from paceline.engine.outputs import Delta, Generation, TokenTable
from paceline.engine.process import InterruptFlag
from paceline.errors import PacelineError
from paceline.request import CompletionOutput, RequestOutput, SamplingParams

# Unfinished prompts for each slot of the engine: enough that the engine never waits for the front,
# and few enough that a million prompts take little memory on both sides.
_WINDOW_PER_SLOT = 4
# Prompts that reach the engine in one message: as many as it reads before it plans a step.
_SUBMIT_AT_ONCE = 64
# Longest time to a check for Ctrl-C.
_PUMP_S = 0.1


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One prompt to complete."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0


class Batch:
    """One list of items. `run` once."""

    def __init__(
        self,
        client: EngineClient,
        items: list[BatchItem],
        request_ids: Iterator[str],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._client = client
        self._items = items
        self._request_ids = request_ids
        self._on_progress = on_progress  # gets new finished prompts and new tokens
        self._window = _WINDOW_PER_SLOT * client.num_slots
        self._open: dict[int, Generation] = {}
        self._outputs: dict[int, RequestOutput] = {}
        self._error: PacelineError | None = None

    def run(self) -> list[RequestOutput]:
        """All results in the order of the prompts. A prompt that cannot be served raises before any
        is submitted. A failure raises, and what is open is aborted.
        """
        for item in self._items:
            self._client.check(item.prompt_token_ids, item.params)
        order = range(len(self._items))
        # The engine orders by priority within the window; this is the order across windows.
        waiting = iter(sorted(order, key=lambda i: self._items[i].priority))
        with InterruptFlag() as interrupt:
            try:
                index = next(waiting, None)
                while index is not None or self._open:
                    with self._client.together():
                        for _ in range(_SUBMIT_AT_ONCE):
                            if index is None or not self._may_submit():
                                break
                            self._submit(index)
                            index = next(waiting, None)
                    if index is not None and self._may_submit():
                        continue
                    self._client.pump(_PUMP_S)
                    interrupt.check()
                    if self._error is not None:
                        raise self._error
            except BaseException:
                for generation in self._open.values():
                    self._client.abort(generation.request_id)
                raise
        return [self._outputs[i] for i in order]

    def _may_submit(self) -> bool:
        return self._client.has_room and self._client.num_open < self._window

    def _submit(self, index: int) -> None:
        item = self._items[index]
        parts = [_Sum(i) for i in range(item.params.n)]

        def on_deltas(deltas: list[Delta]) -> None:
            self._take(index, parts, deltas)

        self._open[index] = self._client.submit(
            next(self._request_ids),
            item.prompt_token_ids,
            item.params,
            on_deltas=on_deltas,
            on_error=self._fail,
            prompt=item.prompt,
            priority=item.priority,
        )

    def _fail(self, error: PacelineError) -> None:
        self._error = error

    def _take(self, index: int, parts: list[_Sum], deltas: list[Delta]) -> None:
        for delta in deltas:
            parts[delta.index].take(delta)
        generation = self._open[index]
        if self._on_progress is not None:
            self._on_progress(int(generation.finished), sum(len(d.token_ids) for d in deltas))
        if not generation.finished:
            return
        del self._open[index]
        self._error = self._error or generation.error
        self._outputs[index] = RequestOutput(
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
