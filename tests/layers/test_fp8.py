"""Linears in e4m3: the CPU's equal the reference, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.kernels.fp8.reference import fp8_linear as multiply
from paceline.kernels.fp8.reference import quantise_rows, quantise_weight
from paceline.kernels.table import has_numba
from paceline.layers import fp8
from paceline.layers.fp8 import Fp8Linear, fp8_linear, rounded_linear
from paceline.layers.linear import exact_linear, narrow_panels, packed_fp16_works
from paceline.models.matrix import divided, joined, ordered

CPU = torch.device("cpu")


def numbers(*shape: int, seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random) * torch.rand(shape[0], 1, generator=random)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_blocked", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (200, 300), (7, 130)])
def test_the_cpu_computes_what_the_reference_does(
    outputs: int, inputs: int, is_blocked: bool, has_bias: bool
) -> None:
    x_TK, weight_NK = numbers(9, inputs), numbers(outputs, inputs, seed=2)
    bias_N = numbers(1, outputs, seed=3)[0] if has_bias else None
    weight = quantise_weight(weight_NK, is_blocked)
    wanted = multiply(quantise_rows(x_TK, is_blocked), weight, bias_N, torch.float32)
    for make in (rounded_linear(exact_linear(CPU)), fp8_linear(torch.float32, CPU)):
        found = make(weight, bias_N)(x_TK)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    plain = torch.nn.functional.linear(x_TK, weight_NK, bias_N)
    assert 0.005 < float((wanted - plain).norm() / plain.norm()) < 0.1


@pytest.mark.parametrize("is_blocked", [False, True])
@pytest.mark.parametrize("kind", ["rounded", "reference"])
def test_the_bits_of_a_row_depend_on_that_row_alone(kind: str, is_blocked: bool) -> None:
    if kind == "rounded" and not has_numba(CPU):
        pytest.skip("needs numba: torch's products depend on the number of rows")
    make = rounded_linear(narrow_panels) if kind == "rounded" else fp8_linear(torch.float32, CPU)
    linear = make(quantise_weight(numbers(160, 264, seed=2), is_blocked), None)
    x_TK = numbers(50, 264)
    whole = linear(x_TK)
    for count in (1, 2, 13, 37):
        assert torch.equal(linear(x_TK[:count].contiguous()), whole[:count])


@pytest.mark.parametrize("has_packed", [False, True])
def test_without_vector_kernels_torch_multiplies_codes(
    has_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x_TK = quantise_weight(numbers(64, 96, seed=2), False), numbers(5, 96)
    wanted = multiply(quantise_rows(x_TK, False), weight, None, torch.float32)
    if has_packed and not packed_fp16_works():
        pytest.skip("needs FBGEMM's fp16 product")
    monkeypatch.setattr(fp8, "has_numba", lambda device: False)
    monkeypatch.setattr(fp8, "packed_fp16_works", lambda: has_packed)
    found = rounded_linear(exact_linear(CPU))(weight, None)(x_TK)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_results_have_the_type_that_was_asked_for() -> None:
    linear = fp8_linear(torch.bfloat16, CPU)(quantise_weight(numbers(8, 16), False), None)
    assert isinstance(linear, Fp8Linear)
    assert linear(numbers(2, 16).bfloat16()).dtype == torch.bfloat16
    assert linear.nbytes == 8 * 16 + 8 * 4


# ---- matrices before they are linears


def test_rows_in_another_order_take_their_blocks_along() -> None:
    matrix = quantise_weight(numbers(256, 40), True)
    swapped = ordered(matrix, lambda rows: torch.cat((rows[128:].flip(0), rows[:128])))
    assert swapped is not None
    assert torch.equal(swapped.scale, matrix.scale.flip(0))
    assert torch.equal(swapped.codes_NK[0].float(), matrix.codes_NK[255].float())
    assert ordered(matrix, lambda rows: rows.roll(64, 0)) is None
    channels = ordered(quantise_weight(numbers(256, 40), False), lambda rows: rows.roll(64, 0))
    assert channels is not None
    assert torch.equal(channels.scale, quantise_weight(numbers(256, 40).roll(64, 0), False).scale)


def test_blocks_are_joined_and_divided_only_where_they_end() -> None:
    block, part = quantise_weight(numbers(128, 256), True), quantise_weight(numbers(60, 256), True)
    assert joined(block, part) is not None
    assert joined(part, block) is None
    assert joined(block, quantise_weight(numbers(60, 256), False)) is None
    assert joined(block, numbers(60, 256)) is None
    assert divided(block, 2, 0) is None
    halves = divided(block, 2, 1)
    assert halves is not None
    assert [x.scale.tolist() for x in halves if not isinstance(x, Tensor)] == [
        [[x]] for x in block.scale[0].tolist()
    ]
