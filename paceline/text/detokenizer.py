"""Turns the token ids of one sequence into text as they arrive, and finds stop strings.

Text is held back until its characters are complete and it cannot begin a stop string. EOS, stop
tokens and lengths are decided on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers.decoders import DecodeStream

from paceline.text.tokenizer import Tokenizer

# The first output token is decoded after this many tokens of the prompt. More are used if the
# first of them is in the middle of a character.
_CONTEXT_TOKENS = 6
_MOST_CONTEXT_TOKENS = 66
_MOST_CHAR_BYTES = 4
# A longer run of tokens without text is broken UTF-8 or special tokens.
_MOST_PENDING = 16
_BROKEN = "\ufffd"


class TextDelta(NamedTuple):
    """New text, the number of pushed tokens that count, and the stop string if one was found."""

    text: str
    num_tokens: int
    stop: str | None = None


class Detokenizer:
    """Push the tokens of each step. The returned texts, joined, are the text of the output.

    A stop string counts when the token that completes it is number `min_tokens` or later.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int],
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._pending: list[int] = []  # tokens without text so far
        # How many pending tokens, and characters of their text, belong to the prompt.
        self._num_unfinished = self._num_prompt_chars = 0
        self._last_shown: int | None = None  # the last token that completed a text
        self._last_clean: int | None = None  # the last token that decodes to whole characters alone
        self._stream = self._after_prompt(prompt_ids)
        self._num_tokens = 0
        self._min_tokens = min_tokens
        self._stops = _StopStrings(stop, include_stop) if stop else None
        self._stopped: str | None = None

    def push(self, ids: Sequence[int], finished: bool) -> TextDelta:
        """Add the next tokens; `finished` if the sequence ends with them."""
        if self._stopped is not None:
            return TextDelta("", 0, self._stopped)
        if self._stops is None:
            return self._push_plain(ids, finished)
        return self._push_with_stops(ids, finished, self._stops)

    def _push_plain(self, ids: Sequence[int], finished: bool) -> TextDelta:
        text = ""
        for token_id in ids:
            piece = self._step(token_id)
            if piece:
                text += piece
        if finished:
            text += self._flush()
        return TextDelta(text, len(ids))

    def _push_with_stops(
        self, ids: Sequence[int], finished: bool, stops: _StopStrings
    ) -> TextDelta:
        shown = ""
        for count, token_id in enumerate(ids, 1):
            piece = self._step(token_id)
            self._num_tokens += 1
            if not piece:
                continue
            text, self._stopped = stops.feed(piece, self._num_tokens >= self._min_tokens)
            shown += text
            if self._stopped is not None:
                return TextDelta(shown, count, self._stopped)
        if finished:
            piece = self._flush()
            if piece:
                text, self._stopped = stops.feed(piece, self._num_tokens >= self._min_tokens)
                shown += text
            if self._stopped is None:
                shown += stops.release()
        return TextDelta(shown, len(ids), self._stopped)

    def _step(self, token_id: int) -> str | None:
        """The text that this token completes, if any."""
        try:
            piece: str | None = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:
            # DecodeStream raises if new bytes change how earlier ones decode, which happens with
            # broken UTF-8. The text so far stays, and the pending tokens are decoded alone.
            self._pending.append(token_id)
            return self._restart(len(self._pending))
        if piece:
            if self._pending:
                self._pending.clear()
                piece = self._without_prompt(piece)
            self._last_shown = token_id
            return piece
        self._pending.append(token_id)
        if len(self._pending) > _MOST_PENDING:
            return self._cut_pending()
        return None

    def _cut_pending(self) -> str | None:
        """Emit a run of broken UTF-8; the stream would decode all of it again for each token."""
        whole = self._decode(self._pending)
        for keep in range(4, _MOST_PENDING):
            cut = len(self._pending) - keep
            if self._decode(self._pending[:cut]) + self._decode(self._pending[cut:]) == whole:
                return self._restart(cut)
        return self._restart(len(self._pending))

    def _restart(self, cut: int) -> str | None:
        """Emit the text of the first `cut` pending tokens; decode the others with a new stream."""
        shown, rest, self._pending = self._pending[:cut], self._pending[cut:], []
        text = self._without_prompt(self._decode(shown))
        # The new stream begins after a token with text; else the next token would lose its space.
        for token_id in (self._last_shown, *shown):
            piece = "" if token_id is None else self._decode([token_id])
            if piece and not piece.endswith(_BROKEN):
                self._last_clean = token_id
        anchor = [] if self._last_clean is None else [self._last_clean]
        self._stream = DecodeStream(anchor, self._skip_special)
        for token_id in rest:
            text += self._step(token_id) or ""
        return text or None

    def _flush(self) -> str:
        """The rest at the end of the sequence; incomplete characters become U+FFFD."""
        text = ""
        if len(self._pending) > self._num_unfinished:
            text = self._without_prompt(self._decode(self._pending))
        self._pending.clear()
        return text

    def _without_prompt(self, text: str) -> str:
        """The text without the characters that belong to the prompt; removed only once."""
        known = min(self._num_prompt_chars, len(text))
        self._num_prompt_chars -= known
        self._num_unfinished = 0
        return text[known:]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special) if ids else ""

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens, beginning at the start of a character."""
        for count in range(_CONTEXT_TOKENS, _MOST_CONTEXT_TOKENS, _CONTEXT_TOKENS):
            context = list(prompt_ids[-count:])
            if len(context) < count or not self._decode(context).startswith(_BROKEN):
                break
        return context

    def _after_prompt(self, prompt_ids: Sequence[int]) -> DecodeStream:
        """A stream whose position is after the prompt's last complete character.

        Some tokenizers drop the space of the first token that they decode, so the output must not
        be decoded alone. The prompt's tokens after that character become pending.
        """
        context = self._context(prompt_ids)
        split = len(context)
        while split and self._decode(context[:split]).endswith(_BROKEN):
            split -= 1
        unfinished = context[split:]
        stream = DecodeStream(context[:split], self._skip_special)
        for token_id in unfinished:
            stream.step(self._tokenizer.backend, token_id)
            self._pending.append(token_id)
        self._num_unfinished = len(unfinished)
        text = self._decode(unfinished)
        # Each byte token decodes to one U+FFFD. Another token may contain whole characters and end
        # within one, which decodes to a single U+FFFD.
        is_one_char = len(unfinished) < _MOST_CHAR_BYTES
        self._num_prompt_chars = len(text.rstrip(_BROKEN) if is_one_char else text[:-1])
        return stream


class _StopStrings:
    """Searches a growing text for stop strings, as if it grew by single characters."""

    def __init__(self, stop: tuple[str, ...], include_stop: bool) -> None:
        self._stop = stop
        self._include = include_stop
        self._reach = max(map(len, stop)) - 1
        # If the output includes the stop string, no text needs to be held back.
        self._prefixes = set() if include_stop else {s[:n] for s in stop for n in range(1, len(s))}
        # Most pieces contain no character that ends a stop string or a prefix of one.
        self._final_chars = frozenset(s[-1] for s in stop)
        self._prefix_chars = frozenset(p[-1] for p in self._prefixes)
        self._tail = ""  # the last characters, as many as a stop string can need
        self._num_held = 0  # how many of them were not returned yet

    def feed(self, piece: str, may_stop: bool) -> tuple[str, str | None]:
        """(text to return, the stop string that the piece completes)"""
        text = self._tail + piece
        shown_to = len(self._tail) - self._num_held
        if may_stop and not self._final_chars.isdisjoint(piece):
            end, start, found = self._first(text, len(self._tail))
            if found is not None:
                return text[shown_to : end if self._include else start], found
        held = self._held(text)
        self._tail = text[-self._reach :] if self._reach else ""
        self._num_held = held
        return text[shown_to : len(text) - held], None

    def release(self) -> str:
        """The held text, when the sequence ends without a stop string."""
        held = self._tail[len(self._tail) - self._num_held :]
        self._num_held = 0
        return held

    def _first(self, text: str, seen: int) -> tuple[int, int, str | None]:
        """(end, start, stop) of the match that ends first after `seen`; of several, the longest."""
        best: tuple[int, int, str | None] = (len(text) + 1, 0, None)
        for stop in self._stop:
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0 and (start + len(stop), start) < best[:2]:
                best = (start + len(stop), start, stop)
        return best

    def _held(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a stop string."""
        if text[-1] not in self._prefix_chars:
            return 0
        for length in range(min(self._reach, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0
