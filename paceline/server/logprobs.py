"""Token tables to the shapes of replies: chat's, text completions', vLLM's for prompts.

Owns bytes and offsets of tokens. Values are raw: the model's distribution before any sampling.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from paceline.request import Logprob
from paceline.server.replies import (
    ChatLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
)

if TYPE_CHECKING:
    from paceline.text.tokenizer import Tokenizer

TokenTable = dict[int, Logprob]
# OpenAI's value for "very unlikely"; JSON has no infinity.
LOWEST = -9999.0


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], tables: Sequence[TokenTable], top: int
) -> ChatLogprobs:
    content = []
    for token, table in zip(token_ids, tables, strict=False):
        best = [
            TopLogprob(tokenizer.token_text(t), finite(lp), list(tokenizer.token_bytes(t)))
            for t, lp in most_likely(table, top)
        ]
        content.append(
            TokenLogprob(
                tokenizer.token_text(token),
                finite(table[token]),
                list(tokenizer.token_bytes(token)),
                best,
            )
        )
    return ChatLogprobs(content)


def prompt_logprobs(tables: Sequence[TokenTable | None], top: int) -> PromptLogprobs:
    """vLLM's form: per position the prompt's own token and the likeliest, keyed by id."""
    return [None if table is None else _prompt_entry(table, top) for table in tables]


def _prompt_entry(table: TokenTable, top: int) -> dict[str, PromptLogprob]:
    own = next(iter(table))
    shown = {own: table[own], **dict(most_likely(table, top))}
    return {
        str(token): PromptLogprob(finite(lp), lp.rank, lp.decoded_token)
        for token, lp in shown.items()
    }


def most_likely(table: TokenTable, top: int) -> Iterable[tuple[int, Logprob]]:
    """The `top` likeliest of a table; the sampled token is in it even when it is not one."""
    return sorted(table.items(), key=lambda item: -item[1].logprob)[:top]


def finite(value: Logprob) -> float:
    # The comparison is false for NaN too.
    return value.logprob if value.logprob > LOWEST else LOWEST


class TextTokens:
    """The tokens of one text completion in OpenAI's legacy form, with their offsets in the text.

    Offsets follow the tokens' bytes, so a character of several tokens has one offset.
    """

    def __init__(self, tokenizer: Tokenizer, top: int, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._skip_special = skip_special_tokens
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(
        self, text: str, token_ids: Sequence[int], tables: Sequence[TokenTable | None]
    ) -> TextLogprobs:
        """The echoed prompt; its first token has no logprob."""
        shape = TextLogprobs([], [], [], [])
        for token, table in zip(token_ids, tables, strict=False):
            # A begin token that the tokenizer put there is no part of the text.
            special = token in self._tokenizer.special_ids
            is_shown = not special or text.startswith(
                self._tokenizer.token_text(token), self._offset
            )
            self._add(shape, token, table, is_shown)
        self.skip_to(len(text))
        return shape

    def skip_to(self, offset: int) -> None:
        self._offset = offset
        self._decoder.reset()

    def output(self, token_ids: Sequence[int], tables: Sequence[TokenTable]) -> TextLogprobs:
        shape = TextLogprobs([], [], [], [])
        for token, table in zip(token_ids, tables, strict=False):
            special = token in self._tokenizer.special_ids
            self._add(shape, token, table, not (special and self._skip_special))
        return shape

    def _add(
        self, shape: TextLogprobs, token: int, table: TokenTable | None, is_shown: bool
    ) -> None:
        shape.tokens.append(self._name(token))
        shape.text_offset.append(self._offset)
        if table is None:
            shape.token_logprobs.append(None)
            shape.top_logprobs.append(None)
        else:
            shape.token_logprobs.append(finite(table[token]))
            best = {self._name(t): finite(lp) for t, lp in most_likely(table, self._top)}
            # The legacy form always shows the token itself among the top ones.
            best.setdefault(self._name(token), finite(table[token]))
            shape.top_logprobs.append(best)
        if is_shown:
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def _name(self, token: int) -> str:
        """The token as text; one that is no whole characters as OpenAI writes it, `bytes:\\xe2`."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
