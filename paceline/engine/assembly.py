"""Turns rows of step messages into what the reader of a stream gets: text, tokens, logprobs.

Owns stop strings: the cut is at the token that completes one, and what came after it never
existed, neither in text nor in tokens nor in logprobs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.errors import PacelineError
from paceline.request import Done, Logprob, RequestMetrics, SamplingParams
from paceline.scheduler.events import Ended
from paceline.step import TokenLogprobs
from paceline.text.detokenizer import Detokenizer
from paceline.text.tokenizer import Tokenizer

TokenTable = dict[int, Logprob]


@dataclass(slots=True)
class Delta:
    """What one sequence of a request has gained. `finish_reason` is set on its last one only."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenTable] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    # On the first delta of sequence 0, when asked for: one entry per prompt token, the first None.
    prompt_logprobs: list[TokenTable | None] | None = None


@dataclass(slots=True, eq=False)
class Generation:
    """One request in the front: its n sequences share the id, the prompt and the metrics.

    `error` says why when a sequence ended with finish_reason "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    on_deltas: Callable[[list[Delta]], None]
    metrics: RequestMetrics
    finished: bool = False
    is_aborted: bool = False  # by this side: its sink is not called again
    error: PacelineError | None = None
    open_uids: set[int] = field(default_factory=set)


class Assembly:
    """One sequence, from its first row to its last. `finished` once it has a finish reason."""

    def __init__(
        self,
        generation: Generation,
        index: int,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        params = generation.params
        self.generation = generation
        self.index = index
        self.finished = False
        self.was_admitted = False
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

    def take_prompt_logprobs(self, entry: TokenLogprobs) -> None:
        """The next prompt positions; they go out with the first tokens."""
        if self._prompt_logprobs is not None:
            top = self.generation.params.prompt_logprobs or 0
            self._prompt_logprobs.extend(self._tables(entry, top, len(entry.rank)))

    def take(self, token_ids: list[int], done: Done, logprobs: TokenLogprobs | None) -> Delta:
        """One row of a step: its new tokens and how it stands."""
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
        delta.finish_reason = done.finish_reason
        self.finished = done is not Done.RUNNING
        self._attach_prompt_logprobs(delta)
        return delta

    def end(self, ended: Ended) -> Delta:
        """The request ended without a row: flush the text that was held back."""
        return self.take([], Done(ended.done), None)

    def _to_text(self, token_ids: list[int], done: Done) -> tuple[str, int, str | None]:
        """(text to show, tokens that count, stop string found)."""
        if self._detokenizer is None:
            return "", len(token_ids), None
        shown = token_ids
        shows_stop = self.generation.params.include_stop_str_in_output
        if done in (Done.EOS, Done.STOP_TOKEN) and not shows_stop:
            shown = token_ids[:-1]  # what ended it is part of the output, not of the text
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
