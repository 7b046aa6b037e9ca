"""What a user asks for and what comes back. Plain data; knows nothing of devices or text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import isfinite
from typing import Any

from paceline.errors import InvalidRequest, nearest, shown

# Capacities of the per-slot tables on the device; over them a request is answered 400.
MAX_STOP_TOKEN_IDS = 32
MAX_OWN_STOP_TOKEN_IDS = MAX_STOP_TOKEN_IDS - 8  # the rest is for the model's own
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 8
# A word this long has more tokens than can be kept in any text but runs of one character.
MAX_BAD_WORD_CHARS = 256


class Done(IntEnum):
    """Why a request ended. The device sets the codes up to LENGTH, the host the others."""

    RUNNING = 0
    EOS = 1
    STOP_TOKEN = 2
    LENGTH = 3
    STOP_STRING = 4
    ABORT = 5
    ERROR = 6

    @property
    def finish_reason(self) -> str | None:
        return _FINISH_REASONS[self]


_FINISH_REASONS: dict[Done, str | None] = {
    Done.RUNNING: None,
    Done.EOS: "stop",
    Done.STOP_TOKEN: "stop",
    Done.STOP_STRING: "stop",
    Done.LENGTH: "length",
    Done.ABORT: "abort",
    Done.ERROR: "error",
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample. Names and defaults are vLLM's; `num_speculative_tokens` is ours."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    # Names among those loaded with --logits-processors; `extra_args` is theirs to read.
    logits_processors: Sequence[str] | None = None
    extra_args: Mapping[str, Any] | None = None
    # Most draft tokens to verify per step for this request; None follows the engine, 0 is off.
    num_speculative_tokens: int | None = None

    def __new__(cls, **values: Any) -> SamplingParams:
        # Before the generated __init__, whose TypeError would name no other parameter.
        known = cls.__dataclass_fields__
        for name in values:
            if name not in known:
                hint = nearest(name, known, cutoff=0.8)
                message = f"Unknown sampling parameter {shown(name)}.{hint}"
                raise InvalidRequest(message, param=name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        # Normalise once, so that everybody below sees one shape.
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "bad_words", tuple(self.bad_words or ()))
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors or ()))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check()

    def _check(self) -> None:
        _between("n", self.n, 1, 128)
        _between("temperature", self.temperature, 0.0, 100.0)
        _between("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _between("top_k", self.top_k, 0, 2**31 - 1)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _between("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _optional_between("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _optional_between("seed", self.seed, -(2**63), 2**63 - 1)
        _optional_between("logprobs", self.logprobs, 0, 2**31 - 1)
        _optional_between("prompt_logprobs", self.prompt_logprobs, 0, 2**31 - 1)
        _optional_between("num_speculative_tokens", self.num_speculative_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}.",
                param="min_tokens",
            )
        _at_most("bad_words", len(self.bad_words or ()), MAX_BAD_WORDS)
        for word in self.bad_words or ():
            if not 0 < len(word) <= MAX_BAD_WORD_CHARS:
                raise InvalidRequest(
                    f"bad_words holds a word of {len(word)} characters; it must have at least 1 "
                    f"and at most {MAX_BAD_WORD_CHARS}.",
                    param="bad_words",
                )
        if any(not s for s in self.stop_strings):
            raise InvalidRequest("stop holds an empty string; remove it.", param="stop")
        if self.stop_strings and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True.", param="stop")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids is empty, so no token could ever be sampled.",
                param="allowed_token_ids",
            )
        _at_most("stop_token_ids", len(self.stop_token_ids or ()), MAX_OWN_STOP_TOKEN_IDS)
        _at_most("logit_bias", len(self.logit_bias or ()), MAX_LOGIT_BIAS)
        for token, value in (self.logit_bias or {}).items():
            _between(f"logit_bias[{token}]", value, -100.0, 100.0, param="logit_bias")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop  # type: ignore[return-value]  # normalised in __post_init__

    def replace(self, **changes: Any) -> SamplingParams:
        return replace(self, **changes)

    def replace_unchecked(self, **changes: Any) -> SamplingParams:
        """As `replace` for values that are known to be right: one copy, whatever the tables."""
        copy = object.__new__(SamplingParams)
        copy.__dict__.update(self.__dict__, **changes)
        return copy


def _between(
    name: str,
    value: float,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    param: str | None = None,
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, got {shown(value)}.", param=param or name)
    below = value <= low if open_low else value < low
    if not isfinite(value) or below or value > high:
        edge = "above" if open_low else "at least"
        raise InvalidRequest(
            f"{name} is {value}; it must be {edge} {low} and at most {high}.", param=param or name
        )


def _optional_between(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None:
        _between(name, value, low, high)


def _at_most(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"{name} has {count} entries; at most {limit} are kept.", param=name)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate, as it crosses into the engine: everything is resolved.

    The front process has tokenised, validated, drawn the seed and split n into n requests.
    """

    uid: int  # unique for the life of the engine, ascending by arrival
    prompt_token_ids: Sequence[int]
    params: SamplingParams  # seed and max_tokens are set; n is ignored
    eos_token_ids: tuple[int, ...] = ()  # empty under ignore_eos
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0  # lower runs first; only used under --scheduling-policy priority
    arrival_s: float = 0.0  # time.monotonic of the front process


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability under the model's raw distribution, and its rank from 1."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the n sequences of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times are time.monotonic seconds of the front process; counts are sums over the n sequences.

    num_accepted_tokens counts drafts only, never the bonus token.
    """

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """What `LLM.generate` returns for each prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.num_cached_tokens
