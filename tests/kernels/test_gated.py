"""Gate and up of many rows: who multiplies them."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.gpu.device import is_hopper
from paceline.kernels.linear import reference
from paceline.kernels.linear.reference import Product

WIDTH, INPUTS = 5632, 256  # 44 tiles for 128 rows


def operands(rows: int, device: str, bias: bool = False) -> tuple[torch.Tensor, Product]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, INPUTS, generator=generator)
    weight = torch.randn(2 * WIDTH, INPUTS, generator=generator) * INPUTS**-0.5
    added = torch.randn(2 * WIDTH, generator=generator) if bias else None
    parts = [None if p is None else p.to(device, torch.bfloat16) for p in (x, weight, added)]
    assert parts[0] is not None
    assert parts[1] is not None
    return parts[0], Product(parts[1], parts[2])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "bias", "is_ours"),
    [(1100, False, True), (5000, False, True), (900, False, False), (1100, True, False)],
)
def test_torch_and_the_kernel_agree_whoever_is_asked(rows: int, bias: bool, is_ours: bool) -> None:
    from paceline.kernels.linear import hopper
    from paceline.kernels.linear.triton import products

    x, product = operands(rows, "cuda", bias)
    is_ours &= is_hopper(x.device)
    assert hopper.is_faster(x, product) == is_ours
    torch.testing.assert_close(
        products.linear_silu(x, product), reference.linear_silu(x, product), atol=3e-2, rtol=3e-2
    )


def test_without_a_gpu_torch_multiplies() -> None:
    pytest.importorskip("triton")
    from paceline.kernels.linear import hopper

    assert not hopper.is_faster(*operands(1100, "cpu"))
