"""Tiny checkpoints that the drafter tests share, made once per session."""

from __future__ import annotations

import pytest

from tests.e2e.ladder import Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("drafters"))
