"""Logprobs in the forms of replies: chat, text completions, and vLLM's prompt logprobs.

Values are raw: the model's distribution before sampling parameters are applied.
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
    from paceline.engine.outputs import TokenTable
    from paceline.text.tokenizer import Tokenizer

# OpenAI's value for "very unlikely"; JSON has no infinity.
LOWEST = -9999.0


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], tables: Sequence[TokenTable], top: int
) -> ChatLogprobs:
    def entry(token: int, logprob: Logprob) -> tuple[str, float, list[int]]:
        raw = tokenizer.token_bytes(token)
        return tokenizer.token_text(token), finite(logprob), list(raw)

    content = []
    for token, table in zip(token_ids, tables, strict=False):
        best = [TopLogprob(*entry(t, logprob)) for t, logprob in most_likely(table, top)]
        content.append(TokenLogprob(*entry(token, table[token]), best))
    return ChatLogprobs(content)


def prompt_logprobs(tables: Sequence[TokenTable | None], top: int) -> PromptLogprobs:
    """vLLM's form: per position the prompt's token and the most likely ones, keyed by id."""
    return [None if table is None else _prompt_entry(table, top) for table in tables]


def _prompt_entry(table: TokenTable, top: int) -> dict[str, PromptLogprob]:
    own = next(iter(table))
    shown = {own: table[own], **dict(most_likely(table, top))}
    return {
        str(token): PromptLogprob(finite(lp), lp.rank, lp.decoded_token)
        for token, lp in shown.items()
    }


def most_likely(table: TokenTable, top: int) -> Iterable[tuple[int, Logprob]]:
    """The `top` most likely tokens of a table, which may also hold a less likely sampled token."""
    return sorted(table.items(), key=lambda item: -item[1].logprob)[:top]


def finite(value: Logprob) -> float:
    # The comparison is false for NaN too.
    return value.logprob if value.logprob > LOWEST else LOWEST


class TextTokens:
    """Logprobs of one text completion, prompt first, in OpenAI's legacy form.

    Offsets follow the tokens' bytes, so the tokens of one character have the same offset.
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
        found = TextLogprobs()
        for token, table in zip(token_ids, tables, strict=False):
            # A begin token that the tokenizer added is not part of the text.
            special = token in self._tokenizer.special_ids
            is_shown = not special or text.startswith(
                self._tokenizer.token_text(token), self._offset
            )
            self._add(found, token, table, is_shown)
        self._offset = len(text)
        self._decoder.reset()
        return found

    def output(
        self,
        token_ids: Sequence[int],
        tables: Sequence[TokenTable],
        prompt: TextLogprobs | None = None,
    ) -> TextLogprobs:
        """Output tokens; they are appended to `prompt` if it is given."""
        found = TextLogprobs() if prompt is None else prompt
        for token, table in zip(token_ids, tables, strict=False):
            special = token in self._tokenizer.special_ids
            self._add(found, token, table, not (special and self._skip_special))
        return found

    def _add(
        self, found: TextLogprobs, token: int, table: TokenTable | None, is_shown: bool
    ) -> None:
        found.tokens.append(self._name(token))
        found.text_offset.append(self._offset)
        if table is None:
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
        else:
            found.token_logprobs.append(finite(table[token]))
            best = {self._name(t): finite(lp) for t, lp in most_likely(table, self._top)}
            # The legacy form always shows the token itself among the top ones.
            best.setdefault(self._name(token), finite(table[token]))
            found.top_logprobs.append(best)
        if is_shown:
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def _name(self, token: int) -> str:
        """The token as text. Broken UTF-8 is written as by OpenAI: `bytes:\\xe2`."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
