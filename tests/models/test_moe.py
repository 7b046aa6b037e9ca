"""Mixtral and Qwen3-MoE: logits equal transformers' in fp32, whatever layout the experts have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.checkpoint.source import locate
from paceline.errors import CheckpointError
from paceline.layers.linear import dense, panels_fp32
from paceline.layers.mlp import GatedMlp
from paceline.layers.moe import MoeMlp, SeparateExperts, StackedExperts
from paceline.models.blocks.experts import MoeSpec
from paceline.models.decoder import Decoder
from paceline.models.families import read_spec
from paceline.models.loading import expected_shapes, load_decoder
from paceline.models.reader import WeightFormats
from paceline.models.weight_source import DummyWeights
from paceline.models.weights import open_weights
from paceline.parallel.collectives import Group
from paceline.parallel.contract import Contract
from paceline.parallel.groups import ALONE, Groups
from tests.models.test_decoder import CPU, EXACT, load, paged_logits
from tests.tiny import LATENT_FAMILIES, MOE_FAMILIES, VOCAB, save_tiny

FIXED = WeightFormats(
    dense(torch.float32, CPU), torch.float32, torch.float32, CPU, has_fixed_shapes=True
)
PANELS = WeightFormats(panels_fp32, torch.float32, torch.float32, CPU)
Tensors = dict[str, Tensor]


def load_as(folder: Path, formats: WeightFormats) -> Decoder:
    files = locate(str(folder))
    weights = open_weights(files)
    try:
        return load_decoder(read_spec(files.config), weights, formats, max_model_len=256)
    finally:
        weights.close()


@pytest.mark.parametrize("formats", [EXACT, FIXED, PANELS], ids=["separate", "stacked", "panels"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers(tmp_path: Path, family: str, formats: WeightFormats) -> None:
    reference = save_tiny(tmp_path, family)
    ids = torch.randint(3, VOCAB, (90,))
    model = load_as(tmp_path, formats)
    found = paged_logits(model, ids, [40, 1, 5, 1, 43])
    torch.testing.assert_close(found, reference(ids[None]).logits[0], rtol=1e-5, atol=5e-5)
    kind = StackedExperts if formats.has_fixed_shapes else SeparateExperts
    blocks = [layer.mlp for layer in model.layers]
    assert all(isinstance(b.experts, kind) for b in blocks if isinstance(b, MoeMlp))
    assert any(isinstance(b, MoeMlp) for b in blocks)


@torch.no_grad()
def test_a_window_is_what_makes_the_difference(tmp_path: Path) -> None:
    """The same weights without it give other logits, from the first token behind it on."""
    save_tiny(tmp_path, "mixtral-window")
    ids = torch.randint(3, VOCAB, (60,))
    narrow = paged_logits(load(tmp_path), ids, [60])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": None}))
    whole = paged_logits(load(tmp_path), ids, [60])
    torch.testing.assert_close(narrow[:27], whole[:27])
    assert (narrow[27:] - whole[27:]).abs().max(dim=1).values.min() > 1e-3


@pytest.mark.parametrize(
    "changes",
    [{"norm_topk_prob": False}, {"decoder_sparse_step": 2, "mlp_only_layers": []}],
    ids=str,
)
@torch.no_grad()
def test_what_qwen3_may_vary_is_honoured(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = save_tiny(tmp_path, "qwen3-moe", **changes)
    ids = torch.randint(3, VOCAB, (20,))
    model = load(tmp_path)
    found = paged_logits(model, ids, [20])
    torch.testing.assert_close(found, reference(ids[None]).logits[0], rtol=1e-5, atol=5e-5)
    is_dense = [isinstance(layer.mlp, GatedMlp) for layer in model.layers]
    every = changes.get("decoder_sparse_step")
    assert is_dense == ([True, False, True] if every else [False, True, False])


# ---- layouts


def fused(tensors: Tensors, layer: int, *, block: str = "mlp.") -> Tensors:
    """Mixtral's layer as transformers 5 holds it: one tensor of all experts."""
    at = f"model.layers.{layer}.block_sparse_moe."
    old = {n: t for n, t in tensors.items() if n.startswith(at)}
    gate, up, down = (
        torch.stack([old[f"{at}experts.{i}.{m}.weight"] for i in range(5)])
        for m in ("w1", "w3", "w2")
    )
    new = f"model.layers.{layer}.{block}"
    rest = {n: t for n, t in tensors.items() if n not in old}
    return rest | {
        new + "gate.weight": old[at + "gate.weight"],
        new + "experts.gate_up_proj": torch.cat((gate, up), dim=1),
        new + "experts.down_proj": down,
    }


def renamed(tensors: Tensors) -> Tensors:
    """Experts one by one, under the names that all other families have."""
    names = {"block_sparse_moe": "mlp", ".w1.": ".gate_proj.", ".w3.": ".up_proj."}

    def new(name: str) -> str:
        for old, better in {**names, ".w2.": ".down_proj."}.items():
            name = name.replace(old, better)
        return name

    return {new(name): tensor for name, tensor in tensors.items()}


def half_fused(tensors: Tensors) -> Tensors:
    """One layer's first matrices are fused, its last are not; all else stays as it was."""
    both = fused(tensors, 0, block="block_sparse_moe.")
    down = both.pop("model.layers.0.block_sparse_moe.experts.down_proj")
    at = "model.layers.0.block_sparse_moe.experts."
    return both | {f"{at}{i}.w2.weight": x.clone() for i, x in enumerate(down)}


LAYOUTS: dict[str, Callable[[Tensors], Tensors]] = {
    "fused": lambda tensors: fused(fused(tensors, 0), 1),
    "fused, old block": lambda tensors: fused(tensors, 1, block="block_sparse_moe."),
    "mixed": lambda tensors: fused(tensors, 1),
    "renamed": renamed,
    "half fused": half_fused,
}


@pytest.mark.parametrize("formats", [EXACT, FIXED], ids=["separate", "stacked"])
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_experts_may_be_stored_in_any_layout(
    tmp_path: Path, layout: str, formats: WeightFormats, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "mixtral")
    ids = torch.randint(3, VOCAB, (20,))
    wanted = paged_logits(load_as(tmp_path, formats), ids, [20])
    path = tmp_path / "model.safetensors"
    save_file(LAYOUTS[layout](load_file(path)), path, metadata={"format": "pt"})
    assert torch.equal(paged_logits(load_as(tmp_path, formats), ids, [20]), wanted)
    assert not caplog.records, "every tensor is used"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.block_sparse_moe.experts.3.w3.weight"), "3.w3.weight"),
        (lambda t: t.pop("model.layers.0.block_sparse_moe.gate.weight"), "0.block_sparse_moe.gate"),
    ],
    ids=["an expert's matrix", "the router"],
)
def test_a_missing_tensor_is_named(
    tmp_path: Path, change: Callable[[Tensors], Any], message: str
) -> None:
    save_tiny(tmp_path, "mixtral")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_fused_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "mixtral")
    path = tmp_path / "model.safetensors"
    tensors = fused(load_file(path), 1)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has shape \[5, 32, 96\].*\[5, 96, 32\]"):
        load(tmp_path)


# ---- specs


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_parameters_are_counted(tmp_path: Path, family: str) -> None:
    """All but norms, which are few."""
    model = save_tiny(tmp_path, family)
    spec = read_spec(locate(str(tmp_path)).config)
    wanted = sum(p.numel() for n, p in model.named_parameters() if "norm" not in n)
    assert spec.num_parameters == wanted
    heads = spec.num_layers * spec.num_kv_heads * spec.head_size
    assert spec.kv_bytes_per_token(4) == 2 * 4 * heads
    assert load_as(tmp_path, FIXED).nbytes == 4 * wanted


@torch.no_grad()
def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    for family in MOE_FAMILIES:
        save_tiny(tmp_path / family, family)
        spec = read_spec(locate(str(tmp_path / family)).config)
        source = DummyWeights(expected_shapes(spec), 1, CPU)
        fixed = load_decoder(spec, source, FIXED, max_model_len=64)
        assert fixed.nbytes == 4 * spec.num_parameters
        ids = torch.randint(3, VOCAB, (20,))
        found = paged_logits(load_decoder(spec, source, EXACT, max_model_len=64), ids, [20])
        torch.testing.assert_close(found, paged_logits(fixed, ids, [20]), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_dummy_rows_choose_the_same_experts_unless_the_router_has_no_bias(tmp_path: Path) -> None:
    save_tiny(tmp_path, LATENT_FAMILIES[0])
    spec = read_spec(locate(str(tmp_path)).config)
    x_TD = torch.randn(64, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    counts = []
    for bias in (10.0, 0.0):
        source = DummyWeights(expected_shapes(spec), 1, CPU, bias)
        mlp = load_decoder(spec, source, EXACT, max_model_len=64).layers[-1].mlp
        assert isinstance(mlp, MoeMlp)
        chosen_TK, _ = mlp.router(x_TD)
        counts.append(len(chosen_TK.sort(1).values.unique(dim=0)))
    assert counts[0] == 1
    assert counts[1] > 5


@pytest.mark.parametrize("is_dummy", [False, True], ids=["one by one", "fused"])
@pytest.mark.parametrize("family", LATENT_FAMILIES)
@torch.no_grad()
def test_a_shared_expert_is_stacked_with_the_others_where_shapes_are_fixed(
    tmp_path: Path, family: str, is_dummy: bool
) -> None:
    """Of a width of several experts, it is as many of them; nothing of it is left beside."""
    save_tiny(tmp_path, family, n_shared_experts=2)
    files = locate(str(tmp_path))
    spec = read_spec(files.config)
    moe = spec.layers[-1].mlp
    assert isinstance(moe, MoeSpec)
    assert moe.shared_inner_size == 2 * moe.inner_size
    source = DummyWeights(expected_shapes(spec), 1, CPU) if is_dummy else open_weights(files)
    apart, stacked = (load_decoder(spec, source, x, max_model_len=64) for x in (EXACT, FIXED))
    ids = torch.randint(3, VOCAB, (20,))
    found = paged_logits(stacked, ids, [20])
    torch.testing.assert_close(found, paged_logits(apart, ids, [20]), rtol=1e-4, atol=1e-5)
    blocks = [x.mlp for x in stacked.layers if isinstance(x.mlp, MoeMlp)]
    assert blocks
    for block in blocks:
        assert isinstance(block.experts, StackedExperts)
        assert len(block.experts.weights.down_EHI) == moe.num_experts + 2
        assert block.router.how.num_shared == 2
        assert block.shared is None
    assert all(x.mlp.shared for x in apart.layers if isinstance(x.mlp, MoeMlp))
    assert stacked.nbytes == 4 * spec.num_parameters


@torch.no_grad()
def test_slices_of_stacked_experts_add_up_over_ranks(tmp_path: Path) -> None:
    """Tensor parallel: a rank's slice of the shared expert is as many slices of others."""
    save_tiny(tmp_path, "glm4-moe-lite", n_shared_experts=2)
    files = locate(str(tmp_path))
    spec, source = read_spec(files.config), open_weights(files)
    groups = [Groups(tp=Group("tp", [0, 1], rank, Contract(), None)) for rank in (0, 1)]
    whole, *parts = (
        load_decoder(spec, source, FIXED, max_model_len=64, groups=x) for x in (ALONE, *groups)
    )
    x_TD = torch.randn(7, spec.hidden_size)
    blocks = [[x.mlp for x in model.layers] for model in (whole, *parts)]
    experts = [x for x in zip(*blocks, strict=True) if isinstance(x[0], MoeMlp)]
    assert experts
    for one, first, second in experts:
        assert isinstance(first, MoeMlp)
        assert first.shared is None
        torch.testing.assert_close(first(x_TD) + second(x_TD), one(x_TD), rtol=1e-4, atol=1e-5)


MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN: dict[str, Any] = {
    **{k: v for k, v in MIXTRAL.items() if k != "num_local_experts"},
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "moe_intermediate_size": 16,
}


def test_both_generations_of_keys_read_the_same() -> None:
    new = {**{k: v for k, v in QWEN.items() if k != "num_experts"}, "num_local_experts": 8}
    assert read_spec(QWEN) == read_spec(new)
    old = {**MIXTRAL, "rope_theta": 1e6, "torch_dtype": "bfloat16", "head_dim": None}
    new = {**MIXTRAL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert read_spec(old) == read_spec(new)


def test_a_window_counts_only_where_it_is_in_use() -> None:
    assert read_spec(MIXTRAL).sliding_window is None
    assert read_spec({**MIXTRAL, "sliding_window": 4096}).sliding_window == 4096
    off = {**QWEN, "sliding_window": 4096, "use_sliding_window": False}
    assert read_spec(off).sliding_window is None
    assert read_spec({**off, "use_sliding_window": True}).sliding_window == 4096


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**MIXTRAL, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok is 9.*only 8"),
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts is None"),
        ({**MIXTRAL, "sliding_window": 0}, "sliding_window is 0"),
        ({**QWEN, "scoring_func": "sigmoid"}, "router 'sigmoid'"),
        ({**QWEN, "moe_intermediate_size": None}, "moe_intermediate_size is None"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_spec(config)
