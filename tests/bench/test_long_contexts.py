"""Candidates for attention over long contexts compute what the kernel in use computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.interpreted import run_interpreted
from tests.kernels.test_triton_compiles import run_program


def check_tiny() -> None:
    from bench.long_contexts_gpu import main

    assert main(["--tiny"]) == 0


def check_pairs() -> None:
    """Every small case of attention with two blocks in every round of the loop."""
    import torch

    from bench.span_kernels import use_pairs
    from paceline.kernels.attention.triton.attend import paged_attention
    from tests.kernels.cases.attention import cases

    for case in cases():
        if case.is_large or any(word in case.name for word in ("prompt", "chunk", "mixed")):
            continue
        arguments = case.make(torch.device("cpu"), torch.float32)
        wanted = paged_attention(*arguments)
        with use_pairs():
            found = paged_attention(*arguments)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, msg=str(case))


@pytest.mark.more
def test_candidates_agree_with_the_reference() -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_tiny")


@pytest.mark.more
def test_two_blocks_at_once_agree_with_one() -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_pairs")


COMPILES = """
import torch
from triton.runtime import driver
from bench import long_contexts_gpu as bench
from bench.experts_gpu import compiling_only
from bench.gemm_tiles import NoGpu

driver.set_active(NoGpu())
cpu, failed = torch.device("cpu"), []
with compiling_only():
    for heads, candidates in (
        (bench.L8, bench.span_candidates()), (bench.GLM, bench.latent_candidates())
    ):
        problem = bench.Problem(heads, 2, 300, 1, cpu, torch.bfloat16)
        query, batch, (cache,) = problem.queries(), problem.batch(), problem.caches(1)
        for candidate in candidates:
            with candidate.in_use():
                candidate.prepare(batch, 2, heads)
                problem.call(query, cache, batch)
        bench.timed = lambda call, _: call(0)
        runner = bench.Runner.__new__(bench.Runner)
        runner.problem, runner._query, runner._batch, runner._caches = (
            problem, query, batch, [cache]
        )
        runner.read_us(4)
print("compiled")
"""


@pytest.mark.more
def test_every_candidate_compiles_for_hopper(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = run_program(COMPILES, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
