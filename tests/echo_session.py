"""Commands on the echo engine instead of a model: every answer repeats its prompt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from paceline.commands import session
from paceline.engine.client import EngineClient
from paceline.engine.front import Front
from tests.engine.echo_client import FACTORY, echo_front


class PlainTemplate:
    """A chat template that puts the messages one after the other."""

    def render(self, messages: list[dict[str, Any]], **_: Any) -> str:
        return "".join(f"{m['role']}:{m['content']}|" for m in messages)


class EchoClient:
    """Stands in for the class of `EngineClient`: `start` runs the echo engine in a thread."""

    def __init__(self, start: Callable[..., EngineClient]) -> None:
        self.start = start


def use_echo(monkeypatch: pytest.MonkeyPatch, front: Front | None = None) -> None:
    """From now on commands start the echo engine; MODEL is its behaviour (tests/engine)."""
    start = partial(
        EngineClient.start, in_process=True, factory=FACTORY, front=front or echo_front()
    )
    monkeypatch.setattr(session, "EngineClient", EchoClient(start))
    monkeypatch.setattr(session.Session, "chat_template", PlainTemplate())
