"""A rank's part of a model: its sizes, the slices it reads and nothing else, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.checkpoint.source import locate
from paceline.errors import ConfigError
from paceline.layers.linear import block_panels, dense, narrow_panels
from paceline.layers.vocab import VocabShards
from paceline.models.blocks.experts import MoeSpec
from paceline.models.families import read_spec
from paceline.models.loading import expected_shapes, load_decoder, open_reader
from paceline.models.reader import Reader, WeightFormats
from paceline.models.sharding import Cut
from paceline.models.spec import ModelSpec
from paceline.models.weight_source import DummyWeights, Stored, WeightSource
from paceline.models.weights import open_weights
from paceline.parallel.collectives import Group
from paceline.parallel.contract import Contract
from paceline.parallel.groups import Groups
from tests.checkpoint.gguf_writing import write_gguf
from tests.tiny import (
    FAMILIES,
    HYBRID_FAMILIES,
    LATENT_FAMILIES,
    MOE_FAMILIES,
    save_tiny,
    tiny_config,
)

CPU = torch.device("cpu")
DENSE = WeightFormats(dense(torch.float32, CPU), torch.float32, torch.float32, CPU)
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def part(rank: int, size: int) -> Groups:
    """Groups of a rank that never talks."""
    return Groups(tp=Group("tp", range(size), rank, Contract(), None))


def tiny_spec(family: str, **changes: Any) -> ModelSpec:
    config = tiny_config(family, **changes)
    kind = type(config).__name__.removesuffix("Config").removesuffix("Text")
    return read_spec({**config.to_dict(), "architectures": [f"{kind}ForCausalLM"]})


def reader(spec: ModelSpec, source: WeightSource, groups: Groups) -> Reader:
    vocab = VocabShards(spec.vocab_size, groups.tp)
    return open_reader(spec, source, DENSE, groups, dict.fromkeys(TABLES, vocab))


class Recording:
    """Counts the numbers that are read of each tensor."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.read: dict[str, int] = {}

    def names(self) -> set[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def load(self, name: str, cut: Cut | None = None) -> Tensor:
        value = self.source.load(name, cut)
        self.read[name] = self.read.get(name, 0) + value.numel()
        return value

    def blocks(self, name: str, cut: Cut | None = None) -> Stored | None:
        return self.source.blocks(name, cut)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", [*FAMILIES, *MOE_FAMILIES, *LATENT_FAMILIES, *HYBRID_FAMILIES])
def test_slices_have_the_shapes_of_the_local_spec_and_make_up_the_whole(
    family: str, size: int
) -> None:
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    changes = heads if family in HYBRID_FAMILIES else {}
    spec = tiny_spec(family, vocab_size=97, **changes)
    whole = DummyWeights(expected_shapes(spec), 3, CPU)
    parts = [reader(spec, whole, part(rank, size)).source for rank in range(size)]
    for rank, source in enumerate(parts):
        local = spec.local(part(rank, size))
        vocab = VocabShards(spec.vocab_size, part(rank, size).tp)
        local = replace(local, vocab_size=vocab.stop - vocab.start)
        for name, shape in expected_shapes(local):
            assert source.shape(name) == shape, name
            assert tuple(source.load(name).shape) == shape, name
    for name in whole.names():
        pieces = [source.load(name) for source in parts]
        expected = whole.load(name)
        if pieces[0].shape == expected.shape:
            assert all(torch.equal(x, expected) for x in pieces)
        elif not any(x in name for x in ("k_proj", "v_proj", "gate_up_proj", "qkv.", "conv1d")):
            dims = zip(pieces[0].shape, expected.shape, strict=True)
            dim = next(i for i, (a, b) in enumerate(dims) if a != b)
            assert torch.equal(torch.cat(pieces, dim), expected), name


def test_fewer_kv_heads_than_ranks_are_held_by_neighbours() -> None:
    spec = tiny_spec("llama", num_attention_heads=8, num_key_value_heads=2)
    whole = DummyWeights(expected_shapes(spec), 3, CPU)
    name = "model.layers.1.self_attn.k_proj.weight"
    heads = whole.load(name).split(spec.head_size)
    for rank in range(4):
        found = reader(spec, whole, part(rank, 4)).source.load(name)
        assert torch.equal(found, heads[rank // 2])


@pytest.mark.trap("L-10")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "expected"),
    [(8, 2, 2, (4, 1, 4)), (8, 2, 4, (2, 1, 2)), (8, 4, 2, (4, 2, 2)), (12, 3, 6, (2, 1, 2))],
)
def test_planners_see_the_heads_of_their_rank(
    heads: int, kv_heads: int, size: int, expected: tuple[int, int, int]
) -> None:
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    whole = tiny_spec("qwen3", **changes)
    spec = whole.local(part(0, size))
    assert (spec.num_heads, spec.num_kv_heads, spec.group_size) == expected
    assert spec.kv_bytes_per_token(4) * max(size, kv_heads) % whole.kv_bytes_per_token(4) == 0
    assert spec.kv_bytes_per_token(4) == 2 * 2 * expected[1] * 8 * 4


def test_queries_keys_and_values_of_a_delta_net_are_cut_by_themselves() -> None:
    """In one tensor: rows of all queries, then of all keys, then of all values."""
    spec = tiny_spec("qwen3.5")
    whole = DummyWeights(expected_shapes(spec), 3, CPU)
    for name in ("in_proj_qkv.weight", "conv1d.weight"):
        name = f"model.layers.0.linear_attn.{name}"
        halves = [x.chunk(2) for x in whole.load(name).split((16, 16, 48))]
        for rank in range(2):
            found = reader(spec, whole, part(rank, 2)).source.load(name)
            assert torch.equal(found, torch.cat([x[rank] for x in halves]))
    local = spec.local(part(1, 2))
    assert local.recurrent == (1, 2, 8, 12, 4)


def test_latents_are_whole_on_every_rank() -> None:
    whole = tiny_spec("deepseek-v3")
    spec = whole.local(part(1, 4))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (1, 1, whole.head_size)
    assert spec.kv_bytes_per_token(2) == whole.kv_bytes_per_token(2)
    moe, whole_moe = spec.layers[-1].mlp, whole.layers[-1].mlp
    assert isinstance(moe, MoeSpec)
    assert isinstance(whole_moe, MoeSpec)
    assert moe.inner_size * 4 == whole_moe.inner_size
    assert moe.shared_inner_size * 4 == whole_moe.shared_inner_size
    assert moe.num_experts == whole_moe.num_experts


@pytest.mark.parametrize(
    ("family", "changes", "size", "message"),
    [
        ("llama", {"num_attention_heads": 32}, 3, "32 attention heads .*_size 3; use 1, 2, 4, 8"),
        (
            "qwen3",
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            4,
            "6 KV heads .*_size 4 .*; use 1, 2, 3, 6 or 12",
        ),
        ("qwen3", {"intermediate_size": 50}, 4, "50 inner values .*_size 4; use 1, 2, 5, 10"),
        ("qwen3-moe", {"moe_intermediate_size": 6}, 4, "6 inner values of an expert .*_size 4"),
        ("qwen3.5", {}, 4, "2 key heads of linear attention .*_size 4; use 1 or 2"),
        ("qwen3", {"vocab_size": 5}, 4, "vocabulary of 5 tokens .* tensor_parallel_size 4"),
    ],
)
def test_what_does_not_divide_is_refused_with_both_numbers(
    family: str, changes: dict[str, Any], size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_spec(family, **changes).local(part(0, size))


def test_an_inner_size_that_no_layer_has_refuses_nothing() -> None:
    """Where every layer has experts, intermediate_size is a leftover."""
    changes = {"mlp_only_layers": [], "intermediate_size": 50}
    spec = tiny_spec("qwen3-moe", **changes).local(part(0, 4))
    for layer in spec.layers:
        assert isinstance(layer.mlp, MoeSpec)
        assert layer.mlp.inner_size == 5


@torch.no_grad()
def test_a_rank_reads_its_slices_and_no_more(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2", num_key_value_heads=4)
    files = locate(str(tmp_path))
    spec, weights = read_spec(files.config), open_weights(files)
    for rank in range(4):
        source = Recording(weights)
        load_decoder(spec, source, DENSE, max_model_len=64, groups=part(rank, 4))
        for name in weights.names():
            whole = torch.Size(weights.shape(name)).numel()
            is_norm = "norm" in name
            assert source.read[name] == (whole if is_norm else whole // 4), name
    weights.close()


def test_a_bias_of_a_sum_is_added_by_the_first_rank_alone() -> None:
    spec = tiny_spec("llama", attention_bias=True, mlp_bias=True)
    whole = DummyWeights(expected_shapes(spec), 3, CPU)
    for rank in range(2):
        names = reader(spec, whole, part(rank, 2)).source.names()
        for name in ("self_attn.o_proj.bias", "mlp.down_proj.bias"):
            assert (f"model.layers.0.{name}" in names) == (rank == 0)
        assert "model.layers.0.self_attn.q_proj.bias" in names


CUTS = [
    Cut(0, ((0, 16),)),
    Cut(0, ((32, 64),)),
    Cut(0, ((0, 16), (48, 64))),
    Cut(1, ((0, 32),)),
    Cut(1, ((32, 64),)),
    Cut(1, ((16, 48),)),  # through blocks of 32
    Cut(1, ((0, 32), (48, 64))),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    path = tmp_path_factory.mktemp("files")
    return path, save_tiny(path / "hf", "llama", attention_bias=True, **sizes)


@pytest.mark.parametrize("kind", ["safetensors", "pickle", "F32", "F16", "Q8_0", "Q4_1", "dummy"])
def test_files_of_every_kind_give_slices_of_what_they_hold(
    reference: tuple[Path, Any], kind: str
) -> None:
    """Among them q rows of a GGUF, which lie in another order."""
    path, model = reference
    source: WeightSource
    if kind == "dummy":
        source = DummyWeights([("model.layers.0.self_attn.q_proj.weight", (64, 64))], 1, CPU)
    elif kind == "safetensors":
        source = open_weights(locate(str(path / "hf")))
    elif kind == "pickle":
        (path / "bin").mkdir()
        (path / "bin" / "config.json").write_bytes((path / "hf" / "config.json").read_bytes())
        torch.save(load_file(path / "hf" / "model.safetensors"), path / "bin" / "pytorch_model.bin")
        source = open_weights(locate(str(path / "bin")))
    else:
        write_gguf(path / f"{kind}.gguf", model, kind=kind)
        source = open_weights(locate(str(path / f"{kind}.gguf")))
    at = "model.layers.0.self_attn."
    for name in {at + "q_proj.weight", at + "o_proj.weight"} & source.names():
        whole, quantised = source.load(name), source.blocks(name)
        for cut in CUTS:
            assert torch.equal(source.load(name, cut), cut.of(whole)), (name, cut)
            through = cut.dim == 1 and any(x % 32 for ends in cut.ranges for x in ends)
            blocks = source.blocks(name, cut)
            assert (blocks is None) == (quantised is None or through), (name, cut)
            if blocks is not None:
                assert len(blocks[1]) == (64 if cut.dim else cut.size)
    if at + "q_proj.bias" in source.names():
        cut, name = Cut(0, ((16, 32),)), at + "q_proj.bias"
        assert torch.equal(source.load(name, cut), source.load(name)[16:32])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantised_rows_of_a_rank_stay_quantised(reference: tuple[Path, Any], kind: str) -> None:
    """A GGUF's matrices are cut by whole rows and, where they can be, by whole blocks."""
    path, model = reference
    write_gguf(path / f"{kind}.gguf", model, kind=kind)
    files = locate(str(path / f"{kind}.gguf"))
    spec = read_spec(files.config)
    formats = replace(DENSE, linear=narrow_panels, blocks=block_panels)
    whole = load_decoder(spec, open_weights(files), formats, max_model_len=64)
    mine = load_decoder(spec, open_weights(files), formats, max_model_len=64, groups=part(1, 2))
    ours, theirs = mine.layers[0].attention, whole.layers[0].attention
    assert 2 * ours.nbytes == theirs.nbytes


def test_fp8_blocks_are_scaled_where_a_cut_begins_within_one(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", hidden_size=64, intermediate_size=96, head_dim=16)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.gate_proj.weight"
    tensors = load_file(file)
    tensors[name] = torch.randn(96, 64).to(torch.float8_e4m3fn)
    tensors[name + "_scale_inv"] = torch.rand(3, 2) + 0.5
    save_file(tensors, file, {"format": "pt"})
    config = (tmp_path / "config.json").read_text().rstrip()
    size = '{"quant_method": "fp8", "weight_block_size": [40, 32]}'
    (tmp_path / "config.json").write_text(f'{config[:-1]}, "quantization_config": {size}}}')
    weights = open_weights(locate(str(tmp_path)))
    whole = weights.load(name)
    assert len(whole.unique()) > 100
    for cut in (*CUTS, Cut(0, ((30, 96),))):
        assert torch.equal(weights.load(name, cut), cut.of(whole)), cut
