"""Every Triton kernel agrees with its torch reference: interpreted here, for real on a GPU."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.gpu.device import is_hopper
from tests.kernels.cases.pairs import TritonCase, all_triton_cases, check
from tests.kernels.interpreted import run_interpreted

OPERATIONS = sorted({case.operation for case in all_triton_cases()})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_interpreted_kernel_agrees_with_its_reference(operation: str) -> None:
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.interpreted:check_pairs", operation)


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(all_triton_cases()), ids=str)
def test_kernel_agrees_with_its_reference_on_the_gpu(case: TritonCase) -> None:
    device = torch.device("cuda")
    if case.backend == "hopper" and not is_hopper(device):
        pytest.skip("made for another GPU")
    for dtype in case.dtypes:
        check(case, device, dtype)
