"""A last layer computes what is read: results as with all entries, and the KV of all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline import SamplingParams
from paceline.checkpoint.source import locate
from paceline.layers.attention import ForwardInputs, WantedEntries
from paceline.layers.linear import cuda_linear, dense
from paceline.models.decoder import Decoder
from paceline.models.families import read_spec
from paceline.models.layout import add_storage, lay_out
from paceline.models.loading import load_decoder
from paceline.models.reader import WeightFormats
from paceline.models.weights import open_weights
from paceline.runner import padded_rows, startup
from paceline.state.pages import LayerPages, Pages
from paceline.state.slots import Slots
from tests.e2e.engines import draft_model, eagle3, run
from tests.e2e.ladder import Workshop
from tests.e2e.test_fixed_steps import padded_on_cpu
from tests.tiny import FAMILIES, LATENT_FAMILIES, MOE_FAMILIES, VOCAB, save_tiny

CPU = torch.device("cpu")
# A prompt, and one of which some was computed before.
COUNTS, STARTS = (40, 13), (0, 9)
WANTED = [39, 52, 20, 52, 0]  # the last of each, one inside, one twice, and one that is not read
IS_READ = torch.tensor([1, 1, 1, 1, 0], dtype=torch.int32)


def load(folder: Path, is_fused: bool) -> Decoder:
    files = locate(str(folder))
    linear = cuda_linear(torch.float32, CPU) if is_fused else dense(torch.float32, CPU)
    formats = WeightFormats(linear, torch.float32, torch.float32, CPU, has_fixed_shapes=True)
    return load_decoder(read_spec(files.config), open_weights(files), formats, max_model_len=64)


class Scene:
    """Two rows over pages of a model's own."""

    def __init__(self, model: Decoder) -> None:
        torch.manual_seed(1)
        self.model, self.pages = model, Pages(16, 8, 2, 64, CPU)
        self.slots = Slots(2, 64, 0, VOCAB, CPU)
        layers = add_storage(self.pages, model.spec, torch.float32)
        self.layers = [x for x in layers if isinstance(x, LayerPages)]
        for x in self.layers:
            x.key_NSH.zero_(), x.value_NSH.zero_()
        self.pages.table_SP[:2, :8] = torch.randperm(16).view(2, 8).int()
        self.slots.tokens_SL[:2, :64] = torch.randint(3, VOCAB, (2, 64)).int()
        model.forward(self.inputs((1,), (0,), (9,)), self.layers)

    def inputs(
        self, slots: tuple[int, ...], starts: tuple[int, ...], counts: tuple[int, ...]
    ) -> ForwardInputs:
        slot_B, start_B, count_B = (np.array(x) for x in (slots, starts, counts))
        group_size = self.model.spec.group_size
        return lay_out(self.slots, self.pages, slot_B, start_B, count_B, group_size)

    def forward(self, *, has_wanted: bool) -> Tensor:
        inputs = self.inputs((0, 1), STARTS, COUNTS)
        if has_wanted:
            entry_N = torch.tensor(WANTED)
            own = replace(
                inputs.attention,
                row_start_B=torch.arange(len(WANTED)),
                query_len_B=IS_READ,
                length_B=(inputs.position_T[entry_N] + 1) * IS_READ,
                slot_B=torch.tensor([0, 1, 0, 1, 0]),
                max_query_len=1,
            )
            inputs.wanted = WantedEntries(entry_N, own)
        return self.model.forward(inputs, self.layers)

    @property
    def cache(self) -> Tensor:
        return torch.cat([y.flatten() for x in self.layers for y in (x.key_NSH, x.value_NSH)])


CASES = [*((family, True) for family in FAMILIES), *((family, False) for family in FAMILIES)]
CASES += [(family, False) for family in (*MOE_FAMILIES, *LATENT_FAMILIES)]


@pytest.mark.parametrize(("family", "is_fused"), CASES)
@torch.no_grad()
def test_wanted_entries_have_the_results_that_all_of_them_have(
    tmp_path: Path, family: str, is_fused: bool
) -> None:
    save_tiny(tmp_path, family)
    model = load(tmp_path, is_fused)
    assert (model.fused is not None) == is_fused
    whole, few = Scene(model), Scene(model)
    all_TD, wanted_ND = whole.forward(has_wanted=False), few.forward(has_wanted=True)
    assert wanted_ND.shape == (len(WANTED), model.spec.hidden_size)
    is_read = IS_READ > 0
    torch.testing.assert_close(wanted_ND[is_read], all_TD[WANTED][is_read], rtol=1e-5, atol=1e-5)
    assert wanted_ND.isfinite().all()
    assert few.cache.any()
    torch.testing.assert_close(few.cache, whole.cache)


@pytest.mark.parametrize("drafter", ["none", "draft_model", "eagle3"])
def test_prompts_leave_the_last_layers_early(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """In fixed steps, of the target's last layer and of a draft's: EAGLE-3 reads earlier ones."""
    seen: list[tuple[int, int]] = []
    make = padded_rows.wanted_entries

    def watched(batch: Any, entry_N: Tensor, *more: Any) -> WantedEntries:
        seen.append((len(batch.token_T), len(entry_N)))
        return make(batch, entry_N, *more)

    monkeypatch.setattr(padded_rows, "wanted_entries", watched)
    monkeypatch.setattr(startup, "CpuPlatform", padded_on_cpu)
    spec = {"none": None, "draft_model": draft_model(workshop, 1), "eagle3": eagle3(workshop, 1)}
    params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    run(workshop, [[5 + i % 40 for i in range(100)]], params, spec[drafter])
    assert len(seen) >= (1 if drafter == "none" else 2)
    assert all(few * 4 <= all_of_them for all_of_them, few in seen)
