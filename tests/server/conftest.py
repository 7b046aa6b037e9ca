"""Servers for the tests of this folder: one that answers "Hello" to every request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.fake_client import FakeClient
from tests.server.serving import Served, serving


@pytest.fixture(scope="module")
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture(scope="module")
def server(client: FakeClient) -> Iterator[Served]:
    with serving(client) as served:
        yield served
