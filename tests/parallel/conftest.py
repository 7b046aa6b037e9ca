"""Ranks of these tests are forks of one prepared process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.forks import forked_ranks


@pytest.fixture
def _forks() -> Iterator[None]:
    with forked_ranks():
        yield
