"""Finds how a sequence may go on: what followed earlier occurrences of its last tokens.

This is suffix decoding without a tree. Texts keep, for each position, the previous position with
the same last tokens. Following these links gives the occurrences, newest first. Their common
endings with the sequence are what a suffix tree would have as nodes and counts. To add a token
costs a few operations, whatever the depth: of a dictionary, or of arrays for all requests at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from paceline.scheduler.inflight import Rows
from paceline.step import Ints, Longs

# Occurrences that are looked at. In a tree the counts are of all, so a text that says the same
# thing in many ways may get another continuation there.
MOST_OCCURRENCES = 8
_MOST_LINKS = 64  # that one search follows
_END = -1  # between two answers


@dataclass(frozen=True, slots=True)
class LookupRules:
    """What counts as a match and how far it is trusted; vLLM's keys of `suffix` and `ngram`."""

    least_match: int = 2  # tokens
    depth: int = 24  # longer matches count as this long
    factor: float = 1.0  # drafts for each token of the match
    min_prob: float = 0.1  # of the whole path

    @property
    def width(self) -> int:
        """Tokens of a key."""
        return min(self.least_match, 2)


class Match(NamedTuple):
    """The tokens of `text` from position `at` on may follow; the first `likely` ones are likely."""

    text: Text | None  # None: the request's own
    at: int  # may have been dropped meanwhile
    length: int  # equal tokens before it, at most the depth
    likely: int
    score: float  # the expected number of right ones among them

    def tokens(self, skipped: int, count: int) -> list[int]:
        """`count` tokens after the first `skipped` ones, or as many as there are."""
        assert self.text is not None
        place = self.at - self.text.base + skipped
        if place < 0:
            return []
        tokens = self.text.tokens[place : place + count]
        return tokens[: tokens.index(_END)] if _END in tokens else tokens


class Text:
    """Past answers: tokens, and links between positions with the same last tokens."""

    def __init__(self, width: int) -> None:
        self.tokens: list[int] = []
        self._links: list[int] = []  # the previous position with the same key, or less than 0
        self._newest: dict[int, int] = {}  # by key
        self._width = width
        self.base = 0  # positions of tokens that were dropped at the front

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, more: Sequence[int]) -> None:
        tokens, links, newest, at = self.tokens, self._links, self._newest, len(self.tokens)
        is_pair, base = self._width == 2, self.base
        last = tokens[-1] if tokens else _END
        for position, token in enumerate(more, base + at):
            key = (last << 32) + token if is_pair else token
            links.append(newest.get(key, -1))
            newest[key] = position
            tokens.append(token)
            last = token

    def drop_front(self, count: int) -> None:
        """Forget the first `count` tokens."""
        last = _END  # an answer begins here
        for place in range(count):
            token = self.tokens[place]
            key = (last << 32) + token if self._width == 2 else token
            if self._newest.get(key, -1) == self.base + place:
                del self._newest[key]
            last = token
        del self.tokens[:count], self._links[:count]
        self.base += count

    def find(self, tail: list[int], rules: LookupRules) -> Match | None:
        """The best continuation of a sequence that ends with `tail` (of this text or not)."""
        key = (tail[-2] << 32) + tail[-1] if self._width == 2 else tail[-1]
        span = Span(self, self.tokens, self._links, self.base, len(self.tokens))
        return span.find(self._newest.get(key, -1), tail, rules)


class Span(NamedTuple):
    """What is searched: of a text, or of a running request."""

    text: Text | None
    tokens: Sequence[int]
    links: Sequence[int]
    base: int
    end: int  # number of tokens

    def find(self, position: int, tail: Sequence[int], rules: LookupRules) -> Match | None:
        """The best continuation after `tail`, by the occurrences that are linked to `position`."""
        found: list[tuple[int, int]] = []  # place after the occurrence, length of the match
        num_left, tokens = MOST_OCCURRENCES, self.tokens
        for _ in range(_MOST_LINKS):
            place = position - self.base
            if place < 0 or not num_left:
                break
            if place + 1 < self.end and tokens[place + 1] != _END:
                length = _common_ending(tokens, place, tail, rules.depth)
                num_left -= length >= rules.width  # else other tokens have the same hash
                if length >= rules.least_match:
                    found.append((place + 1, length))
            position = self.links[place]
        if not found:
            return None
        if len(found) == 1:
            return self._alone(*found[0], rules)
        return self._best(found, rules)

    def _alone(self, place: int, length: int, rules: LookupRules) -> Match:
        count = int(length * rules.factor)
        return Match(self.text, self.base + place, length, count, float(count))

    def _best(self, found: list[tuple[int, int]], rules: LookupRules) -> Match | None:
        """For each length of a match: follow the most frequent token. The best score wins, and
        among equal ones the longer match."""
        best: Match | None = None
        for length in sorted({length for _, length in found}, reverse=True):
            places = [place for place, own in found if own >= length]
            limit = int(length * rules.factor)
            if best is not None and limit <= best.score:
                break  # no score can be more than its limit
            match = self._follow(places, length, limit, rules.min_prob)
            if match.likely and (best is None or match.score > best.score):
                best = match
        return best

    def _follow(self, places: list[int], length: int, limit: int, min_prob: float) -> Match:
        tokens, end = self.tokens, self.end
        prob, score, count = 1.0, 0.0, 0
        while count < limit:
            if len(places) == 1:
                left = limit - count
                return Match(self.text, self.base + places[0], length, limit, score + prob * left)
            # At the end of a sequence a continuation goes round, as in a loop.
            nexts = [tokens[p + count % (end - p)] for p in places]
            token, votes = nexts[0], len(nexts)
            if nexts.count(token) != votes:
                token, votes = Counter(nexts).most_common(1)[0]
            prob *= votes / len(places)
            if token == _END or prob < min_prob:
                break
            places = [p for p, other in zip(places, nexts, strict=True) if other == token]
            score += prob
            count += 1
        return Match(self.text, self.base + places[0], length, count, score)


def _common_ending(tokens: Sequence[int], place: int, tail: Sequence[int], depth: int) -> int:
    """Equal last tokens of tokens[: place + 1] and `tail`, at most `depth`."""
    most, length = min(depth, len(tail), place + 1), 0
    while length < most and tokens[place - length] == tail[-1 - length]:
        length += 1
    return length


class OwnTexts:
    """Running requests, many at once: their tokens are those of the table.

    Positions are linked by a hash of their last tokens, so some links lead to other tokens.
    """

    def __init__(self, tokens_SL: Ints, width: int) -> None:
        slots, longest = tokens_SL.shape
        self._tokens_SL, self._width, self._num_cells = tokens_SL, width, _cells(longest)
        self._link_SL = np.zeros_like(tokens_SL)  # the previous position, -1: none
        self._newest_SC = np.zeros((slots, self._num_cells), np.int32)  # by hash: position + 1
        self._mask_S = np.zeros(slots, np.int64)
        self.num_S = np.zeros(slots, np.int64)  # tokens that are linked

    def start(self, slot: int, max_len: int) -> None:
        """A request that grows to `max_len` takes the slot."""
        cells = min(_cells(max_len), self._num_cells)
        self._newest_SC[slot, :cells] = 0
        self._mask_S[slot], self.num_S[slot] = cells - 1, 0

    def extend(self, slot_R: Rows, stop_R: Longs) -> Longs:
        """Link the tokens up to these lengths. Returns where the last tokens, as many as a key
        has, occurred before; -1: nowhere."""
        first_R = self.num_S.take(slot_R)
        count_R = stop_R - first_R
        self.num_S[slot_R] = stop_R
        end_R = count_R.cumsum()
        slot_N = slot_R.repeat(count_R)
        position_N = np.arange(len(slot_N)) + (first_R - end_R + count_R).repeat(count_R)
        at_N = slot_N * self._tokens_SL.shape[1] + position_N
        tokens_T, link_T = self._tokens_SL.reshape(-1), self._link_SL.reshape(-1)
        hash_N = tokens_T.take(at_N) * _MIX[0]
        if self._width == 2:
            hash_N += tokens_T.take(at_N - 1, mode="wrap") * _MIX[1]
        cell_N = slot_N * self._num_cells + ((hash_N >> 16) & self._mask_S.take(slot_N))
        newest_C = self._newest_SC.reshape(-1)
        link_N = newest_C.take(cell_N) - 1
        order_N = cell_N.argsort(kind="stable")
        sorted_N = cell_N.take(order_N)
        again = (sorted_N[1:] == sorted_N[:-1]).nonzero()[0]
        if len(again):
            link_N[order_N[again + 1]] = position_N[order_N[again]]
        newest_C[cell_N] = position_N + 1
        link_T[at_N] = link_N
        return self._same(slot_R, stop_R)

    def _same(self, slot_R: Rows, stop_R: Longs) -> Longs:
        """The newest position before the last one that has the same last tokens."""
        tokens_T, link_T = self._tokens_SL.reshape(-1), self._link_SL.reshape(-1)
        begin_R = slot_R * self._tokens_SL.shape[1]
        found_R = np.full(len(slot_R), -1)
        row_R, last_R = np.arange(len(slot_R)), begin_R + stop_R - 1
        at_R = last_R
        for _ in range(_MOST_LINKS_AT_ONCE):
            position_R = link_T.take(last_R, mode="wrap")
            is_open = (position_R >= self._width - 1).nonzero()[0]
            if not len(is_open):
                break
            row_R, at_R, position_R = (x_R.take(is_open) for x_R in (row_R, at_R, position_R))
            last_R = begin_R.take(row_R) + position_R
            is_same_R = tokens_T.take(last_R) == tokens_T.take(at_R)
            if self._width == 2:
                is_same_R &= tokens_T.take(last_R - 1) == tokens_T.take(at_R - 1)
            found_R[row_R[is_same_R]] = position_R[is_same_R]
            other = (~is_same_R).nonzero()[0]
            row_R, at_R, last_R = row_R.take(other), at_R.take(other), last_R.take(other)
        return found_R

    def alone(self, slot_R: Rows, at_R: Longs, stop_R: Longs, depth: int) -> Longs:
        """Equal tokens before the end of each request and before at_R; 0: there are more such
        places."""
        begin_R, back_D = slot_R * self._tokens_SL.shape[1], np.arange(depth)
        tokens_T = self._tokens_SL.reshape(-1)
        before_RD, last_RD = ((begin_R + x_R)[:, None] - back_D for x_R in (at_R, stop_R - 1))
        is_same_RD = (tokens_T[before_RD] == tokens_T[last_RD]) & (back_D <= at_R[:, None])
        is_alone_R = self._link_SL.reshape(-1)[begin_R + at_R] < 0
        length_R: Longs = np.logical_and.accumulate(is_same_RD, axis=1).sum(axis=1) * is_alone_R
        return length_R

    def find(self, slot: int, position: int, length: int, rules: LookupRules) -> Match | None:
        """The best continuation of a request, which occurred before at `position`."""
        tokens, links = memoryview(self._tokens_SL[slot]), memoryview(self._link_SL[slot])
        tail = tokens[max(length - rules.depth, 0) : length].tolist()
        return Span(None, tokens, links, 0, length).find(position, tail, rules)


_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64).astype(np.int64)
_MOST_LINKS_AT_ONCE = 2  # that are followed to find the same tokens; few lead to others


def _cells(length: int) -> int:
    """A power of two, so that half of the cells or more are free."""
    return 1 << (2 * length).bit_length()


class PastAnswers:
    """The outputs of ended requests in one text, oldest first. Bounded by number and bytes.

    An answer that was used since it came is put at the end again instead of being dropped.
    """

    # By measurement (tests/scheduler/test_suffixes.py), links and keys included.
    BYTES_PER_TOKEN = 256

    def __init__(self, most: int, max_bytes: int, width: int) -> None:
        self.text = Text(width)
        self._most, self._max_tokens = most, max_bytes // self.BYTES_PER_TOKEN
        self._answers: deque[tuple[int, int]] = deque()  # first position and number of tokens
        self._used: set[int] = set()  # positions of first tokens

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, tokens: list[int]) -> None:
        tokens = tokens[: self._max_tokens - 1]
        if not tokens:
            return
        self._append(tokens)
        while len(self._answers) > self._most or len(self.text) > self._max_tokens:
            self._drop_oldest()

    def _append(self, tokens: list[int]) -> None:
        self._answers.append((self.text.base + len(self.text), len(tokens)))
        self.text.extend([*tokens, _END])

    def _drop_oldest(self) -> None:
        first, count = self._answers.popleft()
        kept = self.text.tokens[:count] if first in self._used else []
        self._used.discard(first)
        self.text.drop_front(count + 1)
        if kept and self._answers:
            self._append(kept)

    def note_use(self, position: int) -> None:
        """The answer around this position of the text had a right continuation."""
        index = bisect_right(self._answers, position, key=itemgetter(0)) - 1
        if index >= 0:
            self._used.add(self._answers[index][0])
