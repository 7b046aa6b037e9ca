"""Turns what a user asks for into what the engine is sent, before anything is sent.

Owns seeds, room for output, and bad words as token ids. `checks.py` says what can be served; what
cannot be served as written raises, and `max_tokens` past the room ends in "length".
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from paceline.config import EngineConfig
from paceline.engine.checks import RequestChecks, check_bad_word
from paceline.engine.front import Front
from paceline.errors import InvalidRequest, cut, shown
from paceline.request import MAX_EOS_TOKEN_IDS, EngineRequest, SamplingParams
from paceline.step import RunnerInfo

_U64 = (1 << 64) - 1


class Admission:
    def __init__(self, config: EngineConfig, info: RunnerInfo, front: Front) -> None:
        self._checks = RequestChecks(config, info)
        self._max_model_len = info.max_model_len
        self._tokenizer = front.tokenizer
        # An id outside the vocabulary is never sampled.
        self._eos = tuple(i for i in front.eos_token_ids if 0 <= i < info.vocab_size)
        self._seed = config.model.seed
        self._processors = config.model.logits_processors
        self._bad_word_ids = lru_cache(maxsize=64)(self._tokenize_bad_words)
        self._latest: tuple[SamplingParams, EngineRequest] | None = None  # of `_resolve`

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> EngineRequest:
        """Raise InvalidRequest or PromptTooLong, or return what `split` makes requests of."""
        prompt: list[int] = self._checks.check_prompt(prompt_token_ids).tolist()
        room = self._max_model_len - len(prompt)
        if params.min_tokens > room:
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens}, but a prompt of {len(prompt)} tokens leaves "
                f"room for {room} (max_model_len is {self._max_model_len}).",
                param="min_tokens",
            )
        # All prompts of a request share one object: its tables are checked once.
        if self._latest is None or self._latest[0] is not params:
            self._latest = params, self._resolve(params)
        resolved = self._latest[1]
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        resolved_params = resolved.params.replace_unchecked(max_tokens=most)
        return replace(resolved, prompt_token_ids=prompt, params=resolved_params)

    def _resolve(self, params: SamplingParams) -> EngineRequest:
        """The request without its prompt."""
        self._check_text(params)
        eos = () if params.ignore_eos else self._eos
        request = EngineRequest(
            uid=0,
            prompt_token_ids=(),
            params=params.replace_unchecked(
                # A slot keeps the first end-of-sequence ids apart; the rest become stop ids.
                stop_token_ids=(*(params.stop_token_ids or ()), *eos[MAX_EOS_TOKEN_IDS:]),
                logits_processors=tuple(map(self._full_name, params.logits_processors or ())),
                # Only the front works with text.
                stop=(),
                bad_words=(),
            ),
            eos_token_ids=eos[:MAX_EOS_TOKEN_IDS],
            bad_word_ids=self._bad_word_ids(tuple(params.bad_words or ())),
        )
        self._checks.check_params(request)
        return request

    def _check_text(self, params: SamplingParams) -> None:
        if params.detokenize and params.stop_strings and self._tokenizer is None:
            raise InvalidRequest(
                "stop strings need a tokenizer; this engine runs with skip_tokenizer_init. "
                "Use stop_token_ids.",
                param="stop",
            )
        structured, extra = params.structured_outputs, params.extra_args
        if structured is not None and self._tokenizer is None:
            raise InvalidRequest(
                "structured_outputs need a tokenizer; this engine runs with skip_tokenizer_init.",
                param="structured_outputs",
            )
        _check_json("structured_outputs", None if structured is None else structured.as_dict())
        _check_json("extra_args", None if extra is None else dict(extra))

    def _full_name(self, name: str) -> str:
        """A loaded processor by `module:Class` or by the class alone."""
        matches = [p for p in self._processors if name in (p, p.rpartition(":")[2])]
        if len(matches) > 1:
            raise InvalidRequest(
                f"logits processor {shown(name)} is ambiguous: {', '.join(matches)}. Give "
                "module:Class.",
                param="logits_processors",
            )
        return matches[0] if matches else name

    def _tokenize_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Each word as it begins a text and as it follows a space: most tokenizers differ there."""
        if not words:
            return ()
        if self._tokenizer is None:
            raise InvalidRequest(
                "bad_words need a tokenizer; this engine runs with skip_tokenizer_init.",
                param="bad_words",
            )
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip(" ")
            forms = [bare, f" {bare}"] if bare else [word]
            encoded = [tuple(self._tokenizer.encode(f, add_special_tokens=False)) for f in forms]
            for form, ids in zip(forms, encoded, strict=True):
                # A form that only puts a token before another one is covered by that one.
                if ids and not any(o != ids and ids[-len(o) :] == o for o in encoded if o):
                    check_bad_word(form, ids)
                    found[ids] = None
        return tuple(found)

    def split(
        self, request: EngineRequest, first_uid: int, *, priority: int, arrival_s: float
    ) -> list[EngineRequest]:
        """One request for each of the n sequences. Sequence i samples with seed + i.

        A request without a seed gets one from the engine's seed and its uid. So a program that runs
        twice gets the same samples, and two requests of one run get different ones.
        """
        params = request.params
        seed = params.seed if params.seed is not None else _mix(self._seed, first_uid)
        prompt = array("i", request.prompt_token_ids)  # packed once for all sequences
        requests = []
        for i in range(params.n):
            own = params.replace_unchecked(
                n=1,
                seed=_as_int64(seed + i),
                # All sequences have the same prompt: the first reports it.
                prompt_logprobs=params.prompt_logprobs if i == 0 else None,
            )
            requests.append(
                replace(
                    request,
                    uid=first_uid + i,
                    prompt_token_ids=prompt,
                    params=own,
                    priority=priority,
                    arrival_s=arrival_s,
                )
            )
        return requests


def _check_json(name: str, values: dict[str, Any] | None) -> None:
    try:
        json.dumps(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{name} must hold JSON values only ({cut(str(error))}).", param=name
        ) from None


def _as_int64(value: int) -> int:
    value &= _U64
    return value - (1 << 64) if value >> 63 else value


def _mix(seed: int, count: int) -> int:
    """64 bits from (seed, count): two rounds of the splitmix64 finaliser."""
    x = (seed * 0x9E3779B97F4A7C15 + count) & _U64
    for _ in range(2):
        x = (x + 0x9E3779B97F4A7C15) & _U64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _U64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _U64
        x ^= x >> 31
    return x
