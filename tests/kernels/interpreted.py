"""Checks of Triton kernels on machines without a GPU: interpreted, in a process of their own.

Triton reads TRITON_INTERPRET when it is imported: no process can do both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import torch

from tests.kernels.cases.pairs import TOPICS, TritonCase, all_triton_cases, check
from tests.parallel.forks import Forked, Prepared

# The interpreter computes on raw bits in bf16 and is silently wrong there.
INTERPRETED = (torch.float32, torch.float16)
TIMEOUT_S = 280
PREPARED = Prepared(
    (
        "tests.kernels.mend_interpreter",
        __name__,
        *(f"tests.kernels.cases.{topic}" for topic in TOPICS),
        *("numpy.random", "torch.distributed.tensor"),  # torch imports them when it first compares
    ),
    (("TRITON_INTERPRET", "1"),),
)


def run_interpreted(function: str, *arguments: str) -> None:
    """Call "module:function" where kernels are interpreted; what it raises fails the test."""
    with tempfile.TemporaryFile() as said:
        process = Forked(
            function,
            *arguments,
            descriptors=[(said.fileno(), 1), (said.fileno(), 2)],
            prepared=PREPARED,
        )
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
        said.seek(0)
        assert code == 0, said.read().decode()


def small_cases() -> Iterator[tuple[TritonCase, torch.dtype]]:
    """All that can be interpreted."""
    for case in all_triton_cases():
        if not case.is_large:
            yield from ((case, dtype) for dtype in INTERPRETED if dtype in case.dtypes)


def check_pairs(operation: str, dtype: str) -> None:
    """Every small case of one operation in one type."""
    failed = []
    for case, each in small_cases():
        if (case.operation, str(each)) == (operation, dtype):
            try:
                check(case, torch.device("cpu"), each)
            except Exception as error:
                failed.append(f"FAILED {case}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
