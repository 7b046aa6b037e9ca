"""Greedy tokens equal transformers' under every pair of conditions; test-all runs the product."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.ladder import Rung, Workshop, pairwise, product, run_rung

LAST_RUN = Path(__file__).parent.parent / "ladder_last_run.json"


def check(rung: Rung, workshop: Workshop) -> dict[str, int]:
    tokens, seen = run_rung(rung, workshop)
    assert tokens == workshop.expected(rung.family)
    if rung.pool == "tight":
        assert seen["preemptions"] > 0, "this rung was meant to preempt"
    if rung.drafter != "none" and rung.request_k == "all":
        assert seen["accepted"] > 0, "no draft was ever accepted: nothing was proven"
        assert seen["accepted"] < seen["drafted"], "no draft was ever rejected"
    if rung.prefix_cache and rung.pool == "roomy":
        assert seen["cached"] > 0, "the shared prefix was never hit"
    if not rung.prefix_cache:
        assert seen["cached"] == 0
    return seen


@pytest.mark.parametrize("rung", pairwise(), ids=str)
def test_greedy_tokens_equal_the_reference(rung: Rung, workshop: Workshop) -> None:
    check(rung, workshop)


@pytest.mark.slow
def test_greedy_tokens_equal_the_reference_for_the_whole_product(workshop: Workshop) -> None:
    started = time.monotonic()
    rungs = product()
    failed = []
    for rung in rungs:
        try:
            check(rung, workshop)
        except AssertionError as error:
            failed.append(f"{rung}: {str(error)[:200]}")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    minutes = round((time.monotonic() - started) / 60, 1)
    LAST_RUN.write_text(
        json.dumps(
            {"commit": commit, "rungs": len(rungs), "failed": failed, "minutes": minutes}, indent=1
        )
        + "\n"
    )
    assert not failed
