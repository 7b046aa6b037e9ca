"""Looks up how running requests may go on, and offers it to the device as continuations.

After each commit, on the host, while the next step runs. Learns how often what was found was
right, by comparing it with the tokens that came, whichever drafts were verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np

from paceline.scheduler.adaptive import DraftLengths
from paceline.scheduler.continuations import Continuations, Offers
from paceline.scheduler.inflight import Flight, Rows, SlotTable
from paceline.scheduler.live_request import LiveRequest
from paceline.scheduler.step_cost import Doubles
from paceline.scheduler.suffixes import LookupRules, Match, OwnTexts, PastAnswers
from paceline.speculation import METHOD_ALIASES, SpeculativeConfig
from paceline.step import Bools, Ints, Longs, StepResult

INDEX_TOKENS = 4096  # prompt tokens that one commit indexes; longer prompts take several
TRUST = 4.0  # tokens after which a request's own rate counts as much as that of all
LONGEST_RATED = 16  # matches from here on have one rate
FADE_ROW, FADE_ALL = 64.0, 2048.0  # sums are halved above this


class _Rates:
    """Right tokens among those that were compared, older ones counting less; many at once."""

    def __init__(self, right_N: Doubles, tried_N: Doubles, most: float) -> None:
        self.right_N, self.tried_N, self._most = right_N, tried_N, most

    def add(self, index_R: Rows, right_R: Longs, tried_R: Longs) -> None:
        """An index may occur more than once."""
        size = len(self.right_N)
        self.right_N += np.bincount(index_R, right_R, size)
        self.tried_N += np.bincount(index_R, tried_R, size)
        is_much_N = self.tried_N > self._most
        if np.count_nonzero(is_much_N):
            self.right_N[is_much_N] *= 0.5
            self.tried_N[is_much_N] *= 0.5


@dataclass(slots=True)
class _Row:
    """A request in a slot."""

    prompt_len: int
    past: Match | None = None  # a match in past answers


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
        # By length of the match. Longer ones are right more often.
        length_M = np.arange(LONGEST_RATED + 1.0)
        self._rates = _Rates(8.0 * length_M / (length_M + 1), np.full_like(length_M, 8.0), FADE_ALL)
        slots = table.num_slots
        self._row_rates = _Rates(np.zeros(slots), np.zeros(slots), FADE_ROW)
        # By slot, what should follow the committed tokens: guess_SC, -1 behind its end. It is what
        # the request itself has at from_S and after; -1: it has no match, or one in past answers.
        self._guess_SC = np.full((slots, continuations.longest), -1, np.int32)
        self._index_C = np.arange(continuations.longest)
        self._from_S = np.full(slots, -1, np.int64)
        self._limit_S = np.zeros(slots, np.int64)  # tokens that are likely
        self._length_S = np.zeros(slots, np.int64)  # of the match
        self._followed_S = np.zeros(slots, np.int64)  # tokens that came since, as it said
        # Drafts of a step; 0: nothing is looked up. With the spare row: see SlotTable.
        self._most_S = np.zeros(slots + 1, np.int64)
        self._texts = OwnTexts(table.tokens_SL, self._rules.width)
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
            prompt_len, slot = len(live.request.prompt_token_ids), live.slot
            self._rows[slot] = _Row(prompt_len)
            self._texts.start(slot, live.max_len)
            self._most_S[slot], self._from_S[slot], self._guess_SC[slot] = most, -1, -1
            self._row_rates.right_N[slot] = self._row_rates.tried_N[slot] = 0.0
        return 0 if method == self._method else asked

    def leave(self, live: LiveRequest, *, is_over: bool) -> None:
        """The request leaves its slot. If it is over, its output may be remembered."""
        row = self._rows.pop(live.slot, None)
        if row is not None:
            self._most_S[live.slot] = 0
        if is_over and row is not None and self._past is not None:
            self._past.add(self._table.committed_tokens(live.slot)[row.prompt_len :].tolist())

    # ---- after a commit

    def commit(self, flight: Flight, result: StepResult) -> None:
        """The result is in the table, and requests that ended have left their slots."""
        if not self._rows:
            return
        slot_R, count_R, token_RW = flight.slots, result.count_B, result.token_BW
        is_on_R = (self._most_S.take(slot_R) > 0) & (count_R > 0)
        if np.count_nonzero(is_on_R) < len(slot_R):
            slot_R, count_R, token_RW = slot_R[is_on_R], count_R[is_on_R], token_RW[is_on_R]
        length_R = self._table.committed_S.take(slot_R).astype(np.int64)
        is_right_R = self._compare(slot_R, count_R, token_RW)
        self._followed_S[slot_R] += count_R
        from_R = self._from_S.take(slot_R)
        # A match at the very end says nothing. Those in past answers are followed one by one.
        goes_on_R = is_right_R & (from_R >= 0) & (from_R + count_R < length_R)
        self._from_S[slot_R] = np.where(goes_on_R, from_R + count_R, -1)
        if np.count_nonzero(goes_on_R) < len(slot_R):
            ended_R = (~goes_on_R).nonzero()[0]
            self._guess_SC[slot_R[ended_R]] = -1
            self._search(slot_R[ended_R], length_R[ended_R], is_right_R[ended_R])
        self._copy_guesses(slot_R, length_R)
        self._offer(slot_R, length_R)

    def _compare(self, slot_R: Rows, count_R: Ints, token_RW: Ints) -> Bools:
        """Count which guesses were right. Returns where all new tokens were."""
        width = min(token_RW.shape[1], self._guess_SC.shape[1])
        guess_RW, token_RW = self._guess_SC[slot_R, :width], token_RW[:, :width]
        is_guess_RW = (guess_RW >= 0) & (self._index_C[:width] < count_R[:, None])
        right_R = np.logical_and.accumulate(is_guess_RW & (guess_RW == token_RW), axis=1).sum(1)
        at = is_guess_RW[:, 0].nonzero()[0]
        if len(at):
            right_M, slot_M = right_R[at], slot_R[at]
            tried_M = right_M + (right_M < is_guess_RW[at].sum(axis=1))
            self._row_rates.add(slot_M, right_M, tried_M)
            length_M = np.minimum(self._length_S.take(slot_M), LONGEST_RATED)
            self._rates.add(length_M, right_M, tried_M)
        if self._past is not None:
            for slot in slot_R[right_R > 0].tolist():
                if (match := self._rows[slot].past) is not None:
                    self._past.note_use(match.at)
        all_right_R: Bools = right_R == count_R
        return all_right_R

    def _search(self, slot_R: Rows, length_R: Longs, is_right_R: Bools) -> None:
        """Find what should follow the new tokens."""
        if self._past is not None:
            pairs = zip(slot_R.tolist(), is_right_R, strict=True)
            is_over_R = [not self._goes_on(*pair) for pair in pairs]
            slot_R, length_R = slot_R[is_over_R], length_R[is_over_R]
        stop_R, num_R = length_R, self._texts.num_S.take(slot_R)
        if int((length_R - num_R).sum()) > INDEX_TOKENS:
            before_R = (length_R - num_R).cumsum() - length_R + num_R
            stop_R = np.minimum(length_R, num_R + np.maximum(INDEX_TOKENS - before_R, 0))
        at_R = self._texts.extend(slot_R, stop_R)
        is_known_R = stop_R == length_R  # else its prompt is not indexed yet
        if self._past is None:
            is_known_R &= at_R >= 0
        known = is_known_R.nonzero()[0]
        slot_R, at_R, length_R = slot_R[known], at_R[known], length_R[known]
        if self._past is None and len(slot_R):
            match_R = self._texts.alone(slot_R, at_R, length_R, self._rules.depth)
            is_new_R = match_R >= self._rules.least_match
            new_R = slot_R[is_new_R]
            self._from_S[new_R], self._length_S[new_R] = at_R[is_new_R] + 1, match_R[is_new_R]
            self._limit_S[new_R], self._followed_S[new_R] = self._guess_SC.shape[1], 0
            slot_R, at_R, length_R = (x_R[match_R == 0] for x_R in (slot_R, at_R, length_R))
        for slot, at, length in zip(slot_R.tolist(), at_R.tolist(), length_R.tolist(), strict=True):
            if (match := self._find(slot, at, length)) is not None:
                self._found(slot, match)

    def _goes_on(self, slot: int, is_right: bool) -> bool:
        """Whether the request's match in past answers does."""
        row = self._rows[slot]
        if is_right and row.past is not None and self._guess_past(slot, row.past):
            return True
        row.past = None
        return False

    def _found(self, slot: int, match: Match) -> None:
        self._length_S[slot] = match.length
        is_limited = match.likely < int(match.length * self._rules.factor)
        self._limit_S[slot] = match.likely if is_limited else self._guess_SC.shape[1]
        self._followed_S[slot] = 0
        if match.text is None:
            self._from_S[slot] = match.at
        else:
            self._rows[slot].past = match
            self._guess_past(slot, match)

    def _guess_past(self, slot: int, match: Match) -> bool:
        """Guess what a past answer goes on with. False: it is over."""
        followed, most = int(self._followed_S[slot]), self._guess_SC.shape[1]
        most = most if followed else min(most, int(self._limit_S[slot]))
        tokens = match.tokens(followed, most)
        self._guess_SC[slot, : len(tokens)] = tokens
        return bool(tokens)

    def _find(self, slot: int, at: int, length: int) -> Match | None:
        """In the request itself, where its last tokens occurred before at `at`, and elsewhere."""
        match = self._texts.find(slot, at, length, self._rules) if at >= 0 else None
        if self._past is not None and length >= self._rules.least_match:
            first = max(length - self._rules.depth, 0)
            tail = self._table.tokens_SL[slot, first:length].tolist()
            other = self._past.text.find(tail, self._rules)
            if other is not None and (match is None or other.score > match.score):
                return other
        return match

    def _copy_guesses(self, slot_R: Rows, length_R: Longs) -> None:
        """Of matches in the requests themselves. At the end of a sequence they go round, as in a
        loop."""
        at = (self._from_S.take(slot_R) >= 0).nonzero()[0]
        if not len(at):
            return
        slot_M, length_M, index_C = slot_R.take(at), length_R.take(at), self._index_C
        from_M = self._from_S.take(slot_M)
        at_MC = from_M[:, None] + index_C % (length_M - from_M)[:, None]
        guess_MC = self._table.tokens_SL[slot_M[:, None], at_MC]
        is_first_M = self._followed_S.take(slot_M) == 0
        is_cut_MC = (index_C >= self._limit_S.take(slot_M)[:, None]) & is_first_M[:, None]
        self._guess_SC[slot_M] = np.where(is_cut_MC, -1, guess_MC)

    def _offer(self, slot_R: Rows, length_R: Longs) -> None:
        """Decide how much of the continuations a step may verify. A drafter is expected to have
        `expected_R` drafts accepted instead."""
        has_R = self._guess_SC[:, 0].take(slot_R) >= 0
        without = slot_R[~has_R]
        self._continuations.drop_looked_up(without)
        self._draft_lengths.use_S[without] = 1.0
        if len(without) == len(slot_R):
            return
        slot_R, length_R = slot_R[has_R], length_R[has_R]
        guess_RC = self._guess_SC[slot_R]
        num_R = (guess_RC >= 0).sum(axis=1)
        rate_R = self._rate(slot_R)
        known_R = self._length_S.take(slot_R) + self._followed_S.take(slot_R)
        known_R = np.minimum(known_R, self._rules.depth)
        most_R = np.maximum(((known_R + 1) * self._rules.factor).astype(np.int64), 1)
        most_R = np.minimum(most_R, self._most_S.take(slot_R))
        if self._is_adaptive:
            worth = log(self._draft_lengths.least_worth)
            most_R = np.minimum(most_R, (worth / np.log(rate_R)).astype(np.int64))
        least_R, is_offered_R = np.ones_like(most_R), most_R > 0
        if self._draft_lengths.max_k:
            expected_R = self._draft_lengths.expected(slot_R).astype(np.float64)
            least_R = least_drafts(rate_R, expected_R)
            is_offered_R = (least_R > 0) & (least_R <= np.minimum(most_R, num_R))
            # The drafter drafts for the step after the next. If both of them take the continuation
            # and all of it is right, that step takes it too.
            is_long_R = is_offered_R & (num_R == guess_RC.shape[1])
            self._draft_lengths.use_S[slot_R] = 1.0 - is_long_R * rate_R ** (2 * (most_R + 1))
        end_R = (length_R + num_R) * is_offered_R
        self._continuations.offer_all(Offers(slot_R, length_R, guess_RC, end_R, most_R, least_R))

    def _rate(self, slot_R: Rows) -> Doubles:
        """How often a token of each continuation is right if those before it are."""
        known_R = np.minimum(self._length_S.take(slot_R), LONGEST_RATED)
        of_all_R = (self._rates.right_N / self._rates.tried_N).take(known_R)
        own = self._row_rates
        rate_R = own.right_N.take(slot_R) + TRUST * of_all_R
        rate_R /= own.tried_N.take(slot_R) + TRUST
        clipped_R: Doubles = rate_R.clip(0.001, 0.999)
        return clipped_R


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


def least_drafts(rate_R: Doubles, expected_R: Doubles) -> Longs:
    """The fewest drafts, each right with this rate, of which more than expected are right in a row
    on average; 0: there is no such number."""
    left_R = 1.0 - expected_R * (1.0 - rate_R) / rate_R
    count_R = np.ceil(np.log(np.maximum(left_R, 1e-300)) / np.log(rate_R))
    least_R: Longs = np.where(left_R > 0.0, np.maximum(count_R, 1.0), 0.0).astype(np.int64)
    return least_R
