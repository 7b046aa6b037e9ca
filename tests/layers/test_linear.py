"""Packed fp16 products: a row's bits never depend on its neighbours; range and fallback."""

from __future__ import annotations

import logging

import pytest
import torch

from paceline.layers.linear import DenseLinear, PackedFp16Linear, packed_fp16, packed_fp16_works

needs_fbgemm = pytest.mark.skipif(not packed_fp16_works(), reason="no FBGEMM on this CPU")


@needs_fbgemm
def test_every_row_count_gives_each_row_the_same_bits() -> None:
    torch.manual_seed(0)
    layer = PackedFp16Linear(torch.randn(960, 576) * 0.05, None)
    rows = torch.randn(128, 576)
    whole = layer(rows)
    for count in range(1, 129):
        assert torch.equal(layer(rows[:count].contiguous()), whole[:count]), count
        last = layer(rows[128 - count :].contiguous())
        assert torch.equal(last, whole[128 - count :]), count


@needs_fbgemm
def test_only_the_weights_are_rounded() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(64, 48), torch.randn(64)
    x = torch.randn(5, 48)
    expected = x @ weight.half().float().T + bias
    torch.testing.assert_close(packed_fp16(weight, bias)(x), expected, rtol=1e-5, atol=1e-5)


def test_weights_beyond_fp16_fall_back_to_fp32_with_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = torch.ones(4, 4)
    weight[1, 2] = 1e6
    with caplog.at_level(logging.WARNING):
        layer = packed_fp16(weight, None)
    assert isinstance(layer, DenseLinear)
    assert "beyond fp16" in caplog.text
    assert layer(torch.ones(1, 4))[0, 1] == 1e6 + 3
