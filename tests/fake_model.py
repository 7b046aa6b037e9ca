"""A made-up language model for tests: the next token is a hash of all tokens before it.

Holds no state and computes no tensor; what a runner should emit is `reference_output`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.request import Done, EngineRequest
from paceline.step import Ints

_MASK = (1 << 62) - 1
START = 7  # the chain value before the first token


def mix(state: int, token: int) -> int:
    """The chain value of a prefix; never EMPTY or GARBAGE."""
    value = (state ^ (token + 0x9E37)) * 0x2545F4914F6CDD1D & _MASK
    return (value ^ value >> 29) | 2


def chain(tokens: Sequence[int]) -> list[int]:
    values, state = [], START
    for token in tokens:
        state = mix(state, token)
        values.append(state)
    return values


def is_allowed(mask: Ints | None, token: int) -> bool:
    return mask is None or bool(int(mask[token // 32]) >> (token % 32) & 1)


def next_token(
    state: int, request: EngineRequest, vocab: int, bans_stops: bool, mask: Ints | None = None
) -> int:
    """What the model samples after a prefix, for this request's seed."""
    draw = (mix(state, request.params.seed or 0) >> 7) % vocab
    for step in range(vocab):
        token = (draw + step) % vocab
        if is_allowed(mask, token) and not (bans_stops and token in request.eos_token_ids):
            return token
    raise AssertionError("the mask allows nothing")


def reference_output(
    request: EngineRequest,
    vocab: int,
    max_len: int,
    masks: Callable[[list[int]], Ints] | None = None,
) -> tuple[list[int], Done]:
    """The tokens one by one: no batch, no pages, no drafts."""
    prompt = list(request.prompt_token_ids)
    state = chain(prompt)[-1]
    limit = min(len(prompt) + (request.params.max_tokens or max_len), max_len)
    output: list[int] = []
    while True:
        mask = masks(output) if masks is not None else None
        bans_stops = len(output) < request.params.min_tokens
        token = next_token(state, request, vocab, bans_stops, mask)
        output.append(token)
        state = mix(state, token)
        if token in request.eos_token_ids:
            return output, Done.EOS
        if len(prompt) + len(output) >= limit:
            return output, Done.LENGTH
