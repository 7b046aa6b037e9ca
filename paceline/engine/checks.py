"""The complete check of a request, in one place: prompt, parameters and token tables.

The front checks a request before it sends it. The engine checks it again when it arrives: a bad
message ends one request and never the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.config import EngineConfig
from paceline.errors import InvalidRequest, PromptTooLong, context_length, nearest, shown
from paceline.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_EOS_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
    TOKEN_ID_PARAMS,
    EngineRequest,
    SamplingParams,
    check_count,
)
from paceline.speculation import METHOD_ALIASES
from paceline.step import RunnerInfo


class RequestChecks:
    """What this model and engine can serve. Methods raise InvalidRequest or PromptTooLong."""

    def __init__(self, config: EngineConfig, info: RunnerInfo) -> None:
        self._info = info
        self._max_logprobs = min(config.model.max_logprobs, info.vocab_size)
        self._processors = config.model.logits_processors
        spec = config.speculative
        self._is_synthetic = spec is not None and spec.rejection_sample_method == "synthetic"
        is_looked_up = spec is not None and spec.host_method is not None
        self._max_k = info.window_k if is_looked_up else info.max_k

    def check(self, request: EngineRequest) -> None:
        self.check_prompt(request.token_ids)
        request.params.check_values()
        self.check_params(request)

    def check_prompt(self, prompt_token_ids: Sequence[int]) -> npt.NDArray[np.integer[Any]]:
        limit = self._info.max_model_len
        if len(prompt_token_ids) >= limit:  # before an array of millions of ids is made
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
        lowest, highest = int(np.minimum.reduce(ids)), int(np.maximum.reduce(ids))
        if lowest < 0 or highest >= self._info.vocab_size:
            self._check_ids("prompt token id", (lowest, highest), "prompt")
        # A window of drafts needs room behind the newest token.
        pool = self._info.num_pages * self._info.page_size
        capacity = pool - self._info.max_k - self._info.draft_lookahead
        if pool < limit and len(ids) > capacity:
            raise PromptTooLong(
                f"{context_length(limit)} The prompt has {len(ids)} tokens, but the KV cache has "
                f"room for {capacity}. Shorten it or raise --kv-cache-memory-bytes.",
                param="prompt",
            )
        return ids

    def check_params(self, request: EngineRequest) -> None:
        """Everything but the prompt; the values of the parameters alone were checked before."""
        self._check_counts(request.params)
        self._check_tables(request)
        for name in request.params.logits_processors or ():
            if name not in self._processors:
                loaded = ", ".join(self._processors) or "none"
                raise InvalidRequest(
                    f"Unknown logits processor {shown(name)}.{nearest(name, self._processors)} "
                    f"Loaded with --logits-processors: {loaded}.",
                    param="logits_processors",
                )

    def _check_counts(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and asked > self._max_logprobs:
                raise InvalidRequest(
                    f"{name} is {asked}; this server gives at most {self._max_logprobs} "
                    "(--max-logprobs).",
                    param=name,
                )
        method = (params.speculative or {}).get("method")
        loaded = (*self._info.draft_methods, "none")
        if method is not None and METHOD_ALIASES.get(method, method) not in loaded:
            raise InvalidRequest(
                f"speculative.method is {shown(method)}; use a loaded drafter or 'none': "
                f"{', '.join(loaded)}.",
                param="speculative.method",
            )
        k, max_k = params.num_speculative_tokens, self._max_k
        rates = params.synthetic_acceptance_rates
        if rates is not None and (not self._is_synthetic or len(rates) != max_k):
            raise InvalidRequest(
                f"speculative.synthetic_acceptance_rates has {len(rates)} entries; it needs a "
                'server with "rejection_sample_method": "synthetic", and one entry for each of '
                f"its {max_k} drafts.",
                param="speculative.synthetic_acceptance_rates",
            )
        if k is not None and k > max_k:
            drafter = (
                f"the engine verifies at most {max_k} drafts"
                if max_k
                else "the engine runs without a drafter (--speculative-config)"
            )
            raise InvalidRequest(
                f"num_speculative_tokens is {k}, but {drafter}.", param="num_speculative_tokens"
            )

    def _check_tables(self, request: EngineRequest) -> None:
        """Token ids, and that every table fits its row of a slot."""
        params, words = request.params, request.bad_word_ids
        check_count("eos_token_ids", request.eos_token_ids, MAX_EOS_TOKEN_IDS)
        self._check_ids("end-of-sequence token id", request.eos_token_ids, "eos_token_ids")
        check_count("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if params.structured_outputs is not None:
            for name in ("after_token_ids", "opening_token_ids"):
                ids = getattr(params.structured_outputs, name)
                self._check_ids(f"{name} token id", ids, "structured_outputs")
        allowed, vocab_size = params.allowed_token_ids or (), self._info.vocab_size
        if len(allowed) > vocab_size:
            raise InvalidRequest(
                f"allowed_token_ids has {len(allowed)} entries; the vocabulary has {vocab_size}.",
                param="allowed_token_ids",
            )
        for name in TOKEN_ID_PARAMS:
            self._check_ids(f"{name}: token id", getattr(params, name) or (), name)
        if len(words) > MAX_BAD_WORDS:
            raise InvalidRequest(
                f"bad_words come to {len(words)} token sequences; {MAX_BAD_WORDS} can be kept.",
                param="bad_words",
            )
        for word in words:
            check_bad_word(word, word)
            self._check_ids("bad word token id", word, "bad_words")
        if params.allowed_token_ids is not None:
            _check_any_left(set(allowed), request)

    def _check_ids(self, what: str, ids: Iterable[Any], param: str) -> None:
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


def check_bad_word(word: object, ids: Sequence[int]) -> None:
    if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(
            f"bad word {shown(word)} is {len(ids)} tokens long; {MAX_BAD_WORD_TOKENS} can be kept.",
            param="bad_words",
        )


def _check_any_left(allowed: set[int], request: EngineRequest) -> None:
    """Raise if the allowed tokens are all forbidden by the request's other fields.

    Bad words of several tokens depend on the text. If they forbid all tokens at some position, the
    request ends there.
    """
    params = request.params
    words = {ids[0] for ids in request.bad_word_ids if len(ids) == 1}
    ends = {*request.eos_token_ids, *(params.stop_token_ids or ())} if params.min_tokens else set()
    if allowed <= words | ends:
        rules = {"bad_words": words, "min_tokens (no token may end the output before)": ends}
        reasons = [name for name, ids in rules.items() if allowed & ids]
        raise InvalidRequest(
            f"allowed_token_ids allows {shown(sorted(allowed))} only, and these are forbidden by "
            f"{' and '.join(reasons)}: no token could be sampled.",
            param="allowed_token_ids",
        )
