"""An EngineClient whose answers are written by the test: same face, no engine.

Each request gets a script, a list of steps; one step is delivered per pump, or when the test says.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.outputs import Delta, Generation
from paceline.engine.stats import EngineStats
from paceline.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    PacelineError,
    PromptTooLong,
)
from paceline.request import Logprob, RequestMetrics, SamplingParams
from paceline.step import RunnerInfo
from paceline.text.chat import ChatTemplate
from paceline.text.tokenizer import Tokenizer
from tests.engine.echo_client import byte_tokenizer
from tests.patience import PATIENCE_S, wait_for

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if extra is defined %}[{{ extra }}]{% endif %}"
)
Steps = list[list[Delta]]


@dataclass
class Asked:
    """What was submitted."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None
    priority: int
    generation: Generation
    steps: deque[list[Delta]] = field(default_factory=deque)


def words(*texts: str, finish: str | None = "stop", index: int = 0, **last: Any) -> Steps:
    """A script: one step per text, each text one token per byte; the last one finishes."""
    steps = [[Delta(index, text, ids_of(text))] for text in texts]
    if finish is not None:
        steps[-1][0].finish_reason = finish
        for name, value in last.items():
            setattr(steps[-1][0], name, value)
    return steps


TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def table(token: int, *others: tuple[int, float], value: float = -0.5) -> dict[int, Logprob]:
    own = {token: Logprob(value, 1, TOKENIZER.token_text(token))}
    return own | {t: Logprob(v, 2, TOKENIZER.token_text(t)) for t, v in others}


def hello(asked: Asked) -> Steps:
    """Every sequence says Hello in two steps, with the logprobs that were asked for."""
    params, steps = asked.params, words("Hel", "lo")
    every = [
        [
            Delta(i, d.text, list(d.token_ids), finish_reason=d.finish_reason)
            for i in range(params.n)
        ]
        for (d,) in steps
    ]
    if params.logprobs is not None:
        for delta in (d for step in every for d in step):
            delta.logprobs = [table(token) for token in delta.token_ids]
    if params.prompt_logprobs is not None:
        rest = asked.prompt_token_ids[1:]
        every[0][0].prompt_logprobs = [None, *(table(token) for token in rest)]
    return every


class FakeClient:
    """Hold `steps_allowed` to deliver by hand: `allow(n)` lets n more pumps deliver a step."""

    def __init__(
        self,
        script: Callable[[Asked], Steps] = hello,
        *,
        by_hand: bool = False,
        max_model_len: int = 4096,
        default_sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.script = script
        self.info = RunnerInfo(
            num_pages=100,
            page_size=16,
            num_slots=8,
            max_model_len=max_model_len,
            vocab_size=260,
            max_k=3,
            draft_lookahead=0,
            model_name="tiny",
        )
        self.stats = EngineStats()
        self.num_leaving = 0
        self.tokenizer: Tokenizer = TOKENIZER
        self.default_sampling: Mapping[str, Any] = default_sampling or {}
        self.asked: list[Asked] = []
        self.aborted: list[str] = []
        self.drained: list[tuple[int, float]] = []
        self.closed = threading.Event()
        self.death: EngineDead | None = None
        self.on_trace: Callable[[int, bytes], None] | None = None
        self.spans = b""  # what the next `read_trace` finds
        self.trace_calls: list[str] = []
        self._open: dict[str, Asked] = {}
        self._allowed = 0 if by_hand else 1 << 60
        self._lock = threading.Lock()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)

    # ---- the test's side

    def allow(self, steps: int) -> None:
        with self._lock:
            self._allowed += steps
        self._ring()

    def die(self, reason: str) -> None:
        self.death = EngineDead(reason)
        self._ring()

    @property
    def last(self) -> Asked:
        return self.asked[-1]

    def await_asked(self, count: int, within_s: float = PATIENCE_S) -> None:
        wait_for(lambda: len(self.asked) >= count, within_s)

    # ---- the face

    def load_chat_template(self, override: str | None) -> ChatTemplate:
        if override == "missing.jinja":
            raise ConfigError("no such file")
        return ChatTemplate("tiny", {"default": override or TEMPLATE}, {})

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> object:
        if not prompt_token_ids:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        if len(prompt_token_ids) >= self.info.max_model_len:
            raise PromptTooLong(f"The prompt has {len(prompt_token_ids)} tokens.", param="prompt")
        return None

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
    ) -> Generation:
        self.check(prompt_token_ids, params)
        metrics = RequestMetrics(arrival_time=time.monotonic())
        ids = list(prompt_token_ids)
        generation = Generation(request_id, prompt, ids, params, on_deltas, metrics)
        asked = Asked(request_id, ids, params, prompt, priority, generation)
        asked.steps = deque(self.script(asked))
        with self._lock:
            self._open[request_id] = asked
        self.asked.append(asked)
        self._ring()
        return generation

    def abort(self, request_id: str) -> None:
        with self._lock:
            if self._open.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    def drain_rank(self, rank: int, grace_s: float) -> None:
        if rank:
            raise InvalidRequest(f"There is no rank {rank}.", param="rank")
        self.drained.append((rank, grace_s))

    def is_restarting(self, rank: int) -> bool:
        return False

    def start_trace(self) -> None:
        self.trace_calls.append("start")

    def read_trace(self, *, stop: bool = False) -> None:
        self.trace_calls.append("stop" if stop else "read")
        assert self.on_trace is not None
        self.on_trace(0, self.spans)

    def fileno(self) -> int:
        return self._read_fd

    def pump(self, timeout_s: float | None = 0.0) -> int:
        try:
            os.read(self._read_fd, 1 << 16)
        except BlockingIOError:
            return 0
        if self.death is not None:
            raise self.death
        count = 0
        if self._allowed <= 0:
            return 0
        for asked in [a for a in self._open.values() if a.steps]:
            deltas = asked.steps.popleft()
            self.stats.num_generated_tokens += sum(len(d.token_ids) for d in deltas)
            if not asked.steps:
                asked.generation.finished = any(d.finish_reason for d in deltas)
                if asked.generation.finished:
                    self._open.pop(asked.request_id, None)
            count += len(deltas)
            asked.generation.on_deltas(deltas)
        if not count:
            return 0
        self.stats.num_steps += 1
        with self._lock:
            self._allowed -= 1
        if self._allowed > 0 and any(a.steps for a in self._open.values()):
            self._ring()
        return count

    def close(self, grace_s: float = 5.0) -> None:
        self.closed.set()

    def __del__(self) -> None:
        for fd in (self._read_fd, self._write_fd):
            os.close(fd)

    def _ring(self) -> None:
        os.write(self._write_fd, b"!")
