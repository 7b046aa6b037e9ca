"""With vector kernels a token's logits are equal to the bit in any batch, window or chunk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from paceline.checkpoint.source import locate
from paceline.layers.linear import LinearFormat, block_panels, narrow_panels, panels_fp32
from paceline.models.decoder import Decoder
from paceline.models.families import read_spec
from paceline.models.layout import lay_out
from paceline.models.loading import load_decoder
from paceline.models.reader import WeightFormats
from paceline.models.weights import open_weights
from paceline.state.pages import LayerPages, Pages
from paceline.state.slots import Slots
from tests.tiny import VOCAB, save_tiny

CPU = torch.device("cpu")
LENGTH = 300


def tiny(folder: Path, family: str, linear: LinearFormat) -> Decoder:
    save_tiny(folder, family, max_position_embeddings=512)
    files = locate(str(folder))
    weights = open_weights(files)
    formats = WeightFormats(linear, torch.float32, torch.float32, CPU, blocks=block_panels)
    return load_decoder(read_spec(files.config), weights, formats, max_model_len=512)


class Sequences:
    """Three sequences in slots 0, 1 and 2, on scattered pages."""

    def __init__(self, model: Decoder) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model = model
        self.pages, self.slots = Pages(96, 16, 3, 512, CPU), Slots(3, 512, 0, VOCAB, CPU)
        order = torch.randperm(96, generator=generator).int().view(3, 32)
        self.pages.table_SP[:3] = order
        tokens = torch.randint(3, VOCAB, (3, LENGTH), generator=generator)
        self.slots.tokens_SL[:3, :LENGTH] = tokens.int()
        spec = model.spec
        self.layers: list[LayerPages] = self.pages.add_layers(
            spec.num_layers, spec.num_kv_heads, spec.head_size, torch.float32
        )

    def logits(self, rows: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Of (slot, first position, count)."""
        slot, start, count = (np.array(x, np.int64) for x in zip(*rows, strict=True))
        group_size = self.model.spec.group_size
        inputs = lay_out(self.slots, self.pages, slot, start, count, group_size)
        logits = self.model.logits(self.model.forward(inputs, self.layers))
        return list(logits.split(count.tolist()))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen3-moe"])
@pytest.mark.parametrize("linear", [panels_fp32, narrow_panels])
@torch.no_grad()
def test_a_token_has_the_same_logits_in_any_batch_window_or_chunk(
    tmp_path: Path, family: str, linear: LinearFormat
) -> None:
    sequences = Sequences(tiny(tmp_path, family, linear))
    (whole,) = sequences.logits([(1, 0, LENGTH)])
    found, at = [], 0
    for width in (40, 1, 1, 6, 6, 2, 100, 7, 120, 1, 16):
        # Neighbours of other widths before and after, different ones each time.
        rows = [(0, 0, 1 + at % 50), (1, at, width), (2, 0, 1 + 3 * width % 70)]
        found.append(sequences.logits(rows)[1])
        at += width
    assert at == LENGTH
    assert torch.equal(torch.cat(found), whole)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_layers_in_one_call_equal_layers_one_by_one(tmp_path: Path, family: str) -> None:
    model = tiny(tmp_path, family, panels_fp32)
    assert model.fused is not None
    rows = [(0, 0, 70), (1, 0, 1), (2, 0, 6)]
    fused = Sequences(model).logits(rows)
    model.fused = None
    for found, expected in zip(fused, Sequences(model).logits(rows), strict=True):
        assert torch.equal(found, expected)


@torch.no_grad()
def test_a_layer_without_panels_keeps_the_loop(tmp_path: Path) -> None:
    """Head size 300 is beyond the vector attention, and 52 outputs are no whole panels."""
    for changes in ({"head_dim": 300}, {"hidden_size": 52, "head_dim": 8}):
        save_tiny(tmp_path, "llama", **changes)
        files = locate(str(tmp_path))
        formats = WeightFormats(panels_fp32, torch.float32, torch.float32, CPU)
        spec = read_spec(files.config)
        model = load_decoder(spec, open_weights(files), formats, max_model_len=256)
        assert model.fused is None
        assert Sequences(model).logits([(0, 0, 5)])[0].isfinite().all()
