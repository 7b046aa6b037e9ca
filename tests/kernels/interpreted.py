"""Checks of Triton kernels on machines without a GPU: interpreted, in a process of their own.

Triton reads TRITON_INTERPRET when it is imported: no process can do both.
"""

from __future__ import annotations

import tempfile
from importlib import import_module

import torch

from tests.kernels.cases.pairs import all_triton_cases, check
from tests.parallel.forks import Forked

# The interpreter computes on raw bits in bf16 and is silently wrong there.
INTERPRETED = (torch.float32, torch.float16)
TIMEOUT_S = 280


def run_interpreted(function: str, *arguments: str) -> None:
    """Call "module:function" where kernels are interpreted; what it raises fails the test."""
    with tempfile.TemporaryFile() as said:
        process = Forked(
            f"{__name__}:main",
            *(function, *arguments),
            descriptors=[(said.fileno(), 1), (said.fileno(), 2)],
            environment={"TRITON_INTERPRET": "1"},
        )
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
        said.seek(0)
        assert code == 0, said.read().decode()


def main(function: str, *arguments: str) -> None:
    import_module("tests.kernels.mend_interpreter")
    module, _, name = function.partition(":")
    getattr(import_module(module), name)(*arguments)


def check_pairs(operation: str) -> None:
    """Every small case of one operation."""
    failed, count = [], 0
    for case in all_triton_cases():
        if case.is_large or case.operation != operation:
            continue
        for dtype in set(case.dtypes) & set(INTERPRETED):
            count += 1
            try:
                check(case, torch.device("cpu"), dtype)
            except Exception as error:
                failed.append(f"FAILED {case} {dtype}: {type(error).__name__}: {error}")
    assert count
    assert not failed, "\n".join(failed)
