"""The mixed load: requests of every kind, and what a client has seen of each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from paceline import SamplingParams
from paceline.engine.client import EngineClient
from paceline.engine.outputs import Delta, Generation, TokenTable
from paceline.request import StructuredOutputsParams
from tests.faults import processors

NUM_TOKENS = 90
TEXTS = ("the fox", "we", "12345", "hello", "a", "The quick brown fox jumps over. " * 3)
WORDS = StructuredOutputsParams(regex="([a-z]{3,9} ){8,12}")
_NUMBER = {"type": "integer", "minimum": 100_000, "maximum": 999_999}
_FIELDS = {"first": _NUMBER, "second": _NUMBER, "word": {"type": "string", "pattern": "^[a-f]{9}$"}}
RECORD = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": _FIELDS,
        "required": [*_FIELDS],
        "additionalProperties": False,
    },
    disable_any_whitespace=True,
)
# Prompt, parameters. Temperature 1 without a seed: the front draws one.
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (TEXTS[0], {"temperature": 0}),
    (TEXTS[1], {"temperature": 1.0, "seed": 11}),
    (TEXTS[2], {"temperature": 1.0}),
    (TEXTS[3], {"temperature": 0.8, "n": 3, "top_p": 0.9}),
    (TEXTS[4], {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5}),
    (TEXTS[5], {"temperature": 1.0, "repetition_penalty": 1.3, "logprobs": 2}),
    (TEXTS[0], {"temperature": 0, "logprobs": 1, "prompt_logprobs": 1}),
    (TEXTS[1], {"temperature": 1.0, "seed": 5, "stop": ["e", "q"], "min_tokens": 40}),
    (TEXTS[2], {"temperature": 1.0, "seed": 6, "min_tokens": 50, "ignore_eos": False}),
    (TEXTS[3], {"temperature": 1.0, "n": 2, "seed": 9, "logprobs": 0, "top_k": 20}),
    (TEXTS[5], {"temperature": 0, "bad_words": ["e", "the"], "logit_bias": {40: 2.0}}),
    (TEXTS[4], {"temperature": 1.0, "allowed_token_ids": list(range(20, 90))}),
    (TEXTS[0], {"temperature": 1.0, "seed": 3, "logits_processors": [processors.NAME]}),
    (TEXTS[1], {"temperature": 1.0, "ignore_eos": False, "structured_outputs": WORDS}),
    (TEXTS[2], {"temperature": 0, "ignore_eos": False, "structured_outputs": RECORD}),
)


@dataclass
class Seen:
    """What the client of one sequence has."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenTable] = field(default_factory=list)
    prompt_logprobs: list[list[TokenTable | None]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, delta: Delta) -> None:
        assert self.finish_reason is None, "a delta after the last one"
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs or []
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs.append(delta.prompt_logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def differs(self, other: Seen) -> str:
        """What is not the same; empty if nothing."""
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine!r} instead of {theirs!r}"
        for name in ("logprobs", "prompt_logprobs"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if len(mine) != len(theirs):
                return f"{len(mine)} {name} instead of {len(theirs)}"
        pairs = [*zip(self.logprobs, other.logprobs, strict=True)]
        for one, two in zip(self.prompt_logprobs, other.prompt_logprobs, strict=True):
            pairs += [(a, b) for a, b in zip(one, two, strict=True) if a is not None and b]
        # A prompt is computed at once and an output token by token: sums are rounded differently.
        if not all(_are_close(one, two) for one, two in pairs):
            return "logprobs have other values"
        return ""


def _are_close(one: TokenTable, two: TokenTable) -> bool:
    """By the token itself; of two that are as likely, either may be among the best."""
    token = next(iter(two))
    return token in one and math.isclose(one[token].logprob, two[token].logprob, abs_tol=1e-3)


class Load:
    """All requests, submitted at once in a fixed order: so each has the same seed every time."""

    def __init__(self, client: EngineClient) -> None:
        client._next_uid = 1
        self.seen: list[list[Seen]] = []
        self.generations: list[Generation] = []
        self.num_tokens = 0
        for number, (text, params) in enumerate(REQUESTS):
            given = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **params}
            seen = [Seen() for _ in range(given.get("n", 1))]
            self.seen.append(seen)

            def take(deltas: list[Delta], seen: list[Seen] = seen) -> None:
                for delta in deltas:
                    seen[delta.index].take(delta)
                    self.num_tokens += len(delta.token_ids)

            ids = client.tokenizer.encode(text)
            self.generations.append(
                client.submit(str(number), ids, SamplingParams(**given), on_deltas=take)
            )

    @property
    def is_finished(self) -> bool:
        return all(generation.finished for generation in self.generations)

    def complaints(self, undisturbed: Load) -> list[str]:
        found = []
        for number, (mine, theirs) in enumerate(zip(self.seen, undisturbed.seen, strict=True)):
            for index, (one, two) in enumerate(zip(mine, theirs, strict=True)):
                if what := one.differs(two):
                    error = self.generations[number].error
                    found.append(f"request {number}, sequence {index}: {what} ({error})")
        return found
