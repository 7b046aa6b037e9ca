"""Taps are transformers' hidden states between the layers, in every implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.checkpoint.source import locate
from paceline.kernels.table import has_numba
from paceline.layers.linear import LinearFormat, cuda_linear, dense, panels_fp32
from paceline.models.decoder import Decoder
from paceline.models.families import read_spec
from paceline.models.layout import add_storage, lay_out
from paceline.models.loading import load_decoder
from paceline.models.reader import WeightFormats
from paceline.models.weights import open_weights
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from tests.eagle3 import tapped
from tests.tiny import VOCAB, save_tiny

CPU = torch.device("cpu")
NUM_LAYERS = 8
TAPS = ((2, 4, 5), (0, 8, 3), (7, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("taps")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return save_tiny(folder, "llama", num_hidden_layers=NUM_LAYERS)


def load(folder: Path, linear: LinearFormat) -> Decoder:
    files = locate(str(folder))
    formats = WeightFormats(linear, torch.float32, torch.float32, CPU)
    return load_decoder(read_spec(files.config), open_weights(files), formats, max_model_len=64)


def forward(
    model: Decoder, ids: torch.Tensor, taps: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    pages, slots = Pages(8, 8, 1, 64, CPU), Slots(1, 64, 0, VOCAB, CPU)
    layers = add_storage(pages, model.spec, torch.float32)
    pages.table_SP[0] = torch.tensor([3, 1, 7, 2, 0, 4, 5, 6])
    slots.tokens_SL[0, : len(ids)] = ids.int()
    at, count = np.array([0]), np.array([len(ids)])
    inputs = lay_out(slots, pages, at, at, count, model.spec.group_size)
    return model.forward_with_features(inputs, layers, taps)


@pytest.mark.parametrize("taps", TAPS, ids=str)
@pytest.mark.parametrize("how", ["loop", "cuda"])
@torch.no_grad()
def test_a_tap_is_the_residual_stream_after_so_many_layers(
    folder: Path, reference: Any, how: str, taps: tuple[int, ...]
) -> None:
    linear = {"loop": dense(torch.float32, CPU), "cuda": cuda_linear(torch.float32, CPU)}[how]
    model = load(folder, linear)
    assert (model.fused is None) == (how == "loop")
    ids = torch.randint(3, VOCAB, (40,))
    hidden_TD, tap_TD = forward(model, ids, taps)
    torch.testing.assert_close(tap_TD, tapped(reference, ids.tolist(), taps), rtol=1e-4, atol=2e-4)
    plain_TD, feature_TD = forward(model, ids, ())
    assert feature_TD is plain_TD, "no taps were asked for, but features were copied"
    torch.testing.assert_close(hidden_TD, plain_TD)


@pytest.mark.skipif(not has_numba(CPU), reason="the vector kernels need numba")
@pytest.mark.parametrize("taps", TAPS, ids=str)
@torch.no_grad()
def test_layers_in_one_call_give_the_same_taps_to_the_bit(
    folder: Path, reference: Any, taps: tuple[int, ...]
) -> None:
    """One call becomes several; neither the taps nor the hidden states show it."""
    model = load(folder, panels_fp32)
    assert model.fused is not None
    ids = torch.randint(3, VOCAB, (40,))
    hidden_TD, tap_TD = forward(model, ids, taps)
    assert torch.equal(hidden_TD, forward(model, ids, ())[0])
    model.fused = None
    assert torch.equal(tap_TD, forward(model, ids, taps)[1])
    torch.testing.assert_close(tap_TD, tapped(reference, ids.tolist(), taps), rtol=1e-4, atol=2e-4)
