"""Greedy tokens equal transformers' under every pair of conditions; test-all runs the product."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from paceline.kernels.table import has_numba
from tests.e2e.ladder import Rung, Workshop, pairwise, product, run_rung

LAST_RUN = Path(__file__).parent.parent / "ladder_last_run.json"
Climb = Callable[[Rung], dict[str, int]]


def check(rung: Rung, workshop: Workshop) -> dict[str, int]:
    """Tokens are equal, and what the rung was meant to exercise happened."""
    tokens, seen = run_rung(rung, workshop)
    assert tokens == workshop.expected(rung.family)
    if rung.drafter != "none" and rung.request_k == "all":
        assert seen["accepted"] > 0, "no draft was ever accepted: nothing was proven"
        assert seen["accepted"] < seen["drafted"], "no draft was ever rejected"
    if rung.prefix_cache and rung.pool == "roomy":
        assert seen["cached"] > 0, "the shared prefix was never hit"
    if not rung.prefix_cache:
        assert seen["cached"] == 0
        # Shared pages may be enough for all, a window frees pages as it goes, and right drafts end
        # requests early. Without these a tight pool is always too small.
        if rung.pool == "tight" and rung.drafter == "none" and rung.family != "mixtral-window":
            assert seen["preemptions"] > 0, "the pool was not tight"
    return seen


@pytest.fixture(scope="module")
def climb(workshop: Workshop) -> Climb:
    """`check`, once per rung, whichever test asks first."""
    return cache(lambda rung: check(rung, workshop))


@pytest.mark.parametrize("rung", pairwise(), ids=str)
def test_greedy_tokens_equal_the_reference(rung: Rung, climb: Climb) -> None:
    climb(rung)


@pytest.mark.parametrize("has_drafts", [False, True])
def test_tight_pools_preempt(has_drafts: bool, climb: Climb) -> None:
    """Some of them: with drafts it depends on how many are right."""
    rungs = [rung for rung in tight_rungs(pairwise()) if (rung.drafter != "none") == has_drafts]
    assert any(climb(rung)["preemptions"] > 0 for rung in rungs)


def tight_rungs(rungs: list[Rung]) -> list[Rung]:
    return [rung for rung in rungs if rung.pool == "tight"]


def check_share(rungs: list[Rung]) -> tuple[list[str], int]:
    """What failed, and how many tight rungs preempted; for a process of its own."""
    failed, num_preempted = [], 0
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder))
        for rung in rungs:
            try:
                seen = check(rung, workshop)
                num_preempted += rung.pool == "tight" and seen["preemptions"] > 0
            except AssertionError as error:
                failed.append(f"{rung}: {str(error)[:200]}")
    return failed, num_preempted


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_greedy_tokens_equal_the_reference_for_the_whole_product() -> None:
    started = time.monotonic()
    rungs = product()
    num_workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(num_workers, get_context("spawn")) as pool:
        shares = [rungs[i::num_workers] for i in range(num_workers)]
        results = list(pool.map(check_share, shares))
    failed = [line for lines, _ in results for line in lines]
    num_tight = sum(rung.pool == "tight" for rung in rungs)
    num_preempted = sum(count for _, count in results)
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    report = {
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernels": "numba" if has_numba(torch.device("cpu")) else "torch references",
        "processes": num_workers,
        "rungs": len(rungs),
        "failed": failed,
        "tight_rungs": num_tight,
        "tight_rungs_that_preempted": num_preempted,
        "minutes": round((time.monotonic() - started) / 60, 1),
    }
    LAST_RUN.write_text(json.dumps(report, indent=1) + "\n")
    assert not failed
    # The scheduler avoids preemption where it can, and with few drafts it sometimes can.
    assert num_preempted >= 0.9 * num_tight
