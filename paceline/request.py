"""Requests and outputs as plain data: sampling parameters, engine requests, results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from itertools import pairwise
from math import isfinite
from typing import Any

from paceline.errors import InvalidRequest, nearest, shown

# Capacities of the per-slot tables on the device; a request over them is answered 400.
MAX_EOS_TOKEN_IDS = 8
MAX_STOP_TOKEN_IDS = 32
MAX_OWN_STOP_TOKEN_IDS = MAX_STOP_TOKEN_IDS - 8  # the rest is for the model's ids
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 8
# A longer word has too many tokens, unless it repeats one character.
MAX_BAD_WORD_CHARS = 256
# Most entries of parameters. The ids of allowed_token_ids are bits on the device.
MAX_ENTRIES = {
    "bad_words": MAX_BAD_WORDS,
    "logit_bias": MAX_LOGIT_BIAS,
    "allowed_token_ids": 1 << 19,
}


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
class StructuredOutputsParams:
    """What the output must look like: exactly one of the first six. Names are vLLM's."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark as llguidance reads it, or GBNF
    json_object: bool | None = None  # any JSON object
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    # Ours: the constraint begins after the first occurrence of these tokens in the output, for
    # models that think first. Empty: at the first token.
    after_token_ids: Sequence[int] = ()
    # If given, `after_token_ids` holds only for an output that begins with these tokens. Any other
    # output is constrained from its first token.
    opening_token_ids: Sequence[int] = ()

    def __new__(cls, **values: Any) -> StructuredOutputsParams:
        for name in values:
            if name not in cls.__dataclass_fields__:
                hint = nearest(name, cls.__dataclass_fields__)
                raise InvalidRequest(f"structured_outputs has no field {shown(name)}.{hint}", **_AT)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, kinds, wanted in _STRUCTURED_TYPES:
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise InvalidRequest(
                    f"structured_outputs.{name} must be {wanted}, not {shown(value)}.", **_AT
                )
        given = [name for name in STRUCTURED_KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs has {', '.join(given) or 'no constraint'}; give exactly one "
                f"of {', '.join(STRUCTURED_KINDS)}.",
                **_AT,
            )
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
            if not self.choice or not all(isinstance(c, str) for c in self.choice):
                raise InvalidRequest(
                    "structured_outputs.choice must be a list of at least one string.", **_AT
                )
        for name in ("after_token_ids", "opening_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidRequest(
                "structured_outputs has whitespace_pattern and disable_any_whitespace; give one.",
                **_AT,
            )

    @property
    def kind(self) -> str:
        """The name of the one constraint."""
        return next(name for name in STRUCTURED_KINDS if getattr(self, name) not in (None, False))

    def as_dict(self) -> dict[str, Any]:
        """The fields that are not their defaults, as values for JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        kept = {name: value for name, value in values.items() if value not in (None, False, ())}
        return {name: dict(v) if isinstance(v, Mapping) else v for name, v in kept.items()}


STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_AT: Mapping[str, Any] = {"param": "structured_outputs"}
_OBJECT = (str, Mapping), "an object or its JSON text"
_STRUCTURED_TYPES: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
    ("json", *_OBJECT),
    ("regex", str, "a string"),
    ("choice", (list, tuple), "a list of strings"),
    ("grammar", str, "a string"),
    ("json_object", bool, "true or false"),
    ("structural_tag", *_OBJECT),
    ("disable_any_whitespace", bool, "true or false"),
    ("disable_additional_properties", bool, "true or false"),
    ("whitespace_pattern", str, "a string"),
    ("after_token_ids", (list, tuple), "a list of token ids"),
    ("opening_token_ids", (list, tuple), "a list of token ids"),
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample. Names and defaults are vLLM's; ours are the fields about drafts."""

    n: int = 1  # sequences of each prompt; their seeds are seed, seed + 1, ...
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # keep the likeliest tokens with this much probability
    top_k: int = 0  # keep this many tokens; 0 or -1: all
    min_p: float = 0.0  # keep tokens with this share of the likeliest one's probability
    presence_penalty: float = 0.0  # subtracted once from tokens of the output
    frequency_penalty: float = 0.0  # subtracted for each occurrence in the output
    repetition_penalty: float = 1.0  # divides positive logits of tokens of prompt and output
    logit_bias: Mapping[int, float] | None = None  # token id -> what is added
    bad_words: Sequence[str] | None = None  # texts that must not come
    allowed_token_ids: Sequence[int] | None = None  # no other tokens may come
    min_tokens: int = 0  # no stop before this many tokens
    max_tokens: int | None = 16  # None: up to the model's length
    stop: str | Sequence[str] | None = None  # texts that end the output
    stop_token_ids: Sequence[int] | None = None  # tokens that end the output
    include_stop_str_in_output: bool = False  # show the stop in the text
    ignore_eos: bool = False  # the model's end tokens do not end the output
    seed: int | None = None  # None: one is chosen
    logprobs: int | None = None  # show this many most likely tokens, and the chosen one
    prompt_logprobs: int | None = None  # the same for the prompt
    skip_special_tokens: bool = True  # leave them out of the text
    detokenize: bool = True  # False: token ids only
    # Names of processors loaded with --logits-processors; they read `extra_args`.
    logits_processors: Sequence[str] | None = None
    extra_args: Mapping[str, Any] | None = None
    # Most draft tokens to verify per step for this request; None: as the engine, 0: none.
    num_speculative_tokens: int | None = None
    # The same as {"num_speculative_tokens": ...}; "method" is the loaded drafter's, or "none".
    # For benchmarks with synthetic acceptance: "synthetic_acceptance_rates".
    speculative: Mapping[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | None = None  # what the output must look like

    def __new__(cls, **values: Any) -> SamplingParams:
        # Before the generated __init__, whose TypeError would not suggest a name.
        known = cls.__dataclass_fields__
        for name in values:
            if name not in known:
                hint = nearest(name, known, cutoff=0.8)
                message = f"Unknown sampling parameter {shown(name)}.{hint}"
                raise InvalidRequest(message, param=name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        # Normalise here, so that all users find tuples and dicts.
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "bad_words", tuple(self.bad_words or ()))
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors or ()))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if isinstance(self.structured_outputs, Mapping):
            structured = StructuredOutputsParams(**self.structured_outputs)
            object.__setattr__(self, "structured_outputs", structured)
        if self.speculative is not None:
            k = _number_of_drafts(self.speculative, self.num_speculative_tokens)
            object.__setattr__(self, "num_speculative_tokens", k)
            object.__setattr__(self, "speculative", dict(self.speculative))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self.check_values()
        check_count("stop_token_ids", self.stop_token_ids, MAX_OWN_STOP_TOKEN_IDS)

    def check_values(self) -> None:
        """Raise InvalidRequest for a value that no model and no engine could serve."""
        values = self.__dict__
        for name, low, high in _LIMITS:
            value = values[name]
            if value is None and name in _OPTIONAL:
                continue
            # The short way for a valid number: the engine's loop checks every request.
            if not (type(value) in _NUMBERS and low <= value <= high) or name in _ABOVE:
                _check_number(name, value, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}.",
                param="min_tokens",
            )
        _check_entries(values)
        for word in self.bad_words or ():
            if not 0 < len(word) <= MAX_BAD_WORD_CHARS:
                raise InvalidRequest(
                    f"bad_words holds a word of {len(word)} characters; it must have at least 1 "
                    f"and at most {MAX_BAD_WORD_CHARS}.",
                    param="bad_words",
                )
        if self.speculative is not None:
            _number_of_drafts(self.speculative, self.num_speculative_tokens)
        if any(not s for s in self.stop_strings):
            raise InvalidRequest("stop holds an empty string; remove it.", param="stop")
        if self.stop_strings and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True.", param="stop")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids is empty, so no token could ever be sampled.",
                param="allowed_token_ids",
            )
        for token, value in (self.logit_bias or {}).items():
            _check_number(f"logit_bias[{token}]", value, -100.0, 100.0, param="logit_bias")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop  # type: ignore[return-value]  # normalised in __post_init__

    @property
    def synthetic_acceptance_rates(self) -> Sequence[float] | None:
        """The request's own, for benchmarks; see SpeculativeConfig."""
        return (self.speculative or {}).get("synthetic_acceptance_rates")

    def replace(self, **changes: Any) -> SamplingParams:
        return replace(self, **changes)

    def replace_unchecked(self, **changes: Any) -> SamplingParams:
        """As `replace`, without checks and without copies of the tables."""
        copy = object.__new__(SamplingParams)
        copy.__dict__.update(self.__dict__, **changes)
        return copy


# Sequences of integers, and keys that are integers, are token ids.
TOKEN_ID_PARAMS = tuple(
    f.name
    for f in fields(SamplingParams)
    if str(f.type).startswith(("Sequence[int]", "Mapping[int"))
)


def _number_of_drafts(speculative: object, k: int | None) -> int | None:
    """num_speculative_tokens from both of its places."""
    if not isinstance(speculative, Mapping):
        raise InvalidRequest(
            f"speculative must be an object, got {shown(speculative)}.", param="speculative"
        )
    known = ("method", "num_speculative_tokens", "synthetic_acceptance_rates")
    for name in speculative:
        if name not in known:
            raise InvalidRequest(
                f"Unknown field {shown(name)} of speculative; it has {', '.join(known)}.",
                param=f"speculative.{name}",
            )
    method, own, rates = (speculative.get(name) for name in known)
    check_rates(rates)
    if method is not None and not isinstance(method, str):
        raise InvalidRequest(
            f"speculative.method must be a string, got {shown(method)}.", param="speculative.method"
        )
    asked = [n for n in (own, k, 0 if method == "none" else None) if n is not None]
    if any(n != asked[0] for n in asked):
        raise InvalidRequest(
            f"speculative asks for {shown(own)} drafts with method {shown(method)}, and "
            f"num_speculative_tokens is {shown(k)}; send one of them.",
            param="speculative",
        )
    return asked[0] if asked else None


def check_rates(rates: object) -> None:
    if rates is None:
        return
    is_list = isinstance(rates, list | tuple) and len(rates) > 0
    values = list(rates) if isinstance(rates, list | tuple) else []
    is_valid = is_list and all(type(r) in _NUMBERS and 0 <= r <= 1 for r in values)
    if not is_valid or any(b > a for a, b in pairwise(values)):
        raise InvalidRequest(
            "speculative.synthetic_acceptance_rates must be a list of numbers between 0 and 1, "
            f"none above the one before it; got {shown(rates)}.",
            param="speculative.synthetic_acceptance_rates",
        )


_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_NUMBERS = (int, float)
_LIMITS: tuple[tuple[str, float, float], ...] = (  # both ends are allowed, except in _ABOVE
    ("n", 1, 128),
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("top_k", 0, _INT32),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 100.0),
    ("min_tokens", 0, _INT32),
    ("max_tokens", 1, _INT32),
    ("seed", -_INT64 - 1, _INT64),
    ("logprobs", 0, _INT32),
    ("prompt_logprobs", 0, _INT32),
    ("num_speculative_tokens", 0, _INT32),
)
_ABOVE = frozenset({"top_p", "repetition_penalty"})  # the low end is not allowed
_OPTIONAL = frozenset(
    {"max_tokens", "seed", "logprobs", "prompt_logprobs", "num_speculative_tokens"}
)


def _check_number(
    name: str, value: Any, low: float, high: float, *, param: str | None = None
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, got {shown(value)}.", param=param or name)
    is_above = name in _ABOVE
    if not isfinite(value) or value < low or value > high or (is_above and value == low):
        edge = "above" if is_above else "at least"
        raise InvalidRequest(
            f"{name} is {value}; it must be {edge} {low} and at most {high}.", param=param or name
        )


def _check_entries(values: Mapping[str, Any]) -> None:
    for name, most in MAX_ENTRIES.items():
        check_count(name, values[name], most)


def check_count(name: str, values: Sized | None, limit: int) -> None:
    if values is not None and len(values) > limit:
        raise InvalidRequest(
            f"{name} has {len(values)} entries; at most {limit} are kept.", param=name
        )


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate, as the engine gets it.

    The front has tokenised, checked, drawn the seed and split a request of n into n of these.
    """

    uid: int  # unique in the life of the engine, ascending in order of arrival
    prompt_token_ids: Sequence[int]
    params: SamplingParams  # seed and max_tokens are set; n is ignored
    eos_token_ids: tuple[int, ...] = ()  # empty under ignore_eos
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0  # lower runs first; only with --scheduling-policy priority
    arrival_s: float = 0.0  # time.monotonic of the front process
    # What an engine before this one has generated. The request goes on after these tokens, as it
    # does after a preemption; lengths, penalties and constraints count them as output.
    output_token_ids: Sequence[int] = ()

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt and what was generated before."""
        if not len(self.output_token_ids):
            return self.prompt_token_ids
        return [*self.prompt_token_ids, *self.output_token_ids]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability under the model's raw distribution, and its rank from 1."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the n sequences of a request."""

    index: int  # 0 to n - 1
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # for each token: id -> logprob
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: int | str | None = None  # the stop id or stop text that ended it


@dataclass(slots=True)
class RequestMetrics:
    """Times are time.monotonic seconds of the front process; counts are sums over the n sequences.

    num_accepted_tokens counts drafts only, never the bonus token. num_forced_tokens are those of
    them for which a grammar left no other choice.
    """

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    num_steps: int = 0
    num_draft_tokens: int = 0  # drafts that were verified
    num_accepted_tokens: int = 0
    num_forced_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0
    # (drafts verified, drafts accepted) of each step with drafts, if they are collected.
    spec_steps: list[tuple[int, int]] | None = None

    def count_drafts(self, num_drafts: int, num_accepted: int, num_forced: int) -> None:
        """A step verified drafts."""
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.num_forced_tokens += num_forced
        if self.spec_steps is not None:
            self.spec_steps.append((num_drafts, num_accepted))


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
