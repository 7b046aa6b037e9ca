"""Looks up how running requests may go on, and offers it to the device as continuations.

After each commit, on the host, while the next step runs. Learns how often what was found was
right, by comparing it with the tokens that came, whichever drafts were verified.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, log

from paceline.scheduler.adaptive import DraftLengths
from paceline.scheduler.continuations import Continuations, Offers
from paceline.scheduler.inflight import Flight, SlotTable
from paceline.scheduler.live_request import LiveRequest
from paceline.scheduler.suffixes import LookupRules, Match, PastAnswers, Text
from paceline.speculation import METHOD_ALIASES, SpeculativeConfig
from paceline.step import StepResult

INDEX_TOKENS = 4096  # prompt tokens that one commit indexes; longer prompts take several
WORTH = 0.1  # a draft that is right less often costs more than it brings
_LOG_WORTH = log(WORTH)
TRUST = 4.0  # tokens after which a request's own rate counts as much as that of all
LONGEST_RATED = 16  # matches from here on have one rate
_FADE_ROW, _FADE_ALL = 64.0, 2048.0  # sums are halved above this
# Where a continuation is right this often, a row needs no drafts of the drafter behind it.
SURE = 0.9


@dataclass(slots=True)
class _Rate:
    """Right tokens among those that were compared, older ones counting less."""

    right: float = 0.0
    tried: float = 0.0

    def add(self, right: int, tried: int, most: float) -> None:
        self.right += right
        self.tried += tried
        if self.tried > most:
            self.right *= 0.5
            self.tried *= 0.5


@dataclass(slots=True)
class _Row:
    """A request in a slot."""

    text: Text
    most: int  # drafts of a step
    prompt_len: int
    match: Match | None = None
    num_followed: int = 0  # tokens that came since and were those of the match
    guess: list[int] = field(default_factory=list)  # what should follow the committed tokens
    rate: _Rate = field(default_factory=_Rate)


class Lookups:
    """Does nothing unless the configuration has a method that looks up on the host."""

    def __init__(
        self,
        speculative: SpeculativeConfig | None,
        table: SlotTable,
        continuations: Continuations,
        draft_lengths: DraftLengths,
    ) -> None:
        self._table = table
        self._continuations = continuations
        self._draft_lengths = draft_lengths
        self._rows: dict[int, _Row] = {}  # by slot
        self._past: PastAnswers | None = None
        self._method = None if speculative is None else speculative.host_method
        if speculative is None or self._method is None:
            return
        self._most = speculative.most_looked_up(continuations.most)
        self._is_adaptive = speculative.adaptive
        self._rules = _rules(speculative)
        # Longer matches are right more often.
        self._rates = [_Rate(8.0 * m / (m + 1), 8.0) for m in range(LONGEST_RATED + 1)]
        if most := speculative.suffix_decoding_max_cached_requests:
            self._past = PastAnswers(most, PAST_BYTES, self._rules.width)

    # ---- into a slot and out of it

    def start(self, live: LiveRequest) -> int | None:
        """A request takes a slot. Returns the drafts that it wants of the drafter; None: all."""
        params = live.request.params
        asked, method = params.num_speculative_tokens, (params.speculative or {}).get("method")
        if self._method is None:
            return asked
        method = METHOD_ALIASES.get(method or "", method)
        most = self._most if asked is None else min(asked, self._most)
        if most and method in (None, self._method):
            prompt_len = len(live.request.prompt_token_ids)
            self._rows[live.slot] = _Row(Text(self._rules.width), most, prompt_len)
        return 0 if method == self._method else asked

    def leave(self, live: LiveRequest, *, is_over: bool) -> None:
        """The request leaves its slot. If it is over, its output may be remembered."""
        row = self._rows.pop(live.slot, None)
        if is_over and row is not None and self._past is not None:
            self._past.add(self._table.committed_tokens(live.slot)[row.prompt_len :].tolist())

    # ---- after a commit

    def commit(self, flight: Flight, result: StepResult) -> None:
        """The result is in the table, and requests that ended have left their slots."""
        if not self._rows:
            return
        room, table, offers = INDEX_TOKENS, self._table, Offers(self._continuations.longest)
        lengths = table.all_committed_S.take(flight.slots).tolist()
        columns = (flight.slots.tolist(), result.count_B.tolist(), result.token_BW.tolist())
        expected_S = self._draft_lengths.expected()
        for slot, count, tokens, length in zip(*columns, lengths, strict=True):
            row = self._rows.get(slot)
            if row is None:
                continue
            text = row.text
            del tokens[count:]
            if len(text) == length - count:
                text.extend(tokens)
            else:  # its prompt is not indexed yet
                end = min(len(text) + room, length)
                room -= end - len(text)
                text.extend(table.tokens_SL[slot, len(text) : end].tolist())
            if count and len(text) == length:
                self._go_on(row, tokens)
                self._offer(offers, slot, row, length, expected_S[slot] if expected_S else 0.0)
        self._continuations.offer_all(offers)
        self._draft_lengths.is_sure_S[offers.slots] = offers.is_sure

    def _go_on(self, row: _Row, tokens: list[int]) -> None:
        """Find what should follow `tokens`, which have just come."""
        guess, match = row.guess, row.match
        if match is not None:
            count = min(len(tokens), len(guess))
            right = count if guess[:count] == tokens[:count] else _num_equal(guess, tokens)
            tried = right + (right < count)
            row.rate.add(right, tried, _FADE_ROW)
            self._rates[min(match.length, LONGEST_RATED)].add(right, tried, _FADE_ALL)
            if right and self._past is not None and match.text is self._past.text:
                self._past.note_use(match.at)
            if right == len(tokens):
                row.num_followed += right
                row.guess = self._tokens_of(match, row)
                if row.guess:
                    return
        row.match, row.num_followed = self._find(row.text), 0
        row.guess = [] if row.match is None else self._tokens_of(row.match, row)

    def _find(self, text: Text) -> Match | None:
        tail = text.tokens[-self._rules.depth :]
        if len(tail) < self._rules.least_match:
            return None
        match = text.find(tail, self._rules)
        if self._past is not None:
            other = self._past.text.find(tail, self._rules)
            if other is not None and (match is None or other.score > match.score):
                return other
        return match

    def _tokens_of(self, match: Match, row: _Row) -> list[int]:
        """The continuation. At the end of the sequence itself it goes round, as in a loop."""
        longest = self._continuations.longest
        if not row.num_followed and match.likely < int(match.length * self._rules.factor):
            longest = min(longest, match.likely)
        tokens = match.tokens(row.num_followed, longest)
        if 0 < len(tokens) < longest and match.text is row.text:
            tokens = (tokens * (longest // len(tokens) + 1))[:longest]
        return tokens

    def _offer(self, offers: Offers, slot: int, row: _Row, length: int, expected: float) -> None:
        """Decide how much of the row's continuation a step may verify. The drafter is expected to
        have `expected` drafts accepted instead."""
        match, guess = row.match, row.guess
        if match is None or not guess:
            offers.add_none(slot, length)
            return
        rate = self._rate(row, match)
        known = min(match.length + row.num_followed, self._rules.depth)
        most = min(row.most, max(int((known + 1) * self._rules.factor), 1))
        if self._is_adaptive:
            most = min(most, int(_LOG_WORTH / log(rate)))
        least = _least(rate, expected) if expected else 1
        if not 0 < least <= most:
            offers.add_none(slot, length)
            return
        is_sure = rate >= SURE and most > expected and len(guess) == offers.longest
        offers.add(slot, length, guess, (most, least), is_sure=is_sure)

    def _rate(self, row: _Row, match: Match) -> float:
        """How often a token of this continuation is right if those before it are."""
        known, own = min(match.length, LONGEST_RATED), row.rate
        of_all = self._rates[known]
        rate = (own.right + TRUST * of_all.right / of_all.tried) / (own.tried + TRUST)
        return min(max(rate, 0.001), 0.999)


# Links, keys and tokens of remembered answers in one replica.
PAST_BYTES = 64 << 20


def _rules(config: SpeculativeConfig) -> LookupRules:
    if config.host_method == "ngram":
        low, high = config.prompt_lookup_min, config.prompt_lookup_max
        return LookupRules(low, high, factor=1e6, min_prob=0.0)
    return LookupRules(
        depth=config.suffix_decoding_max_tree_depth,
        factor=config.suffix_decoding_max_spec_factor,
        min_prob=config.suffix_decoding_min_token_prob,
    )


def _num_equal(one: list[int], other: list[int]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _least(rate: float, expected: float) -> int:
    """The fewest drafts, each right with this rate, of which more than `expected` are right in a
    row on average; 0: there is no such number."""
    left = 1.0 - expected * (1.0 - rate) / rate
    if left <= 0.0:
        return 0
    return max(ceil(log(left) / log(rate)), 1)
