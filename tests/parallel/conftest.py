"""Ranks of these tests are forks of one prepared process; checkpoints are made once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.ladder import Workshop
from tests.parallel.forks import forked_ranks


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def _forks() -> Iterator[None]:
    with forked_ranks():
        yield
