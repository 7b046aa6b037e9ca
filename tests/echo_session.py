"""Commands on the echo engine instead of a model: every answer repeats its prompt."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from paceline.commands import loading, session
from paceline.engine.client import EngineClient
from paceline.engine.front import Front
from tests.engine.echo_client import FACTORY, echo_front


class PlainTemplate:
    """A chat template that puts the messages one after the other."""

    def render(self, messages: list[dict[str, Any]], **_: Any) -> str:
        return "".join(f"{m['role']}:{m['content']}|" for m in messages)


def use_echo(monkeypatch: pytest.MonkeyPatch, front: Front | None = None) -> None:
    """From now on commands start the echo engine; MODEL is its behaviour (tests/engine)."""
    start = partial(
        EngineClient.start, in_process=True, factory=FACTORY, front=front or echo_front()
    )
    monkeypatch.setattr(loading, "start_engine", start)
    monkeypatch.setattr(loading, "check_model", lambda config: None)
    monkeypatch.setattr(session.Session, "chat_template", PlainTemplate())
