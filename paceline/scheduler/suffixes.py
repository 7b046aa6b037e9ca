"""Finds how a sequence may go on: what followed earlier occurrences of its last tokens.

This is suffix decoding without a tree. Texts keep, for each position, the previous position with
the same last tokens. Following these links gives the occurrences, newest first. Their common
endings with the sequence are what a suffix tree would have as nodes and counts. To add a token
costs a few dictionary operations, whatever the depth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from paceline.step import Longs

# Occurrences that are looked at. In a tree the counts are of all, so a text that says the same
# thing in many ways may get another continuation there.
MOST_OCCURRENCES = 8
_END = -1  # between two answers
_MANY = 64  # with at least this many tokens sorting is faster


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

    text: Text
    at: int  # may have been dropped meanwhile
    length: int  # equal tokens before it, at most the depth
    likely: int
    score: float  # the expected number of right ones among them

    def tokens(self, skipped: int, count: int) -> list[int]:
        """`count` tokens after the first `skipped` ones, or as many as there are."""
        place = self.at - self.text.base + skipped
        if place < 0:
            return []
        tokens = self.text.tokens[place : place + count]
        return tokens[: tokens.index(_END)] if self.text.has_ends and _END in tokens else tokens


class Text:
    """Tokens, and links between positions with the same last tokens."""

    def __init__(self, width: int, *, has_ends: bool = False) -> None:
        self.has_ends = has_ends  # it consists of several answers
        self.tokens: list[int] = []
        self._links: list[int] = []  # the previous position with the same key, or less than 0
        self._newest: dict[int, int] = {}  # by key
        self._width = width
        self.base = 0  # positions of tokens that were dropped at the front

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def ends_as_before(self) -> bool:
        """Whether the last tokens, as many as a key has, were there before."""
        return bool(self._links) and self._links[-1] >= 0

    def extend(self, more: Sequence[int]) -> None:
        if len(more) > _MANY:
            self._extend_sorted(np.array(more, np.int64))
            return
        tokens, links, newest, at = self.tokens, self._links, self._newest, len(self.tokens)
        is_pair, base = self._width == 2, self.base
        last = tokens[-1] if tokens else _END
        for position, token in enumerate(more, base + at):
            key = (last << 32) + token if is_pair else token
            links.append(newest.get(key, -1))
            newest[key] = position
            tokens.append(token)
            last = token

    def _extend_sorted(self, more_N: Longs) -> None:
        """The same for many tokens, several times faster."""
        start = self.base + len(self.tokens)
        last = self.tokens[-1] if self.tokens else _END
        key_N = more_N.copy()
        if self._width == 2:
            key_N[1:] += more_N[:-1] << 32
            key_N[0] += last << 32
        order_N = np.argsort(key_N, kind="stable")
        sorted_N = key_N[order_N]
        is_first_N = np.ones(len(more_N), np.bool_)
        is_first_N[1:] = sorted_N[1:] != sorted_N[:-1]
        link_N = np.empty(len(more_N), np.int64)
        link_N[order_N[1:]] = order_N[:-1] + start
        newest = self._newest
        first_F = order_N[is_first_N]
        link_N[first_F] = list(map(newest.get, key_N[first_F].tolist(), repeat(-1)))
        newest.update(zip(key_N.tolist(), range(start, start + len(more_N)), strict=True))
        self._links += link_N.tolist()
        self.tokens += more_N.tolist()

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
        position = self._newest.get(key, -1)
        tokens, links, base, end = self.tokens, self._links, self.base, len(self.tokens)
        found: list[tuple[int, int]] = []  # place after the occurrence, length of the match
        for _ in range(MOST_OCCURRENCES + 1):
            place = position - base
            if place < 0:
                break
            if place + 1 < end and tokens[place + 1] != _END:
                length = _common_ending(tokens, place, tail, rules.depth)
                if length >= rules.least_match:
                    found.append((place + 1, length))
            position = links[place]
        if not found:
            return None
        if len(found) == 1:
            return self._alone(*found[0], rules)
        return self._best(found, rules)

    def _alone(self, place: int, length: int, rules: LookupRules) -> Match:
        count = int(length * rules.factor)
        return Match(self, self.base + place, length, count, float(count))

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
        tokens, end = self.tokens, len(self.tokens)
        prob, score, count = 1.0, 0.0, 0
        while count < limit:
            if len(places) == 1:
                left = limit - count
                return Match(self, self.base + places[0], length, limit, score + prob * left)
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
        return Match(self, self.base + places[0], length, count, score)


def _common_ending(tokens: list[int], place: int, tail: list[int], depth: int) -> int:
    """Equal last tokens of tokens[: place + 1] and `tail`, at most `depth`."""
    most = min(depth, len(tail), place + 1)
    if tokens[place + 1 - most : place + 1] == tail[-most:]:
        return most
    length = 0
    while length < most and tokens[place - length] == tail[-1 - length]:
        length += 1
    return length


class PastAnswers:
    """The outputs of ended requests in one text, oldest first. Bounded by number and bytes.

    An answer that was used since it came is put at the end again instead of being dropped.
    """

    # By measurement (tests/scheduler/test_suffixes.py), links and keys included.
    BYTES_PER_TOKEN = 256

    def __init__(self, most: int, max_bytes: int, width: int) -> None:
        self.text = Text(width, has_ends=True)
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
