"""One request's grammar as a TokenConstraint, and the masks of all requests in one native call.

Needs llguidance, which the caller has imported. Runs on the engine's loop thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import RequestFailed
from paceline.request import StructuredOutputsParams
from paceline.scheduler.constraints import OneByOne
from paceline.scheduler.events import TokenConstraint
from paceline.step import Ints

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_THREADS = 8
# Row of the masks, state, its first position, drafts from there on.
_NativeRow = tuple[int, "GrammarConstraint", int, list[int]]


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
        native: list[_NativeRow] = []
        begins: list[tuple[int, int, int]] = []  # (index, position, token) of markers
        for index, constraint, drafts in rows:
            if not isinstance(constraint, GrammarConstraint):
                continue
            for at, state, rest in _states(constraint, drafts):
                native += self._fill_known(index, at, state, rest, mask_RWV)
                if state.opening:
                    begins.append((index, at, state.opening[0]))
        if native:
            self._fill_native(native, mask_RWV)
        for index, at, token in begins:
            mask_RWV.view(np.uint32)[index, at, token // 32] |= np.uint32(1 << token % 32)
        for index, state, _, _ in native:
            if state.matcher.is_error():
                errors[index] = GrammarFailed(state.matcher.get_error())
        return errors

    def _fill_known(
        self, index: int, at: int, state: GrammarConstraint, drafts: list[int], mask_RWV: Ints
    ) -> tuple[_NativeRow, ...]:
        """Write the masks from position `at` on that need no call. Returns what it must write."""
        first, matched = state.matched(drafts)
        begin, stop = at + first, at + len(drafts) + 1
        if first:
            mask_RWV[index, at:begin] = -1
        if begin >= stop:
            return ()
        end = begin + len(matched) + 1
        if end < stop:
            mask_RWV[index, end:stop] = self._only_eos
        if state.has_ended:
            mask_RWV[index, begin] = self._only_eos
        elif not state.can_read:
            mask_RWV[index, begin:stop] = self._only_eos
            mask_RWV[index, begin] = 0
        else:
            return ((index, state, begin, matched),)
        return ()

    def _fill_native(self, rows: list[_NativeRow], mask_RWV: Ints) -> None:
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

    The grammar begins after the first occurrence of `after` in the output. With `opening` it does
    so only if the output begins with these tokens, which the masks allow besides the grammar; any
    other output is under the grammar from its first token. It ends with an end-of-sequence token,
    which is allowed exactly where the grammar may end. After that token (under ignore_eos) only
    end-of-sequence tokens are allowed.

    `emitted` is the output so far of a request that goes on.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        masks: GrammarMasks,
        asked: StructuredOutputsParams,
        emitted: Iterable[int] = (),
    ) -> None:
        self.matcher = matcher
        self.has_ended = False
        self.opening = tuple(asked.opening_token_ids)  # tokens that the marker still needs
        self.can_read = True  # the grammar allows the part of the marker that was emitted
        self._masks = masks
        self._eos = masks.tokens.eos_token_ids
        self._after = list(asked.after_token_ids)
        # Newest tokens before `after`. None: there is nothing to wait for.
        self._seen: list[int] | None = [] if self._after and not self.opening else None
        self.accept(list(emitted))

    def accept(self, tokens: list[int]) -> None:
        tokens = tokens[self._num_opening(tokens) :]
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
        if self.opening or self._seen is not None or self.has_ended:
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

    def _num_opening(self, tokens: list[int]) -> int:
        """How many of the next tokens belong to the opening marker, which are remembered."""
        for num_taken, token in enumerate(tokens):
            if not self.opening:
                return num_taken
            if token != self.opening[0]:
                if not self.can_read:
                    raise GrammarFailed("a marker of reasoning was begun and not ended")
                self.opening = ()
                return num_taken
            self.opening = self.opening[1:]
            if not self.opening:
                self.matcher.reset()
                self.can_read, self._seen = True, []
            elif self.can_read:
                self.can_read = self.matcher.try_consume_tokens([token]) == 1
        return len(tokens)

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


def _states(
    constraint: GrammarConstraint, drafts: list[int]
) -> Sequence[tuple[int, GrammarConstraint, list[int]]]:
    """(position, state there, drafts that it reads). Drafts of an opening marker part them."""
    if not constraint.opening:
        return ((0, constraint, drafts),)
    states = []
    state, at = constraint, 0
    while at < len(drafts) and state.opening[:1] == (drafts[at],):
        states.append((at, state, list[int]()))
        state = copy(state)
        state.matcher = state.matcher.deep_copy()
        state.accept([drafts[at]])
        at += 1
    return [*states, (at, state, drafts[at:])]
