"""Fused layers with e4m3 weights give the bits of plain ones; here in torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.checkpoint.source import locate
from paceline.kernels.fp8.reference import Fp8Weight, fp8_linear, quantise_rows, quantise_weight
from paceline.layers.linear import Linear
from paceline.models.families import read_spec
from paceline.models.fused_fp8 import Fp8Layers
from paceline.models.loading import load_decoder
from paceline.models.reader import WeightFormats
from paceline.models.weights import open_weights
from tests.models.test_decoder import CPU, paged_logits
from tests.tiny import FAMILIES, VOCAB, save_tiny


class RoundedLinear:
    """A product of e4m3 weights whose rows are rounded in between."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_dtype = torch.float32

    def __call__(self, x_TD: Tensor) -> Tensor:
        rows = quantise_rows(x_TD, self.weight.is_blocked)
        return fp8_linear(rows, self.weight, self.bias, self.out_dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


@pytest.mark.parametrize("is_blocked", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3-moe"])
@torch.no_grad()
def test_fused_layers_give_the_logits_of_plain_ones(
    tmp_path: Path, family: str, is_blocked: bool
) -> None:
    def linear(weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
        return RoundedLinear(quantise_weight(weight_NK, is_blocked), bias_N)

    formats = WeightFormats(linear, torch.float32, torch.float32, CPU, has_fixed_shapes=True)
    save_tiny(tmp_path, family)
    files = locate(str(tmp_path))
    weights = open_weights(files)
    try:
        model = load_decoder(read_spec(files.config), weights, formats, max_model_len=256)
    finally:
        weights.close()
    assert isinstance(model.fused, Fp8Layers)
    ids = torch.randint(3, VOCAB, (60,))
    pieces = [40, 1, 5, 14]
    found = paged_logits(model, ids, pieces)
    model.fused = None
    assert torch.equal(found, paged_logits(model, ids, pieces))
