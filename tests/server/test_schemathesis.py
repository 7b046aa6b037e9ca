"""Random requests by /openapi.json: none is answered 5xx, none hangs."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest

from tests.server.fake_client import FakeClient
from tests.server.serving import serving

schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = 25  # of each operation
WITHIN_S = 20.0


@pytest.mark.more
@pytest.mark.timeout(240)
def test_no_request_of_the_described_kind_fails_the_server() -> None:
    from schemathesis.checks import not_a_server_error

    with serving(FakeClient()) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        called = set()
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.label == "GET /v1/live":
                continue  # it ends when the viewer leaves; tests/server/test_live.py reads it
            called.add(operation.label)

            @hypothesis.given(case=operation.as_strategy())
            @hypothesis.settings(
                max_examples=EXAMPLES,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            def call(case: Any) -> None:
                case.call_and_validate(checks=[not_a_server_error], timeout=WITHIN_S)

            call()
        assert "POST /v1/responses" in called
        assert server.get("/health").status == 200
        assert server.chat().status == 200
