"""Scales of fp8 pages as checkpoints name and shape them; what does not fit is refused by name."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels.kv_codes.reference import KvScales
from paceline.layers.attention import GroupedAttention
from paceline.layers.linear import dense
from paceline.models.decoder import Decoder
from paceline.models.kv_scales import check_kv_scheme
from paceline.models.loading import expected_shapes, load_decoder
from paceline.models.reader import WeightFormats
from paceline.models.weight_source import DummyWeights
from paceline.parallel.groups import ALONE, Groups
from tests.models.test_sharding import part, tiny_spec

CPU = torch.device("cpu")
FP8 = WeightFormats(
    dense(torch.float32, CPU), torch.float32, torch.float32, CPU, has_fp8_pages=True
)
ATTENTION = "model.layers.1.self_attn."


class Stored(DummyWeights):
    """Random weights, and scales of one layer."""

    def __init__(self, family: str, scales: dict[str, Tensor]) -> None:
        self.spec = tiny_spec(family)
        self.scales = {ATTENTION + name: value for name, value in scales.items()}
        super().__init__(expected_shapes(self.spec), 0, CPU)

    def names(self) -> set[str]:
        return super().names() | set(self.scales)

    def load(self, name: str, cut: Any = None) -> Tensor:
        return self.scales[name] if name in self.scales else super().load(name, cut)


def load(stored: Stored, formats: WeightFormats = FP8, groups: Groups = ALONE) -> Decoder:
    return load_decoder(stored.spec, stored, formats, max_model_len=16, groups=groups)


def scales_of(decoder: Decoder, layer: int = 1) -> KvScales:
    found = decoder.layers[layer].attention.kv_scales  # type: ignore[attr-defined]
    assert isinstance(found, KvScales)
    return found


@pytest.mark.parametrize("place", ["{}_scale", "attn.{}_scale", "{}_proj.{}_scale"])
def test_scales_are_found_under_the_names_of_all_tools(place: str) -> None:
    names = {place.format(x, x): torch.tensor([s, 2 * s]) for x, s in (("k", 0.5), ("v", 3.0))}
    key_N, value_N = scales_of(load(Stored("llama", names)))
    assert key_N.tolist() == [0.5, 1.0]
    assert value_N.tolist() == [3.0, 6.0]
    assert key_N.dtype == torch.float32


@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 1, 1)])
def test_a_layer_has_one_scale_or_one_for_each_head(shape: tuple[int, ...]) -> None:
    scale = torch.full(shape, 0.25, dtype=torch.bfloat16)
    key_N, _ = scales_of(load(Stored("llama", {"k_scale": scale, "v_scale": scale})))
    assert key_N.tolist() == [0.25, 0.25]


def test_a_row_of_latent_attention_has_the_scale_of_keys() -> None:
    scales = scales_of(load(Stored("deepseek-v3", {"k_scale": torch.tensor(0.125)})))
    assert scales.key_N.tolist() == scales.value_N.tolist() == [0.125]


@pytest.mark.parametrize(
    ("size", "wanted"), [(2, [[0.5], [1.0]]), (4, [[0.5], [0.5], [1.0], [1.0]])]
)
def test_ranks_have_the_scales_of_their_heads(size: int, wanted: list[list[float]]) -> None:
    """With more ranks than KV heads, neighbours have the same head."""
    scale = torch.tensor([0.5, 1.0])
    stored = Stored("llama", {"k_scale": scale, "v_scale": scale})
    found = []
    for rank in range(size):
        found.append(scales_of(load(stored, groups=part(rank, size))).key_N.tolist())
    assert found == wanted


def test_without_scales_they_are_1_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        decoder = load(Stored("llama", {}))
    assert [scales_of(decoder, i).value_N.tolist() for i in range(2)] == [[1.0, 1.0]] * 2
    assert [r.getMessage() for r in caplog.records] == [
        "no scales of keys and values are stored: fp8 pages have the scale 1.0"
    ]


def test_wide_pages_read_no_scales_and_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    stored = Stored("llama", {"k_scale": torch.tensor(-1.0), "v_scale": torch.ones(7)})
    decoder = load(stored, replace(FP8, has_fp8_pages=False))
    attention = decoder.layers[1].attention
    assert isinstance(attention, GroupedAttention)
    assert attention.kv_scales is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": torch.ones(3), "v_scale": torch.ones(3)}, "has 3 scales; .* 2 KV heads"),
        ({"k_scale": torch.ones(2)}, "has a k_scale and no v_scale"),
        ({"v_scale": torch.ones(2)}, "has a v_scale and no k_scale"),
        ({"k_scale": torch.zeros(1), "v_scale": torch.ones(1)}, "not positive numbers"),
        ({"k_scale": torch.ones(1), "v_scale": torch.tensor(torch.inf)}, "not positive numbers"),
    ],
)
def test_scales_that_do_not_fit_are_refused(scales: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(Stored("llama", scales))


def test_scales_for_another_type_are_refused() -> None:
    """As compressed-tensors and ModelOpt describe them."""
    fp8 = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False}
    check_kv_scheme({"quantization_config": {"kv_cache_scheme": fp8}})
    check_kv_scheme({"quantization_config": {"kv_cache_scheme": None}})
    check_kv_scheme({})
    check_kv_scheme({"quantization_config": {"kv_cache_quant_algo": "FP8"}})
    for scheme in (
        {"kv_cache_scheme": fp8 | {"type": "int"}},
        {"kv_cache_scheme": fp8 | {"num_bits": 4}},
        {"kv_cache_quant_algo": "NVFP4"},
    ):
        with pytest.raises(CheckpointError, match="do not fit fp8; leave out --kv-cache-dtype"):
            check_kv_scheme({"quantization_config": scheme})
