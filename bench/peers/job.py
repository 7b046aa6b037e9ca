"""Jobs for contenders and the times they report. Plain data.

Knows no engine. The measures at the end define every figure in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Job:
    """Prompts submitted together, as token ids, and the number of tokens to generate for each."""

    prompts: Sequence[Sequence[int]]
    max_tokens: Sequence[int]
    ignore_eos: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    # Further SamplingParams: only between checkouts of Paceline, since no peer has them all.
    further: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """Seconds since the submission of the job; one entry per prompt."""

    first_token_s: list[float]
    last_token_s: list[float]
    token_ids: list[list[int]]
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_tokens: int = 0
    outside_s: float = 0.0  # CPU time outside of model and lm_head, where it was measured

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


@dataclass(frozen=True)
class About:
    """Description of a contender: versions and resolved configuration."""

    description: str
    details: dict[str, object] = field(default_factory=dict)


class Peer(Protocol):
    """An engine that runs one job at a time, in a separate process."""

    about: About

    def run(self, job: Job) -> Timing: ...

    def close(self) -> None: ...


Measure = Callable[[Sequence[Timing]], float]


def decode_rate(timings: Sequence[Timing]) -> float:
    """Tokens per second after the first: the tokens of each answer without its first one, over
    the time from the first token to the last, summed over all answers."""
    tokens = 0
    seconds = 0.0
    for timing in timings:
        for ids, first_s, last_s in zip(
            timing.token_ids, timing.first_token_s, timing.last_token_s, strict=True
        ):
            tokens += len(ids) - 1
            seconds += last_s - first_s
    return tokens / seconds


def throughput(timings: Sequence[Timing]) -> float:
    """All tokens over all time: from the submission of a job to its last token, prefill
    included."""
    seconds = sum(max(timing.last_token_s) for timing in timings)
    return sum(timing.num_tokens for timing in timings) / seconds


def first_token_ms(timings: Sequence[Timing]) -> float:
    """Milliseconds from the submission to the first token, mean over the answers."""
    seconds = [s for timing in timings for s in timing.first_token_s]
    return sum(seconds) / len(seconds) * 1e3


def step_cpu_us(timings: Sequence[Timing]) -> float:
    """Microseconds of CPU time per step, outside of model and lm_head: all threads of the engine
    and of the client."""
    return sum(t.outside_s for t in timings) / sum(t.num_steps for t in timings) * 1e6
