"""Every Triton kernel agrees with its torch twin: by the interpreter here, for real on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from paceline.kernels.triton_cases import TritonCase, all_triton_cases, check

# The interpreter computes on raw bits in bf16 and is silently wrong there.
INTERPRETED = (torch.float32, torch.float16)

PROGRAM = """
import sys, torch
import tests.kernels.mend_interpreter
from paceline.kernels.triton_cases import all_triton_cases, check
from tests.kernels.test_triton_pairs import INTERPRETED
failed = count = 0
for case in all_triton_cases():
    if case.is_large or not str(case).startswith(sys.argv[1]):
        continue
    for dtype in case.dtypes:
        if dtype in INTERPRETED:
            count += 1
            try:
                check(case, torch.device("cpu"), dtype)
            except Exception as error:
                failed += 1
                print(f"FAILED {case} {dtype}: {type(error).__name__}: {error}")
print(f"{count} cases")
sys.exit(bool(failed) or not count)
"""

KERNELS = sorted({case.kernel for case in all_triton_cases()})


@pytest.mark.parametrize("kernel", KERNELS)
def test_interpreted_kernel_agrees_with_its_reference(kernel: str) -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{kernel}-"],
        env={
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": ".",
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(all_triton_cases()), ids=str)
def test_kernel_agrees_with_its_reference_on_the_gpu(case: TritonCase) -> None:
    for dtype in case.dtypes:
        check(case, torch.device("cuda"), dtype)
