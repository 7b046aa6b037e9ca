"""A pass whose requests were all aborted ends at the next layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.kernels.table import has_numba
from paceline.layers.attention import Unwanted
from paceline.layers.linear import dense, panels_fp32
from paceline.models.layout import add_storage, lay_out
from paceline.state.pages import LayerPages, Pages
from paceline.state.slots import Slots
from paceline.step import Longs
from tests.models.test_taps import load
from tests.tiny import VOCAB, save_tiny

CPU = torch.device("cpu")
HOW = [
    "loop",
    pytest.param("one call", marks=pytest.mark.skipif(not has_numba(CPU), reason="numba")),
]


@pytest.mark.parametrize("how", HOW)
@torch.no_grad()
def test_no_layer_runs_of_a_pass_that_is_not_wanted(tmp_path: Path, how: str) -> None:
    save_tiny(tmp_path, "llama")
    model = load(tmp_path, panels_fp32 if how == "one call" else dense(torch.float32, CPU))
    assert (model.fused is None) == (how == "loop")
    pages, slots = Pages(8, 8, 1, 64, CPU), Slots(1, 64, 0, VOCAB, CPU)
    stored = add_storage(pages, model.spec, torch.float32)
    layers = [x for x in stored if isinstance(x, LayerPages)]
    pages.table_SP[0] = torch.arange(8)

    def forward(unwanted: Longs | None) -> Tensor:
        for layer in layers:
            layer.key_NSH.zero_()
        at, count = np.array([0]), np.array([40])
        inputs = lay_out(slots, pages, at, at, count, model.spec.group_size)
        inputs.unwanted = unwanted
        return model.forward(inputs, layers)

    with pytest.raises(Unwanted):
        forward(np.ones(1, np.int64))
    assert not wrote(layers)
    wanted_TD = forward(np.zeros(1, np.int64))
    assert wrote(layers)
    assert torch.equal(wanted_TD, forward(None))


def wrote(layers: list[LayerPages]) -> bool:
    return any(bool(layer.key_NSH.any()) for layer in layers)
