"""Turns rows of step messages into the output of a sequence: text, tokens, logprobs.

Owns stop strings. Output ends with the token that completes one; later tokens of the same row are
left out of text, tokens and logprobs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.errors import PacelineError
from paceline.request import Done, EngineRequest, Logprob, RequestMetrics, SamplingParams
from paceline.step import TokenLogprobs
from paceline.text.detokenizer import Detokenizer
from paceline.text.tokenizer import Tokenizer

TokenTable = dict[int, Logprob]
# An accepted draft, an accepted draft for which a grammar left no choice, or drawn by the sampler.
TokenSource = Literal["draft", "forced", "drawn"]


@dataclass(slots=True)
class Delta:
    """New output of one sequence. Only its last delta has a `finish_reason`."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenTable] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    # Of the first delta of sequence 0, if requested: one entry per prompt token, the first None.
    prompt_logprobs: list[TokenTable | None] | None = None
    sources: list[TokenSource] | None = None  # of the tokens, if requested


@dataclass(slots=True, eq=False)
class Generation:
    """One request in the front. Its n sequences share the id, the prompt and the metrics.

    `error` is the reason if a sequence ended with finish_reason "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    on_deltas: Callable[[list[Delta]], None]
    metrics: RequestMetrics
    finished: bool = False
    is_aborted: bool = False  # by the front: its sink is not called again
    was_admitted: bool = False  # a sequence of it has left the queue
    error: PacelineError | None = None
    open_uids: set[int] = field(default_factory=set)
    on_error: Callable[[PacelineError], None] | None = None  # told if `on_deltas` raised
    replica: int | None = None  # the one that the request names
    wants_sources: bool = False  # its deltas say where each token came from

    def drop_sinks(self) -> None:
        """It has ended. Its sinks refer to their owner, which refers to this object: without this,
        both and the prompt would stay in memory until Python collects garbage, which is rare."""
        self.on_deltas, self.on_error = _ignore, None


def _ignore(deltas: list[Delta]) -> None:
    """The sink of a request that has ended."""


class SequenceOutput:
    """The output of one sequence. `finished` is set with its finish reason.

    Keeps the request and its tokens, so that another engine can go on with it.
    """

    # Slots: a front has tens of thousands of these, and each step reads others of them.
    __slots__ = (
        "_detokenizer", "_eos", "_num_fruitless", "_prompt_logprobs", "_request", "_token_ids",
        "_tokenizer", "finished", "generation", "index", "was_admitted",
    )  # fmt: skip

    def __init__(
        self,
        generation: Generation,
        index: int,
        request: EngineRequest,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        params = generation.params
        self.generation = generation
        self.index = index
        self.finished = False
        self.was_admitted = False
        self._request = request
        self._token_ids = array("i")
        self._num_fruitless = 0  # engines in a row that ended before the next token
        self._eos = eos_token_ids
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer: Detokenizer | None = None
        if self._tokenizer is not None:
            self._detokenizer = Detokenizer(
                self._tokenizer,
                prompt_ids=generation.prompt_token_ids,
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
        wants_prompt = index == 0 and params.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenTable | None] | None = [None] if wants_prompt else None

    def all_tokens(self) -> list[int]:
        return [*self.generation.prompt_token_ids, *self._token_ids]

    def engine_request(self) -> EngineRequest:
        """The request for an engine that does not have it: it goes on after the tokens so far."""
        request = self._request
        if not self._token_ids:
            return request
        params = request.params
        if self._prompt_logprobs is None:  # delivered
            params = params.replace_unchecked(prompt_logprobs=None)
        return replace(request, params=params, output_token_ids=self._token_ids[:])

    def lose_engine(self, *, may_have_run: bool) -> int:
        """The engine has ended. Returns how many in a row have ended under this sequence before
        they gave it a token."""
        has_gained = len(self._token_ids) > len(self._request.output_token_ids)
        self._request = self.engine_request()
        self._num_fruitless = 0 if has_gained else self._num_fruitless + may_have_run
        if self._prompt_logprobs is not None:
            self._prompt_logprobs = [None]  # they come again from the start
        return self._num_fruitless

    def take_prompt_logprobs(self, entry: TokenLogprobs) -> None:
        """The next prompt positions. They are in the delta of the first tokens."""
        if self._prompt_logprobs is not None:
            top = self.generation.params.prompt_logprobs or 0
            self._prompt_logprobs.extend(self._tables(entry, top, len(entry.rank)))

    def take(self, token_ids: list[int], done: Done, logprobs: TokenLogprobs | None) -> Delta:
        """One row of a step: its new tokens and whether it ended. A request may end without
        tokens; then text that was held back for a stop string is in the delta."""
        self._token_ids.extend(token_ids)
        text, count, stop_string = self._to_text(token_ids, done)
        delta = Delta(self.index, text, token_ids[:count])
        if stop_string is not None:
            done = Done.STOP_STRING
            delta.stop_reason = stop_string
        elif done is Done.STOP_TOKEN and token_ids and token_ids[-1] not in self._eos:
            delta.stop_reason = token_ids[-1]
        if self.generation.params.logprobs is not None:
            delta.logprobs = []
            if logprobs is not None:
                delta.logprobs = self._tables(logprobs, self.generation.params.logprobs, count)
        if done is not Done.RUNNING:
            delta.finish_reason = done.finish_reason
            self.finished = True
        self._attach_prompt_logprobs(delta)
        return delta

    def name_sources(self, delta: Delta, num_accepted: int, num_forced: int) -> None:
        """Say where the tokens of a row came from, if the request asks for it. Accepted drafts come
        first; the forced ones come before others."""
        if self.generation.wants_sources:
            every: list[TokenSource] = ["forced"] * num_forced
            every += ["draft"] * (num_accepted - num_forced)
            every += ["drawn"] * (len(delta.token_ids) - num_accepted)
            delta.sources = every[: len(delta.token_ids)]

    def _to_text(self, token_ids: list[int], done: Done) -> tuple[str, int, str | None]:
        """(text to show, tokens that count, stop string found)."""
        if self._detokenizer is None:
            return "", len(token_ids), None
        shown = token_ids
        shows_stop = self.generation.params.include_stop_str_in_output
        if done in (Done.EOS, Done.STOP_TOKEN) and not shows_stop:
            shown = token_ids[:-1]  # the token that ended it is output, but no text
        delta = self._detokenizer.push(shown, done is not Done.RUNNING)
        if delta.stop is not None:
            return delta.text, delta.num_tokens, delta.stop
        return delta.text, len(token_ids), None

    def _attach_prompt_logprobs(self, delta: Delta) -> None:
        if self._prompt_logprobs is not None and (delta.token_ids or self.finished):
            delta.prompt_logprobs = self._prompt_logprobs
            self._prompt_logprobs = None

    def _tables(self, entry: TokenLogprobs, top: int, count: int) -> list[TokenTable]:
        """One table per position: the token itself first, then the `top` most likely ones."""
        tables = []
        rows = zip(entry.ids.tolist(), entry.values.tolist(), entry.rank.tolist(), strict=True)
        for ids, values, rank in list(rows)[:count]:
            table = {ids[0]: Logprob(values[0], rank, self._token_text(ids[0]))}
            for place in range(1, min(top, len(ids) - 1) + 1):
                token = ids[place]
                if token not in table:
                    table[token] = Logprob(values[place], place, self._token_text(token))
            tables.append(table)
        return tables

    def _token_text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token)
