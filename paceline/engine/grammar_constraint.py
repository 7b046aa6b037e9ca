"""One request's grammar as a TokenConstraint, and the masks of all requests in one native call.

Needs llguidance, which the caller has imported. Runs on the engine's loop thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import RequestFailed
from paceline.scheduler.constraints import OneByOne
from paceline.scheduler.events import TokenConstraint
from paceline.step import Ints

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_THREADS = 8


class GrammarFailed(RequestFailed):
    """A grammar that cannot go on, for example because it reached a limit."""


@dataclass(frozen=True)
class GrammarTokens:
    """The model's tokens as llguidance knows them."""

    native: LLTokenizer
    eos_token_ids: tuple[int, ...]
    specials: dict[str, int]

    @property
    def num_words(self) -> int:
        """32-bit words of a mask as llguidance writes it."""
        return (self.native.vocab_size + 31) // 32


class GrammarMasks:
    """Fills the masks of late rows: all grammars of a step in one parallel call."""

    def __init__(self, tokens: GrammarTokens, vocab_size: int) -> None:
        from llguidance import LLExecutor

        self.tokens = tokens
        self.num_words = (vocab_size + 31) // 32
        self._executor = LLExecutor(max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2)))
        bits = np.zeros(32 * self.num_words, np.uint8)
        bits[list(tokens.eos_token_ids)] = 1
        self._only_eos: Ints = np.packbits(bits, bitorder="little").view(np.int32)

    def fill(
        self, rows: Sequence[tuple[int, TokenConstraint, list[int]]], mask_RWV: Ints
    ) -> dict[int, Exception]:
        """Write the masks of rows (index, constraint, drafts) at positions 0 to len(drafts).

        Returns the errors of the constraints that failed, by index.
        """
        others = [row for row in rows if not isinstance(row[1], GrammarConstraint)]
        errors = OneByOne().fill(others, mask_RWV)
        native: list[tuple[int, GrammarConstraint, int, list[int]]] = []
        for index, constraint, drafts in rows:
            if not isinstance(constraint, GrammarConstraint):
                continue
            first, matched = constraint.matched(drafts)
            mask_RWV[index, :first] = -1
            if first <= len(drafts):
                end = first + len(matched)
                mask_RWV[index, end + 1 : len(drafts) + 1] = self._only_eos
                if constraint.has_ended:
                    mask_RWV[index, first] = self._only_eos
                else:
                    native.append((index, constraint, first, matched))
        if native:
            self._fill_native(native, mask_RWV)
        for index, constraint, _, _ in native:
            if constraint.matcher.is_error():
                errors[index] = GrammarFailed(constraint.matcher.get_error())
        return errors

    def _fill_native(
        self, rows: list[tuple[int, GrammarConstraint, int, list[int]]], mask_RWV: Ints
    ) -> None:
        num_rows, width, num_words = mask_RWV.shape
        # A tokenizer may have more tokens than the model, and then its masks are longer.
        is_direct = num_words == self.tokens.num_words and mask_RWV.flags["C_CONTIGUOUS"]
        target = mask_RWV if is_direct else np.empty((num_rows, width, self.tokens.num_words), "i4")
        at = [(c.matcher, index * width + first, drafts) for index, c, first, drafts in rows]
        where = (target.ctypes.data, 4 * self.tokens.num_words, num_rows * width)
        # llguidance has one call for rows with drafts and one for rows without.
        if drafted := [row for row in at if row[2]]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        if plain := [(matcher, place) for matcher, place, drafts in at if not drafts]:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if not is_direct:
            for index, _, first, drafts in rows:
                written = slice(first, first + len(drafts) + 1)
                mask_RWV[index, written] = target[index, written, :num_words]


class GrammarConstraint:
    """The state of one output under its grammar. A TokenConstraint.

    The grammar begins after the first occurrence of `after` in the output. It ends with an
    end-of-sequence token, which is allowed exactly where the grammar may end. After that token
    (under ignore_eos) only end-of-sequence tokens are allowed.

    `emitted` is the output so far of a request that goes on.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        masks: GrammarMasks,
        after: Sequence[int] = (),
        emitted: Iterable[int] = (),
    ) -> None:
        self.matcher = matcher
        self.has_ended = False
        self._masks = masks
        self._eos = masks.tokens.eos_token_ids
        self._after = list(after)
        self._seen: list[int] | None = [] if after else None  # newest tokens; None: it has begun
        self.accept(list(emitted))

    def accept(self, tokens: list[int]) -> None:
        for token in tokens[self._num_free(tokens, keep=True) :]:
            if self.has_ended:
                continue
            if token in self._eos:
                self.has_ended = True
            elif not self.matcher.consume_token(token):
                raise GrammarFailed(self.matcher.get_error())

    def masks(self, draft_ids: list[int]) -> Ints:
        shape = (1, len(draft_ids) + 1, self._masks.num_words)
        mask_RWV: Ints = np.full(shape, -1, np.int32)
        for error in self._masks.fill([(0, self, draft_ids)], mask_RWV).values():
            raise error
        return mask_RWV.reshape(shape[1:])

    def forced(self) -> list[int]:
        if self._seen is not None or self.has_ended:
            return []
        matcher = self.matcher
        forced = matcher.compute_ff_tokens()
        if forced and not matcher.consume_tokens(forced):
            raise GrammarFailed(matcher.get_error())
        # With several end-of-sequence tokens the model chooses.
        is_over = matcher.is_stopped() and matcher.is_accepting()
        if forced and not matcher.rollback(len(forced)):
            raise GrammarFailed(matcher.get_error())
        return [*forced, *self._eos] if is_over and len(self._eos) == 1 else forced

    def matched(self, draft_ids: list[int]) -> tuple[int, list[int]]:
        """The first position under the grammar (after as many drafts), and the drafts from there
        on that the grammar can read: those before an end-of-sequence token."""
        first = self._num_free(draft_ids, keep=False)
        if self._seen is not None and not self._is_marker(draft_ids[:first]):
            return len(draft_ids) + 1, []
        if self.has_ended:
            return first, []
        drafts = draft_ids[first:]
        end = next((i for i, token in enumerate(drafts) if token in self._eos), len(drafts))
        return first, drafts[:end]

    def _num_free(self, tokens: list[int], *, keep: bool) -> int:
        """How many of the next tokens come before the grammar begins; `keep` remembers them."""
        if self._seen is None:
            return 0
        seen, length = [*self._seen, *tokens], len(self._after)
        before = len(self._seen)
        for end in range(max(length, before), len(seen) + 1):
            if seen[end - length : end] == self._after:
                if keep:
                    self._seen = None
                return end - before
        if keep:
            self._seen = seen[max(0, len(seen) - length + 1) :]
        return len(tokens)

    def _is_marker(self, tokens: list[int]) -> bool:
        """Whether the output ends with the marker after these tokens."""
        return [*(self._seen or ()), *tokens][-len(self._after) :] == self._after
