"""An engine for one command: starts it, submits prompts, collects answers.

Writes only to standard error; standard output belongs to the command.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

from paceline.commands import loading
from paceline.commands.prompts import PromptRecord
from paceline.config import EngineConfig
from paceline.engine.client import EngineClient
from paceline.engine.outputs import Delta, Generation
from paceline.engine.process import InterruptFlag, gc_frozen
from paceline.errors import StoppedWhileLoading
from paceline.observe.log import configure_logging
from paceline.request import CompletionOutput, RequestMetrics, SamplingParams
from paceline.text.chat import ChatTemplate

_PUMP_S = 0.1  # longest delay of Ctrl-C while no output arrives


@dataclass
class Answer:
    """The output so far for one prompt."""

    outputs: list[CompletionOutput]
    # (time.monotonic, number of tokens) of each arrival.
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  # text that `Session.stream` has not yielded
    _generation: Generation | None = None

    @property
    def generation(self) -> Generation:
        assert self._generation is not None, "the answer was never submitted"
        return self._generation

    @property
    def finished(self) -> bool:
        return self.generation.finished

    @property
    def metrics(self) -> RequestMetrics:
        return self.generation.metrics

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    def take(self, deltas: Sequence[Delta]) -> None:
        now = time.monotonic()
        for delta in deltas:
            output = self.outputs[delta.index]
            output.text += delta.text
            output.token_ids.extend(delta.token_ids)
            if delta.finish_reason is not None:
                output.finish_reason = delta.finish_reason
                output.stop_reason = delta.stop_reason
            if delta.token_ids:
                self.arrivals.append((now, len(delta.token_ids)))
            if delta.text:
                self.unread.append(delta.text)


class Session:
    """An engine client that takes PromptRecords."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._numbers = count()

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return self.client.load_chat_template(None)

    def encode(self, prompt: PromptRecord) -> list[int]:
        """Token ids of a prompt; messages go through the model's chat template."""
        if prompt.token_ids is not None:
            return prompt.token_ids
        if prompt.messages is not None:
            text = self.chat_template.render(prompt.messages)
            return self.client.tokenizer.encode(text, add_special_tokens=False)
        return self.client.tokenizer.encode(prompt.text or "")

    def params(self, *layers: Mapping[str, Any]) -> SamplingParams:
        """The model's defaults, overridden by each layer in turn."""
        values = dict(self.client.default_sampling)
        for layer in layers:
            values.update(layer)
        return SamplingParams(**values)

    def submit(self, prompt: PromptRecord, params: SamplingParams) -> Answer:
        answer = Answer([CompletionOutput(i) for i in range(params.n)])
        answer._generation = self.client.submit(
            f"cli-{next(self._numbers)}",
            self.encode(prompt),
            params,
            on_deltas=answer.take,
            prompt=prompt.text,
        )
        return answer

    def stream(self, answer: Answer) -> Iterator[str]:
        """Text as it arrives, until the answer is complete. Ctrl-C leaves the session usable."""
        with InterruptFlag() as interrupt:
            while True:
                yield from answer.unread
                answer.unread.clear()
                if answer.finished:
                    return
                self.client.pump(_PUMP_S)
                interrupt.check()

    def wait(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            while not answer.finished:
                self.client.pump(None)

    def abort(self, answer: Answer) -> None:
        """Stop an answer and keep its output so far."""
        self.client.abort(answer.generation.request_id)


@contextmanager
def open_session(config: EngineConfig) -> Iterator[Session]:
    """Load the model with a progress line, and close the engine at the end of the block."""
    configure_logging("warning")
    try:
        client = loading.start_engine(config)
    except KeyboardInterrupt:
        raise StoppedWhileLoading(signal.SIGINT) from None
    try:
        with gc_frozen():
            yield Session(client)
    finally:
        client.close()
