"""Lookups of suffixes: what is found equals a search by force; memory is bounded."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from paceline.scheduler.lookups import least_drafts
from paceline.scheduler.suffixes import (
    MOST_OCCURRENCES,
    LookupRules,
    OwnTexts,
    PastAnswers,
    Text,
)


def by_force(text: list[int], tail: list[int], rules: LookupRules) -> tuple[float, set[int]] | None:
    """The best score, and the lengths of the matches that reach it."""
    ends = [end for end in range(1, len(text)) if text[:end][-2:] == tail[-2:] and end >= 2]
    ends = ends[-MOST_OCCURRENCES:]
    scores: dict[int, float] = {}
    for length in range(2, min(rules.depth, len(tail)) + 1):
        places = [e for e in ends if e >= length and text[e - length : e] == tail[-length:]]
        prob, score, limit = 1.0, 0.0, int(length * rules.factor)
        for count in range(limit if places else 0):
            votes = Counter(text[p + count % (len(text) - p)] for p in places)
            token, number = max(
                votes.items(), key=lambda pair: (pair[1], text_order(text, places, count, pair[0]))
            )
            prob *= number / len(places)
            if prob < rules.min_prob:
                break
            score += prob
            places = [p for p in places if text[p + count % (len(text) - p)] == token]
        if score:
            scores[length] = score
    if not scores:
        return None
    best = max(scores.values())
    return best, {length for length, score in scores.items() if abs(score - best) < 1e-9}


def text_order(text: list[int], places: list[int], count: int, token: int) -> int:
    """Of tokens that are equally frequent, the one that followed last is taken."""
    return max(p for p in places if text[p + count % (len(text) - p)] == token)


@pytest.mark.parametrize("vocab", [2, 4, 12])
@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_a_text_finds_what_a_search_by_force_finds(vocab: int, factor: float) -> None:
    rng = random.Random(f"{vocab}/{factor}")
    num_found = 0
    for _ in range(150):
        tokens = [rng.randrange(vocab) for _ in range(rng.randint(2, 60))]
        rules = LookupRules(
            depth=rng.choice([2, 3, 8, 24]), factor=factor, min_prob=rng.choice([0.0, 0.1, 0.5])
        )
        text = Text(rules.width)
        for start in range(0, len(tokens), 7):
            text.extend(tokens[start : start + 7])
        tail = tokens[-rules.depth :]
        match, wanted = text.find(tail, rules), by_force(tokens, tail, rules)
        if match is None or not match.likely:
            assert wanted is None, (tokens, rules)
            continue
        num_found += 1
        assert wanted is not None
        score, lengths = wanted
        assert match.score == pytest.approx(score), (tokens, rules)
        assert match.length == max(lengths)
        assert tokens[match.at - 2 : match.at] == tail[-2:]
    assert num_found > 10


def test_running_requests_find_what_a_text_finds() -> None:
    """Several slots at once, in steps of different lengths; slots are used again."""
    rng, slots, longest = random.Random(4), 3, 80
    tokens_SL = np.zeros((slots, longest), np.int32)
    num_found = num_missed = 0
    for turn in range(60):
        width = 1 + turn % 2
        rules = LookupRules(least_match=width, depth=rng.choice([2, 3, 8, 24]))
        own, texts = OwnTexts(tokens_SL, width), [Text(width) for _ in range(slots)]
        for slot in range(slots):
            own.start(slot, longest)
            tokens_SL[slot] = [rng.randrange(rng.choice([3, 9])) for _ in range(longest)]
        stop_S = np.ones(slots, np.int64)
        while stop_S.max() < longest - 9:
            stop_S += [rng.randint(0, 1 + 8 * (rng.random() < 0.2)) for _ in range(slots)]
            at_S = own.extend(np.arange(slots), stop_S)
            lengths_S = own.alone(np.arange(slots), at_S.clip(0), stop_S, rules.depth)
            for slot, (text, stop, at) in enumerate(zip(texts, stop_S, at_S, strict=True)):
                text.extend(tokens_SL[slot, len(text) : stop].tolist())
                wanted = text.find(text.tokens[-rules.depth :], rules) if stop > width else None
                if at < 0:
                    num_missed += wanted is not None  # behind two links to other tokens
                    continue
                found = own.find(slot, int(at), int(stop), rules)
                assert found is not None
                assert wanted is not None
                assert found[1:] == wanted[1:]
                if lengths_S[slot]:
                    assert (found.at, found.length) == (at + 1, lengths_S[slot])
                num_found += 1
    assert num_found > 1000
    assert num_missed < 0.1 * num_found


def test_a_slot_forgets_the_request_before() -> None:
    tokens_SL = np.array([[5, 6, 7, 8, 9, 1, 2, 3]], np.int32)
    own, slot = OwnTexts(tokens_SL, 2), np.zeros(1, np.intp)
    own.start(0, 8)
    assert own.extend(slot, np.array([8])).tolist() == [-1]
    tokens_SL[0, :4] = 1, 2, 5, 6
    own.start(0, 8)
    assert own.extend(slot, np.array([4])).tolist() == [-1]
    tokens_SL[0, 4:6] = 1, 2
    assert own.extend(slot, np.array([6])).tolist() == [1]


def test_past_answers_are_found_until_others_take_their_place() -> None:
    rules = LookupRules()
    answers = PastAnswers(2, 1 << 20, rules.width)
    answers.add([1, 2, 3, 4, 5])
    answers.add([6, 7, 8, 9])
    found = answers.text.find([50, 1, 2], rules)
    assert found is not None
    assert found.tokens(0, 9) == [3, 4, 5]  # not into the next answer
    assert answers.text.find([4, 5], rules) is None
    answers.note_use(found.at)
    answers.add([11, 12, 13])  # the first answer was used, so the second one goes
    assert len(answers) == 2
    assert answers.text.find([6, 7], rules) is None
    assert found.tokens(0, 9) == []  # it moved
    again = answers.text.find([1, 2], rules)
    assert again is not None
    assert again.tokens(0, 9) == [3, 4, 5]
    answers.add([21, 22, 23])
    answers.add([31, 32, 33])
    assert answers.text.find([1, 2], rules) is None
    assert answers.text.find([31, 32], rules) is not None


@pytest.mark.parametrize("vocab", [4, 50_000])
def test_memory_of_past_answers_is_bounded(vocab: int) -> None:
    """Texts without repetitions need the most: each token has a key of its own."""
    limit = 4 << 20
    rng = random.Random(3)
    tracemalloc.start()
    try:
        answers = PastAnswers(100_000, limit, 2)
        for number in range(160):
            answers.add([rng.randrange(vocab) for _ in range(rng.randint(1, 400))])
            if number % 3 == 0:
                answers.note_use(answers.text.base + len(answers.text) - 2)
            assert len(answers.text) <= limit // PastAnswers.BYTES_PER_TOKEN
        assert 0 < len(answers) < 160
        assert tracemalloc.get_traced_memory()[0] <= limit
        text = answers.text
        assert all(at >= text.base for at in text._newest.values())
        answers.add([rng.randrange(vocab) for _ in range(100_000)])  # one that is too long is cut
        assert len(text) <= limit // PastAnswers.BYTES_PER_TOKEN
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("expected", [0.0, 0.3, 1.0, 2.5])
def test_a_continuation_must_be_long_enough_to_beat_the_drafter(
    rate: float, expected: float
) -> None:
    def right(count: int) -> float:
        return sum(rate**j for j in range(1, count + 1))

    least = int(least_drafts(np.array([rate]), np.array([expected]))[0])
    if not least:
        assert right(10_000) <= expected
    else:
        assert right(least) >= expected - 1e-9
        assert least == 1 or right(least - 1) < expected
