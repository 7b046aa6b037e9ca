"""Which tests run when. CONTRIBUTING.md says what each tier is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def first_or_more(values: Iterable[T], is_first: Callable[[T], bool]) -> list[Any]:
    """Parameters of a test: those that `is_first` chooses are in `make test`, all others repeat the
    same rule and are in `make test-more`."""
    more = [pytest.mark.more]
    return [
        pytest.param(*value, marks=[] if is_first(value) else more)
        if isinstance(value, tuple)
        else pytest.param(value, marks=[] if is_first(value) else more)
        for value in values
    ]


def by_number(*, first: int, more: int, slow: int, known: Iterable[int] = ()) -> list[Any]:
    """Numbers from 0 on as parameters of a test. The first ones are in `make test`, `more` further
    ones in `make test-more`, and `slow` in `make test-all`. Numbers that are `known` to have found
    a fault are in `make test`."""
    marks: dict[int, Any] = {i: [] for i in (*range(first), *known)}
    for number in range(first + more + slow):
        marks.setdefault(number, pytest.mark.more if number < first + more else pytest.mark.slow)
    return [pytest.param(number, marks=found) for number, found in marks.items()]
