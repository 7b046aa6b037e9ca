"""Every Triton kernel agrees with its torch reference: interpreted here, for real on a GPU."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.gpu.device import is_hopper
from tests.kernels.cases.pairs import TritonCase, all_triton_cases, check
from tests.kernels.interpreted import run_interpreted, small_cases
from tests.tiers import first_or_more

SMALL = sorted({(case.operation, str(dtype)) for case, dtype in small_cases()})


def is_first(pair: tuple[str, str]) -> bool:
    """float32 where a kernel has it: there rounding hides least."""
    operation, dtype = pair
    return dtype == "torch.float32" or (operation, "torch.float32") not in SMALL


@pytest.mark.parametrize(("operation", "dtype"), first_or_more(SMALL, is_first))
def test_interpreted_kernel_agrees_with_its_reference(operation: str, dtype: str) -> None:
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.interpreted:check_pairs", operation, dtype)


def test_every_operation_with_a_kernel_has_a_small_case() -> None:
    assert {case.operation for case in all_triton_cases()} == {name for name, _ in SMALL}


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(all_triton_cases()), ids=str)
def test_kernel_agrees_with_its_reference_on_the_gpu(case: TritonCase) -> None:
    device = torch.device("cuda")
    if case.backend == "hopper" and not is_hopper(device):
        pytest.skip("made for another GPU")
    for dtype in case.dtypes:
        check(case, device, dtype)
