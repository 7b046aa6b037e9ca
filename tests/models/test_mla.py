"""DeepSeek-V3 and GLM-4.7-Flash: logits equal transformers', both generations of configs, yarn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.checkpoint.source import locate
from paceline.errors import CheckpointError
from paceline.layers.moe import MoeMlp
from paceline.layers.rope import inverse_frequencies, yarn_frequencies
from paceline.models.decoder import Decoder
from paceline.models.families import read_spec
from paceline.models.layout import add_storage
from paceline.models.loading import expected_shapes, load_decoder
from paceline.models.reader import Reader
from paceline.models.sharding import Cut
from paceline.models.weight_source import DummyWeights
from paceline.state.pages import LayerPages, Pages
from tests.models.test_decoder import CPU, EXACT, load, paged_logits
from tests.tiny import LATENT_FAMILIES, VOCAB, save_tiny

VARIANTS: list[dict[str, Any]] = [
    {},
    {"q_lora_rank": None},
    {"attention_bias": True},
    {"q_lora_rank": None, "attention_bias": True, "rope_interleave": False},
    {"rope_interleave": False, "norm_topk_prob": False},
]


def assert_same_logits(model: Decoder, reference: Any) -> None:
    ids = torch.randint(3, VOCAB, (90,), generator=torch.Generator().manual_seed(5))
    found = paged_logits(model, ids, [40, 1, 5, 1, 43])
    torch.testing.assert_close(found, reference(ids[None]).logits[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("family", LATENT_FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers(tmp_path: Path, family: str, variant: dict[str, Any]) -> None:
    reference = save_tiny(tmp_path, family, **variant)
    assert_same_logits(load(tmp_path), reference)


@pytest.mark.parametrize("family", LATENT_FAMILIES)
@torch.no_grad()
def test_configs_and_experts_of_the_older_generation_read_the_same(
    tmp_path: Path, family: str
) -> None:
    """Keys as the published checkpoints have them, and experts fused in one of the layers."""
    reference = save_tiny(tmp_path, family)
    wanted = read_spec(json.loads((tmp_path / "config.json").read_text()))
    rewrite_config(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" not in config
    assert read_spec(config) == wanted
    fuse_experts(tmp_path, layer=1)
    assert_same_logits(load(tmp_path), reference)


def rewrite_config(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = {**rope, "type": kind} if kind != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    if config.pop("mlp_layer_types", None):
        config["first_k_dense_replace"] = 1
    config.update(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    config["num_nextn_predict_layers"] = 1
    path.write_text(json.dumps(config))


def fuse_experts(folder: Path, layer: int) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    at = f"model.layers.{layer}.mlp.experts."
    parts = {
        name: [tensors.pop(f"{at}{e}.{name}_proj.weight") for e in range(8)]
        for name in ("gate", "up", "down")
    }
    pairs = zip(parts["gate"], parts["up"], strict=True)
    tensors[at + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    tensors[at + "down_proj"] = torch.stack(parts["down"])
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mscale": 0.707, "mscale_all_dim": 1.0, "factor": 40.0},
        {"mscale": None, "mscale_all_dim": None},
        {"attention_factor": 1.3},
        {"truncate": False},
        {"original_max_position_embeddings": 4},  # the ramp ends where it begins
    ],
    ids=str,
)
@torch.no_grad()
def test_yarn_is_that_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        **changes,
    }
    values = {k: v for k, v in yarn.items() if v is not None}
    reference = save_tiny(tmp_path, "deepseek-v3", rope_parameters=values, qk_rope_head_dim=32)
    model = load(tmp_path)
    rotary = reference.model.rotary_emb
    torch.testing.assert_close(
        model.rotation[1].angle().abs(), rotary.inv_freq, rtol=1e-5, atol=1e-6
    )
    length = torch.full((16,), rotary.attention_scaling)
    torch.testing.assert_close(model.rotation[7].abs(), length)
    assert_same_logits(model, reference)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_yarn_works_without_latent_attention(tmp_path: Path, family: str) -> None:
    yarn: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    yarn["original_max_position_embeddings"] = 64
    reference = save_tiny(tmp_path, family, rope_parameters=yarn)
    assert_same_logits(load(tmp_path), reference)


def test_yarn_keeps_short_waves_and_stretches_long_ones() -> None:
    freq = inverse_frequencies(64, 10000.0)
    found = yarn_frequencies(freq, 10000.0, 40.0, (32.0, 1.0), 4096, True)
    assert torch.equal(found[:8], freq[:8])
    torch.testing.assert_close(found[-6:], freq[-6:] / 40)


def test_the_cache_has_one_row_per_token_and_layer(tmp_path: Path) -> None:
    save_tiny(tmp_path, "glm4-moe-lite")
    spec = read_spec(locate(str(tmp_path)).config)
    assert spec.kv_bytes_per_token(4) == 3 * (16 + 8) * 4
    layers = add_storage(Pages(5, 4, 2, 16, CPU), spec, torch.float32)
    assert len(layers) == 3
    for kv in layers:
        assert isinstance(kv, LayerPages)
        assert kv.key_NSH.shape == (1, 24, 24)
        assert kv.value_NSH.data_ptr() == kv.key_NSH.data_ptr()
        assert kv.value_NSH.shape == (1, 24, 16)


@torch.no_grad()
def test_a_layer_behind_the_last_loads_with_experts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """MTP: stored as layer L, with experts whatever the dense layers are; ignored by the body."""
    save_tiny(tmp_path, "deepseek-v3")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    copies = {
        n.replace("layers.2.", "layers.3."): t.clone()
        for n, t in tensors.items()
        if ".layers.2." in n
    }
    save_file({**tensors, **copies}, path, metadata={"format": "pt"})
    model = load(tmp_path)
    assert len(model.layers) == 3
    assert "not used" not in caplog.text
    spec = read_spec(locate(str(tmp_path)).config)
    source = _Tensors({**tensors, **copies})
    read = Reader(source, EXACT)
    layer = spec.layers[2]
    attention = layer.attention.load(read, "model.layers.3.", model.kernels)
    x_TD = torch.randn(5, 32)
    ours = layer.mlp.load(read, "model.layers.3.", model.kernels)
    theirs = model.layers[2].mlp
    assert isinstance(ours, MoeMlp)
    assert isinstance(theirs, MoeMlp)
    assert torch.equal(ours(x_TD), theirs(x_TD))
    assert attention.nbytes == model.layers[2].attention.nbytes


@torch.no_grad()
def test_fp8_blocks_are_read_as_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "deepseek-v3")
    quantise(tmp_path, reference, (16, 12))
    assert_same_logits(load(tmp_path), reference)


def quantise(folder: Path, reference: Any, size: tuple[int, int]) -> None:
    """Matrices of the layers in fp8; the reference gets what became of them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if "_proj" in n and n.endswith(".weight")]:
        value, scale = as_blocks(tensors[name], size)
        tensors[name], tensors[name + "_scale_inv"] = value, scale
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(size)}
    config["quantization_config"] = quantised
    (folder / "config.json").write_text(json.dumps(config))
    for name, parameter in reference.named_parameters():
        if name + "_scale_inv" in tensors:
            parameter.copy_(plain(tensors[name], tensors[name + "_scale_inv"], size))
    for index, layer in enumerate(reference.model.layers[1:], 1):
        at = f"model.layers.{index}.mlp.experts."
        for e in range(8):
            gate, up, down = (
                plain(tensors[n], tensors[n + "_scale_inv"], size)
                for n in (f"{at}{e}.{x}_proj.weight" for x in ("gate", "up", "down"))
            )
            layer.mlp.experts.gate_up_proj[e] = torch.cat((gate, up))
            layer.mlp.experts.down_proj[e] = down


def as_blocks(value: torch.Tensor, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    starts = [range(0, length, step) for length, step in zip(value.shape, size, strict=True)]
    scale = torch.empty(len(starts[0]), len(starts[1]))
    stored = torch.empty(value.shape, dtype=torch.float8_e4m3fn)
    for i, row in enumerate(starts[0]):
        for j, column in enumerate(starts[1]):
            block = value[row : row + size[0], column : column + size[1]]
            scale[i, j] = block.abs().max() / 448
            stored[row : row + size[0], column : column + size[1]] = (block / scale[i, j]).to(
                torch.float8_e4m3fn
            )
    return stored, scale


def plain(stored: torch.Tensor, scale: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    row, column = (torch.arange(n) // s for n, s in zip(stored.shape, size, strict=True))
    return stored.float() * scale[row[:, None], column]


@torch.no_grad()
def test_fp8_blocks_of_fused_experts_are_read_too(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "deepseek-v3")
    quantise(tmp_path, reference, (16, 16))  # an expert's gate ends where a block does
    path, at = tmp_path / "model.safetensors", "model.layers.1.mlp.experts."
    tensors = load_file(path)
    for end in ("", "_scale_inv"):
        names = [
            [f"{at}{e}.{x}_proj.weight{end}" for e in range(8)] for x in ("gate", "up", "down")
        ]
        gate, up, down = (torch.stack([tensors.pop(n).float() for n in x]) for x in names)
        kind = torch.float32 if end else torch.float8_e4m3fn
        tensors[f"{at}gate_up_proj{end}"] = torch.cat((gate, up), dim=1).to(kind)
        tensors[f"{at}down_proj{end}"] = down.to(kind)
    save_file(tensors, path, metadata={"format": "pt"})
    assert_same_logits(load(tmp_path), reference)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_narrow_weights_that_no_config_explains_are_refused_by_name(
    tmp_path: Path, kind: torch.dtype
) -> None:
    """Numbers without their scales would be read as a model of noise."""
    save_tiny(tmp_path, "deepseek-v3")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    narrow = {n: t.to(kind) if "_proj" in n else t for n, t in tensors.items()}
    save_file(narrow, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"is stored in {kind} and has no scales"):
        load(tmp_path)


def test_fp8_without_its_scales_is_refused_by_name(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "deepseek-v3")
    with torch.no_grad():
        quantise(tmp_path, reference, (16, 16))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.o_proj.weight"
    scale = tensors.pop(name + "_scale_inv")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name}.*float8_e4m3fn and has no"):
        load(tmp_path)
    tensors[name + "_scale_inv"] = scale[:1, :1].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"_scale_inv' has shape \[1, 1\]"):
        load(tmp_path)


class _Tensors:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def load(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        return self._tensors[name] if cut is None else cut.of(self._tensors[name])

    def blocks(self, name: str, cut: Cut | None = None) -> None:
        return None


GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 8192,
    "rope_theta": 1000000.0,
}


def test_the_published_sizes_of_glm_add_up() -> None:
    spec = read_spec(GLM)
    assert spec.kv_bytes_per_token(2) == 47 * 576 * 2
    count = sum(torch.Size(shape).numel() for _, shape in expected_shapes(spec))
    vectors = sum(shape[0] for _, shape in expected_shapes(spec) if len(shape) == 1)
    assert spec.num_parameters == count - vectors
    assert 29.5e9 < spec.num_parameters < 30.5e9


@torch.no_grad()
def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    save_tiny(tmp_path, "glm4-moe-lite")
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    spec = read_spec(locate(str(tmp_path), load_format="dummy").config)
    weights = DummyWeights(expected_shapes(spec), 1, CPU)
    model = load_decoder(spec, weights, EXACT, max_model_len=256)
    found = paged_logits(model, torch.randint(3, VOCAB, (20,)), [20])
    assert found.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "router 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"n_group": 5}, "64 experts do not divide over 5"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_spec({**GLM, **changes})
