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
