"""A sink that raises ends its own request, and its owner is told."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from paceline.engine.client import EngineClient
from paceline.engine.outputs import Delta
from paceline.errors import PacelineError, RequestFailed
from paceline.request import SamplingParams
from tests.engine.echo_client import (
    echo_client,
    pump_until,
    pump_until_finished,
    run,
    submit,
)


@pytest.fixture(scope="module")
def client() -> Iterator[EngineClient]:
    with echo_client() as client:
        yield client


def test_a_sink_that_raises_loses_its_own_request_only(
    client: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(deltas: list[Delta]) -> None:
        raise ValueError("no such file")

    ids = client.tokenizer.encode("abc")
    params = SamplingParams(max_tokens=50)
    told: list[PacelineError] = []
    with caplog.at_level(logging.ERROR, "paceline"):
        generation = client.submit("broken", ids, params, on_deltas=broken, on_error=told.append)
        healthy = submit(client, "healthy", "abc", max_tokens=6)
        pump_until_finished(client, healthy)
    assert healthy.text() == "abcabc"
    assert generation.finished
    assert "no such file" in caplog.text
    assert told == [generation.error]
    assert isinstance(told[0], RequestFailed)


def test_the_owner_of_a_sink_that_raises_at_the_last_delta_is_told(client: EngineClient) -> None:
    def broken(deltas: list[Delta]) -> None:
        if deltas[-1].finish_reason is not None:
            raise ValueError("no such file")

    told: list[PacelineError] = []
    ids = client.tokenizer.encode("abc")
    params = SamplingParams(max_tokens=3)
    client.submit("broken", ids, params, on_deltas=broken, on_error=told.append)
    pump_until(client, lambda: bool(told))
    assert run(client, "ab", max_tokens=2).text() == "ab"


def test_an_owner_that_raises_as_well_harms_no_other_request(client: EngineClient) -> None:
    def broken(anything: object) -> None:
        raise ValueError("no such file")

    ids = client.tokenizer.encode("abc")
    params = SamplingParams(max_tokens=50)
    client.submit("broken", ids, params, on_deltas=broken, on_error=broken)
    assert run(client, "ab", max_tokens=2).text() == "ab"
    assert client.num_open == 0
