"""Every Triton kernel agrees with its torch twin: by the interpreter here, for real on a GPU."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.gpu import is_hopper
from paceline.kernels.triton_cases import TritonCase, all_triton_cases, check
from tests.kernels.interpreted import run_interpreted

KERNELS = sorted({case.kernel for case in all_triton_cases()})


@pytest.mark.parametrize("kernel", KERNELS)
def test_interpreted_kernel_agrees_with_its_reference(kernel: str) -> None:
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.interpreted:check_pairs", kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(all_triton_cases()), ids=str)
def test_kernel_agrees_with_its_reference_on_the_gpu(case: TritonCase) -> None:
    device = torch.device("cuda")
    if case.is_hoppers and not is_hopper(device):
        pytest.skip("made for another GPU")
    for dtype in case.dtypes:
        check(case, device, dtype)
