"""The fused layers of CUDA give the plain layers' logits, with either product; here in torch."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint.source import locate
from paceline.kernels.linear.tiles import Tile, default_tile
from paceline.layers.linear import CudaLinear, cuda_linear, for_logits
from paceline.models import fused_cuda
from paceline.models.decoder import Decoder
from paceline.models.families import read_spec
from paceline.models.fused_cuda import CudaLayers, Tiles
from paceline.models.loading import load_decoder
from paceline.models.reader import WeightFormats
from paceline.models.weights import open_weights
from tests.models.test_decoder import CPU, load, paged_logits
from tests.tiny import FAMILIES, VOCAB, save_tiny

FUSED = WeightFormats(cuda_linear(torch.float32, CPU), torch.float32, torch.float32, CPU)


def load_fused(folder: Path) -> Decoder:
    files = locate(str(folder))
    weights = open_weights(files)
    try:
        model = load_decoder(read_spec(files.config), weights, FUSED, max_model_len=256)
    finally:
        weights.close()
    assert isinstance(model.fused, CudaLayers)
    return model


# Which products are torch's: none, all, and each border between the two.
@pytest.mark.parametrize("torch_ends", [(), ("heads", "added", "gated"), ("added",), ("gated",)])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3.5"])
@torch.no_grad()
def test_fused_layers_give_the_logits_of_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, torch_ends: tuple[str, ...]
) -> None:
    def pick(end: str, n: int, k: int, num_rows: int, *_: Any) -> Tile | None:
        return None if end in torch_ends else default_tile(n, k, 64, torch.float32)

    monkeypatch.setattr(fused_cuda, "pick_tile", pick)
    save_tiny(tmp_path, family)
    ids = torch.randint(3, VOCAB, (90,))
    pieces = [40, 1, 5, 1, 43]
    wanted = paged_logits(load(tmp_path), ids, pieces)
    found = paged_logits(load_fused(tmp_path), ids, pieces)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-4)


@torch.no_grad()
def test_any_of_a_layers_products_may_be_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, FAMILIES[0])
    ids = torch.randint(3, VOCAB, (90,))
    pieces = [80, 1, 9]
    wanted = paged_logits(load(tmp_path), ids, pieces)
    tile = default_tile(64, 64, 64, torch.float32)
    for is_ours in product((False, True), repeat=4):
        tiles = Tiles(*(tile if x else None for x in is_ours))
        monkeypatch.setattr(
            CudaLayers, "_choose", lambda self, _, tiles=tiles: [tiles] * len(self._weights)
        )
        found = paged_logits(load_fused(tmp_path), ids, pieces)
        assert torch.allclose(found, wanted, rtol=1e-5, atol=5e-5), is_ours


@torch.no_grad()
def test_a_linear_of_few_rows_equals_one_of_many() -> None:
    linear = CudaLinear(torch.randn(48, 72), torch.randn(48))
    rows = torch.randn(100, 72)
    torch.testing.assert_close(linear(rows[:9]), linear(rows)[:9])


@torch.no_grad()
def test_logits_are_fp32_with_either_product() -> None:
    head = for_logits(CudaLinear(torch.randn(48, 72).half(), None))
    rows = torch.randn(100, 72).half()
    assert head(rows[:3]).dtype == head(rows).dtype == torch.float32
    torch.testing.assert_close(head(rows[:3]), head(rows)[:3], atol=0.02, rtol=0.002)
