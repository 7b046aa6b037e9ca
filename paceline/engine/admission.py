"""Checks a request against the model and resolves what it leaves open, before anything is sent.

Owns the limits, the seeds and the words turned into token ids; never queues and never clamps in
silence: what cannot be served as written raises, and `max_tokens` past the room ends in "length".
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from paceline.config import EngineConfig
from paceline.engine.front import Front
from paceline.errors import InvalidRequest, PromptTooLong, context_length, cut, nearest, shown
from paceline.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    EngineRequest,
    SamplingParams,
)
from paceline.step import RunnerInfo

# Slots keep this many end-of-sequence ids apart; a model with more has the rest among its stop ids.
_MAX_EOS = 8
_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Checked:
    """A request that can be served; everything but seed and uid is resolved."""

    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    bad_word_ids: tuple[tuple[int, ...], ...]


class Admission:
    def __init__(self, config: EngineConfig, info: RunnerInfo, front: Front) -> None:
        self._info = info
        self._tokenizer = front.tokenizer
        self._eos = front.eos_token_ids
        self._max_logprobs = config.model.max_logprobs
        self._seed = config.model.seed
        self._processors = config.model.logits_processors
        self._bad_word_ids = lru_cache(maxsize=64)(self._tokenize_bad_words)
        self._latest: tuple[SamplingParams, Checked] | None = None  # what `_resolve` was asked last

    # ---- checks

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Checked:
        """Raise InvalidRequest or PromptTooLong, or return what the engine will be given."""
        prompt = self._check_prompt(prompt_token_ids)
        room = self._info.max_model_len - len(prompt)
        if params.min_tokens > room:
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens}, but a prompt of {len(prompt)} tokens leaves "
                f"room for {room} (max_model_len is {self._info.max_model_len}).",
                param="min_tokens",
            )
        # All prompts of a request share one object: its tables are looked at once.
        if self._latest is None or self._latest[0] is not params:
            self._latest = params, self._resolve(params)
        resolved = self._latest[1]
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        return replace(
            resolved,
            prompt_token_ids=prompt,
            params=resolved.params.replace_unchecked(max_tokens=most),
        )

    def _resolve(self, params: SamplingParams) -> Checked:
        """What does not depend on the prompt."""
        self._check_counts(params)
        self._check_token_tables(params)
        eos = () if params.ignore_eos else self._eos
        bad_word_ids = self._bad_word_ids(tuple(params.bad_words or ()))
        _check_any_left(params, eos, bad_word_ids)
        return Checked(
            prompt_token_ids=[],
            params=params.replace_unchecked(
                stop_token_ids=(*(params.stop_token_ids or ()), *eos[_MAX_EOS:]),
                logits_processors=self._resolve_processors(params.logits_processors or ()),
                # Text is the front's business; in the engine these would only cost bytes.
                stop=(),
                bad_words=(),
            ),
            eos_token_ids=eos[:_MAX_EOS],
            bad_word_ids=bad_word_ids,
        )

    def _check_prompt(self, prompt_token_ids: Sequence[int]) -> list[int]:
        limit = self._info.max_model_len
        if len(prompt_token_ids) >= limit:  # before millions of ids are looked at
            raise PromptTooLong(
                f"{context_length(limit)} The prompt has {len(prompt_token_ids)} tokens and may "
                f"have {limit - 1}. Shorten it or raise --max-model-len.",
                param="prompt",
            )
        try:
            ids = np.asarray(prompt_token_ids)
        except (ValueError, OverflowError):
            ids = np.empty((0, 0), np.float64)
        if ids.ndim == 1 and not len(ids):
            raise InvalidRequest("The prompt is empty; give at least one token.", param="prompt")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidRequest("prompt_token_ids must be a list of integers.", param="prompt")
        self._check_range("prompt token id", (int(ids.min()), int(ids.max())), "prompt")
        # A window of drafts needs room behind the newest token.
        pool = self._info.num_pages * self._info.page_size
        capacity = pool - self._info.max_k - self._info.draft_lookahead
        if pool < limit and len(ids) > capacity:
            raise PromptTooLong(
                f"{context_length(limit)} The prompt has {len(ids)} tokens, but the KV cache has "
                f"room for {capacity}. Shorten it or raise --kv-cache-memory-bytes.",
                param="prompt",
            )
        return ids.tolist()  # type: ignore[no-any-return]

    def _check_counts(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            limit = min(self._max_logprobs, self._info.vocab_size)
            if asked is not None and asked > limit:
                raise InvalidRequest(
                    f"{name} is {asked}; this server gives at most {limit} (--max-logprobs).",
                    param=name,
                )
        k = params.num_speculative_tokens
        if k is not None and k > self._info.max_k:
            drafter = (
                f"the engine verifies at most {self._info.max_k} drafts"
                if self._info.max_k
                else "the engine runs without a drafter (--speculative-config)"
            )
            raise InvalidRequest(
                f"num_speculative_tokens is {k}, but {drafter}.", param="num_speculative_tokens"
            )
        if params.detokenize and params.stop_strings and self._tokenizer is None:
            raise InvalidRequest(
                "stop strings need a tokenizer; this engine runs with skip_tokenizer_init. "
                "Use stop_token_ids.",
                param="stop",
            )
        if params.extra_args is not None:
            try:
                json.dumps(dict(params.extra_args))
            except (TypeError, ValueError) as error:
                raise InvalidRequest(
                    f"extra_args must hold JSON values only ({cut(str(error))}).",
                    param="extra_args",
                ) from None

    def _check_token_tables(self, params: SamplingParams) -> None:
        self._check_range("stop token id", params.stop_token_ids or (), "stop_token_ids")
        self._check_range("logit_bias token id", params.logit_bias or (), "logit_bias")
        allowed, vocab_size = params.allowed_token_ids or (), self._info.vocab_size
        if len(allowed) > vocab_size:
            raise InvalidRequest(
                f"allowed_token_ids has {len(allowed)} entries; the vocabulary has {vocab_size}.",
                param="allowed_token_ids",
            )
        self._check_range("allowed token id", allowed, "allowed_token_ids")

    def _check_range(self, what: str, ids: Iterable[Any], param: str) -> None:
        vocab_size = self._info.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise InvalidRequest(f"{what} {shown(token)} is not an integer.", param=param)
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"{what} {token} is out of range; the vocabulary has {vocab_size} tokens "
                    f"(0 to {vocab_size - 1}).",
                    param=param,
                )

    def _resolve_processors(self, names: Sequence[str]) -> tuple[str, ...]:
        """The loaded processors a request names, by `module:Class` or by the class alone."""
        return tuple(self._resolve_processor(name) for name in names)

    def _resolve_processor(self, name: str) -> str:
        matches = [p for p in self._processors if name in (p, p.rpartition(":")[2])]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise InvalidRequest(
                f"logits processor {shown(name)} is ambiguous: {', '.join(matches)}. Give "
                "module:Class.",
                param="logits_processors",
            )
        hint = nearest(name, self._processors)
        loaded = ", ".join(self._processors) or "none"
        raise InvalidRequest(
            f"Unknown logits processor {shown(name)}.{hint} Loaded with --logits-processors: "
            f"{loaded}.",
            param="logits_processors",
        )

    # ---- words

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
                    found[_fitting(form, ids)] = None
        if len(found) > MAX_BAD_WORDS:
            raise InvalidRequest(
                f"bad_words come to {len(found)} token sequences; {MAX_BAD_WORDS} can be kept.",
                param="bad_words",
            )
        return tuple(found)

    # ---- what the engine gets

    def requests(
        self, checked: Checked, first_uid: int, *, priority: int, arrival_s: float
    ) -> list[EngineRequest]:
        """One request per sequence of n. Sequence i samples with seed + i.

        A request without a seed gets one drawn from the engine's seed and its own number, so that
        the same program asks twice for the same samples, and the next request for other ones.
        """
        params = checked.params
        seed = params.seed if params.seed is not None else _mix(self._seed, first_uid)
        prompt = array("i", checked.prompt_token_ids)  # packed once for all sequences
        requests = []
        for i in range(params.n):
            own = params.replace_unchecked(
                n=1,
                seed=_as_int64(seed + i),
                # The prompt is the same n times over: one of them reports it.
                prompt_logprobs=params.prompt_logprobs if i == 0 else None,
            )
            requests.append(
                EngineRequest(
                    uid=first_uid + i,
                    prompt_token_ids=prompt,
                    params=own,
                    eos_token_ids=checked.eos_token_ids,
                    bad_word_ids=checked.bad_word_ids,
                    priority=priority,
                    arrival_s=arrival_s,
                )
            )
        return requests


def _check_any_left(
    params: SamplingParams, eos: tuple[int, ...], bad_word_ids: Sequence[tuple[int, ...]]
) -> None:
    """Raise when the allowed tokens are all forbidden by the request's other fields.

    Bad words of several tokens depend on the text: where they leave none, the request ends there.
    """
    if params.allowed_token_ids is None:
        return
    allowed = set(params.allowed_token_ids)
    words = {ids[0] for ids in bad_word_ids if len(ids) == 1}
    ends = {*eos, *(params.stop_token_ids or ())} if params.min_tokens > 0 else set()
    if allowed <= words | ends:
        rules = {"bad_words": words, "min_tokens (no token may end the output before)": ends}
        reasons = [name for name, ids in rules.items() if allowed & ids]
        raise InvalidRequest(
            f"allowed_token_ids allows {shown(sorted(allowed))} only, and these are forbidden by "
            f"{' and '.join(reasons)}: no token could be sampled.",
            param="allowed_token_ids",
        )


def _fitting(form: str, ids: tuple[int, ...]) -> tuple[int, ...]:
    if len(ids) > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(
            f"bad word {shown(form)} is {len(ids)} tokens long; {MAX_BAD_WORD_TOKENS} can be kept.",
            param="bad_words",
        )
    return ids


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
