"""Drives grammar constraints without a model: random tokens under the masks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.checkpoint.tokenizer_config import TokenizerConfig
from paceline.config import EngineConfig
from paceline.engine.front import Front
from paceline.engine.grammar_constraint import GrammarConstraint
from paceline.engine.grammars import Grammars
from paceline.request import StructuredOutputsParams
from paceline.step import Ints
from paceline.text.tokenizer import Tokenizer
from tests.e2e.serving import SPECIAL, train_tokenizer
from tests.patience import wait_for

EOS = 2


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(), TokenizerConfig(named={"eos_token": SPECIAL[EOS]}))


def grammars_of(
    tokenizer: Tokenizer, *, vocab_size: int | None = None, eos: tuple[int, ...] = (EOS,), **kw: Any
) -> Grammars:
    front = Front(tokenizer, eos)
    config = EngineConfig.from_keywords()
    return Grammars(config, vocab_size or tokenizer.vocab_size, load=lambda _: front, **kw)


def allowed(mask_V: Ints) -> list[int]:
    bits = np.unpackbits(np.ascontiguousarray(mask_V).view(np.uint8), bitorder="little")
    return [int(i) for i in np.flatnonzero(bits)]


def generate(
    constraint: GrammarConstraint,
    rng: random.Random,
    tokenizer: Tokenizer,
    max_tokens: int = 256,
    *,
    likes_short: bool = True,
) -> tuple[list[int], bool]:
    """Random output under the masks, and whether it ended. `likes_short` prefers ends: of the
    output, then of strings and containers."""
    tokens: list[int] = []
    for _ in range(max_tokens):
        choices = allowed(constraint.masks([])[0])
        assert choices, "no token is allowed"
        if likes_short and rng.random() < 0.5:
            choices = _enders(choices, tokenizer) or choices
        token = rng.choice(choices)
        tokens.append(token)
        constraint.accept([token])
        if token == EOS:
            return tokens, True
    return tokens, False


def _enders(choices: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    if EOS in choices:
        return [EOS]
    if len(choices) > 2000:  # inside a string: the tokens that end it
        choices = choices[:64]
    return [t for t in choices if tokenizer.token_bytes(t)[-1:] in (b'"', b"]", b"}")]


def params(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


def outcomes(grammars: Grammars, count: int) -> dict[int, Any]:
    """What became of the next requests, by uid."""
    found: dict[int, Any] = {}

    def all_are_ready() -> bool:
        found.update({request.uid: outcome for request, outcome in grammars.take_ready()})
        return len(found) >= count

    wait_for(all_are_ready, 60)
    return found
