"""Qwen3.5 and Qwen3-Next: logits equal transformers' in fp32, whatever a checkpoint looks like."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.checkpoint.source import locate
from paceline.errors import CheckpointError
from paceline.layers.attention import GroupedAttention
from paceline.layers.delta_net import GatedDeltaNet
from paceline.layers.linear import cuda_linear
from paceline.layers.moe import MoeMlp, SeparateExperts, StackedExperts
from paceline.models.decoder import Decoder
from paceline.models.families import read_spec
from paceline.models.layout import add_storage, lay_out, make_recurrent
from paceline.models.loading import expected_shapes, load_decoder
from paceline.models.reader import WeightFormats
from paceline.models.weight_source import DummyWeights
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from tests.heads import read_head
from tests.models.test_decoder import CPU, EXACT, load, paged_logits
from tests.models.test_mla import as_blocks, plain
from tests.models.test_moe import FIXED, PANELS, load_as
from tests.models.test_mtp import load as load_with_head
from tests.models.test_mtp import outputs
from tests.mtp import random_mtp, save_mtp
from tests.plain_qwen import PlainQwen
from tests.recurrent import storage_of, with_rows
from tests.tiny import HYBRID_FAMILIES, VOCAB, greedy_reference, save_tiny

Tensors = dict[str, Tensor]
# transformers computes prompts in chunks, which differs from token by token by about 1e-4.
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 3e-4}
EACH_FAMILY = pytest.mark.parametrize("family", HYBRID_FAMILIES)


def assert_same_logits(model: Decoder, reference: Any, count: int = 60) -> None:
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB, (count,))
    pieces = [min(17, count), 1, 5, count - 23] if count > 23 else [count]
    found = paged_logits(model, ids, pieces)
    torch.testing.assert_close(found, reference(ids[None]).logits[0], **TOLERANCE)


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = folder / "model.safetensors"
    tensors = {n: t.contiguous().clone() for n, t in change(load_file(path)).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def reconfigure(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def save_with_head(path: Path, family: str) -> tuple[Any, Path]:
    """The reference, and where its checkpoint with an MTP head is."""
    reference = save_tiny(path / "plain", family)
    save_mtp(path / "mtp", path / "plain", random_mtp(reference))
    return reference, path / "mtp"


# ---- what a model computes


@pytest.mark.parametrize("formats", [EXACT, FIXED, PANELS], ids=["exact", "fixed", "panels"])
@EACH_FAMILY
@torch.no_grad()
def test_logits_equal_transformers(tmp_path: Path, family: str, formats: WeightFormats) -> None:
    reference = save_tiny(tmp_path, family)
    model = load_as(tmp_path, formats)
    assert_same_logits(model, reference, 90)
    assert model.fused is None
    kinds = [GatedDeltaNet, GroupedAttention] * 2
    assert [type(x.attention) for x in model.layers] == kinds
    experts = [x.mlp.experts for x in model.layers if isinstance(x.mlp, MoeMlp)]
    assert len(experts) == {"qwen3.5": 0, "qwen3.5-moe": 4, "qwen3-next": 3}[family]
    kind = StackedExperts if formats.has_fixed_shapes else SeparateExperts
    assert all(isinstance(x, kind) for x in experts)


@pytest.mark.parametrize(("width", "is_stacked"), [(40, True), (28, False)])
@torch.no_grad()
def test_a_shared_expert_with_a_gate_is_stacked_where_its_width_allows(
    tmp_path: Path, width: int, is_stacked: bool
) -> None:
    reference = save_tiny(tmp_path, "qwen3.5-moe", shared_expert_intermediate_size=width)
    model = load_as(tmp_path, FIXED)
    assert_same_logits(model, reference)
    for layer in model.layers:
        assert isinstance(layer.mlp, MoeMlp)
        assert (layer.mlp.shared is None) == is_stacked
        assert layer.mlp.router.how.has_shared_gate == is_stacked


@EACH_FAMILY
@torch.no_grad()
def test_the_definition_gives_the_logits_and_tokens_of_transformers(
    tmp_path: Path, family: str
) -> None:
    reference = save_tiny(tmp_path, family)
    definition = PlainQwen(tmp_path)
    ids = torch.randint(3, VOCAB, (24,))
    found = definition.logits(definition.hidden(ids.tolist()))
    torch.testing.assert_close(found.float(), reference(ids[None]).logits[0], **TOLERANCE)
    prompt = ids[:9].tolist()
    assert definition.greedy(prompt, 6) == greedy_reference(reference, prompt, 6)[:6]


@EACH_FAMILY
@torch.no_grad()
def test_drafts_of_the_mtp_head_are_those_of_the_definition(tmp_path: Path, family: str) -> None:
    _, folder = save_with_head(tmp_path, family)
    target, head = load_with_head(folder)
    definition = PlainQwen(folder)
    for seed in range(4):
        torch.manual_seed(seed)
        tokens = torch.randint(3, VOCAB, (20,)).tolist()
        feature_ND, fed = features(target, tokens[:-1]), tokens[1:]
        for _ in range(3):
            out_ND = outputs(head, feature_ND, torch.tensor(fed))
            fed.append(int(head.logits(out_ND[-1:]).argmax()))
            feature_ND = torch.cat((feature_ND, out_ND[-1:]))
        assert fed[19:] == definition.drafts(tokens, 3)


def features(model: Decoder, tokens: list[int]) -> Tensor:
    pages, slots = Pages(8, 8, 1, 64, CPU), Slots(1, 64, 0, VOCAB, CPU)
    pages.table_SP[0] = torch.arange(8).int()
    slots.tokens_SL[0, : len(tokens)] = torch.tensor(tokens).int()
    layers, at = storage_of(model.spec, slots, pages), np.array([0])
    inputs = lay_out(slots, pages, at, at, np.array([len(tokens)]), model.spec.group_size)
    return model.forward_with_features(with_rows(inputs), layers, ())[1]


VARIANTS: list[dict[str, Any]] = [
    {"attention_bias": True},
    {"tie_word_embeddings": True},
    {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
    {"linear_num_key_heads": 2, "linear_num_value_heads": 6},
    {"linear_conv_kernel_dim": 3},
    {"head_dim": 8, "num_key_value_heads": 1},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 1.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}},
    {"layer_types": ["full_attention", "full_attention", "linear_attention"]},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@torch.no_grad()
def test_what_a_config_may_vary_is_honoured(tmp_path: Path, changes: dict[str, Any]) -> None:
    count = {"num_hidden_layers": len(changes.get("layer_types", "four"))}
    reference = save_tiny(tmp_path, "qwen3.5", **changes, **count)
    assert_same_logits(load(tmp_path), reference)


@pytest.mark.parametrize(
    "changes", [{"norm_topk_prob": False}, {"decoder_sparse_step": 2, "mlp_only_layers": []}]
)
@torch.no_grad()
def test_what_qwen3_next_may_vary_is_honoured(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = save_tiny(tmp_path, "qwen3-next", **changes)
    assert_same_logits(load(tmp_path), reference)


@torch.no_grad()
def test_layers_follow_the_interval_where_no_list_is_given(tmp_path: Path) -> None:
    types = ["linear_attention"] * 2 + ["full_attention"] + ["linear_attention"]
    reference = save_tiny(tmp_path, "qwen3.5", layer_types=types)
    reconfigure(tmp_path, lambda x: {**x, "layer_types": None, "full_attention_interval": 3})
    assert_same_logits(load(tmp_path), reference)
    spec = read_spec({**json.loads((tmp_path / "config.json").read_text()), "num_hidden_layers": 9})
    has_pages = [x.attention.has_pages for x in spec.layers]
    assert has_pages == [False, False, True] * 3


@torch.no_grad()
def test_the_gate_of_a_delta_net_may_be_a_sigmoid(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "qwen3.5")
    for name, same in (("swish", True), ("sigmoid", False)):
        reconfigure(tmp_path, lambda x, name=name: {**x, "output_gate_type": name})  # type: ignore[misc]
        for layer in reference.model.layers[::2]:
            layer.linear_attn.norm.activation = "silu" if same else "sigmoid"
        assert_same_logits(load(tmp_path), reference)


@torch.no_grad()
def test_attention_without_a_gate_is_honoured(tmp_path: Path) -> None:
    """A gate of 0 halves what attention returns: the same as half an output projection."""
    reference = save_tiny(tmp_path, "qwen3.5")
    for layer in reference.model.layers[1::2]:
        layer.self_attn.q_proj.weight.view(4, 2, 16, 32)[:, 1] = 0

    def without_gates(tensors: Tensors) -> Tensors:
        for i in (1, 3):
            at = f"model.layers.{i}.self_attn."
            query = tensors[at + "q_proj.weight"].view(4, 2, 16, 32)[:, 0].flatten(0, 1)
            tensors |= {at + "q_proj.weight": query}
            tensors[at + "o_proj.weight"] /= 2
        return tensors

    rewrite(tmp_path, without_gates)
    reconfigure(tmp_path, lambda x: {**x, "attn_output_gate": False})
    assert_same_logits(load(tmp_path), reference)


# ---- how it is stored


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@torch.no_grad()
def test_the_text_part_of_a_model_for_images_is_read(
    tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A nested config, a prefix before all names, and a vision part that is named once."""
    reference, folder = save_with_head(tmp_path, "qwen3.5")
    vision = {f"model.visual.blocks.{i}.attn.qkv.weight": torch.randn(3, 3) for i in range(5)}
    head = "lm_head.weight" if prefix.startswith("model.") else "language_model.lm_head.weight"

    def nested(tensors: Tensors) -> Tensors:
        renamed = {n.replace("model.", prefix, 1): t for n, t in tensors.items() if n[:2] == "mo"}
        kept = {n: t for n, t in tensors.items() if n.startswith("mtp.")}
        return {**renamed, **kept, head: tensors["lm_head.weight"], **vision}

    rewrite(folder, nested)
    reconfigure(
        folder,
        lambda x: {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "vision_config": {"hidden_size": 7, "depth": 5},
            "text_config": {**x, "architectures": None},
        },
    )
    with caplog.at_level(logging.INFO):
        assert_same_logits(load(folder), reference)
    assert caplog.text.count("5 tensors of the vision part are not read") == 1
    assert "not used" not in caplog.text
    target, model = load_with_head(folder)
    assert model.lm_head is target.lm_head


@torch.no_grad()
def test_a_checkpoint_of_transformers_class_for_images_is_read(tmp_path: Path) -> None:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = save_tiny(tmp_path / "text", "qwen3.5")
    vision = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 8}
    config = Qwen3_5Config(
        text_config=text.config.to_dict(), vision_config={**vision, "out_hidden_size": 32}
    )
    whole = Qwen3_5ForConditionalGeneration(config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    assert_same_logits(load(tmp_path / "whole"), text)


@pytest.mark.parametrize("has_fused_head", [True, False])
@torch.no_grad()
def test_experts_are_fused_or_not_in_the_model_and_in_its_head(
    tmp_path: Path, has_fused_head: bool
) -> None:
    reference = save_tiny(tmp_path / "plain", "qwen3.5-moe")
    mtp = random_mtp(reference)
    save_mtp(tmp_path / "mtp", tmp_path / "plain", mtp)
    places = [f"model.layers.{i}." for i in range(3)] + ["mtp.layers.0."] * has_fused_head
    rewrite(tmp_path / "mtp", lambda tensors: fused(tensors, places))
    target, head = load_with_head(tmp_path / "mtp")
    assert_same_logits(target, reference)
    feature_ND, token_N = torch.randn(20, 32), torch.randint(0, VOCAB, (20,))
    found, expected = outputs(head, feature_ND, token_N), mtp.forward(feature_ND, token_N)
    torch.testing.assert_close(found, expected, **TOLERANCE)


def fused(tensors: Tensors, places: list[str]) -> Tensors:
    for place in places:
        at = place + "mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{at}{e}.{x}_proj.weight") for e in range(6)])
            for x in ("gate", "up", "down")
        )
        tensors |= {at + "gate_up_proj": torch.cat((gate, up), dim=1), at + "down_proj": down}
    return tensors


@pytest.mark.parametrize("kept", [("A_log", "linear_attn.norm.weight"), ()])
@torch.no_grad()
def test_tensors_of_different_types_are_read_without_further_rounding(
    tmp_path: Path, kept: tuple[str, ...]
) -> None:
    """As published: bf16, and in some releases a few tensors in fp32."""
    reference = save_tiny(tmp_path, "qwen3.5")
    rewrite(
        tmp_path,
        lambda tensors: (
            {n: t if n.endswith(kept) else t.bfloat16() for n, t in tensors.items()}
            if kept
            else {n: t.bfloat16() for n, t in tensors.items()}
        ),
    )
    stored = load_file(tmp_path / "model.safetensors")
    reference.load_state_dict({n: t.float() for n, t in stored.items()})
    assert_same_logits(load(tmp_path), reference)
    half = WeightFormats(
        cuda_linear(torch.bfloat16, CPU),
        torch.bfloat16,
        torch.bfloat16,
        CPU,
        compute=torch.bfloat16,
        has_fixed_shapes=True,
    )
    layer = load_as(tmp_path, half).layers[0]
    assert isinstance(layer.attention, GatedDeltaNet)
    at = "model.layers.0."
    weights = layer.attention.weights
    assert torch.equal(weights.decay_N, -stored[at + "linear_attn.A_log"].float().exp())
    assert weights.bias_N.dtype == torch.float32
    assert layer.input_norm is not None
    assert torch.equal(layer.input_norm, 1 + stored[at + "input_layernorm.weight"].float())


@torch.no_grad()
def test_activations_stay_in_bf16_although_norms_do_not(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "qwen3.5")
    formats = WeightFormats(
        cuda_linear(torch.bfloat16, CPU),
        torch.bfloat16,
        torch.bfloat16,
        CPU,
        compute=torch.bfloat16,
        has_fixed_shapes=True,
    )
    model = load_as(tmp_path, formats)
    assert model.final_norm.dtype == torch.float32
    pages, slots = Pages(4, 16, 1, 64, CPU), Slots(1, 64, 0, VOCAB, CPU)
    pages.table_SP[0] = torch.arange(4).int()
    ids = torch.randint(3, VOCAB, (20,))
    slots.tokens_SL[0, :20] = ids.int()
    recurrent = make_recurrent(model.spec, slots, 0, torch.bfloat16)
    layers, at = add_storage(pages, model.spec, torch.bfloat16, recurrent), np.array([0])
    inputs = lay_out(slots, pages, at, at, np.array([20]), model.spec.group_size)
    hidden_TD = model.forward(with_rows(inputs), layers)
    assert hidden_TD.dtype == torch.bfloat16
    expected = reference.model(ids[None]).last_hidden_state[0]
    theirs = reference.bfloat16().model(ids[None]).last_hidden_state[0]
    ours, others = ((x.float() - expected).abs().mean() for x in (hidden_TD, theirs))
    assert ours < 1.5 * others


@EACH_FAMILY
@torch.no_grad()
def test_fp8_blocks_are_read_as_the_numbers_that_they_stand_for(
    tmp_path: Path, family: str
) -> None:
    """As in published files: gates, convolutions and routers are not quantised."""
    reference, size = save_tiny(tmp_path, family), (16, 12)
    exempt = ("in_proj_a.", "in_proj_b.", "in_proj_ba.")

    def quantised(tensors: Tensors) -> Tensors:
        for name in [n for n in tensors if "_proj" in n and not any(x in n for x in exempt)]:
            tensors[name], tensors[name + "_scale_inv"] = as_blocks(tensors[name], size)
        return tensors

    def numbers(tensors: Tensors) -> Tensors:
        scaled = {n: n + "_scale_inv" for n in tensors if n + "_scale_inv" in tensors}
        rest = {n: t for n, t in tensors.items() if not n.endswith("_scale_inv")}
        return rest | {n: plain(tensors[n], tensors[s], size) for n, s in scaled.items()}

    rewrite(tmp_path, quantised)
    values = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(size)}
    reconfigure(tmp_path, lambda x: {**x, "quantization_config": values})
    found = load(tmp_path)
    rewrite(tmp_path, numbers)
    reconfigure(tmp_path, lambda x: {**x, "quantization_config": None})
    reference = type(reference).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_same_logits(found, reference)


@EACH_FAMILY
@torch.no_grad()
def test_dummy_weights_need_only_the_config(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path, family)
    config = {**locate(str(tmp_path)).config, "mtp_num_hidden_layers": 1}
    spec = read_spec(config)
    model = load_decoder(spec, DummyWeights(expected_shapes(spec), 1, CPU), EXACT, max_model_len=64)
    hidden = features(model, list(range(3, 20)))
    assert model.logits(hidden).isfinite().all()
    head = read_head("mtp", "dummy", config, spec)
    drafter = head.load(DummyWeights(head.shapes(spec), 3, CPU), EXACT, model)
    assert outputs(drafter, hidden, torch.arange(17)).isfinite().all()


@EACH_FAMILY
def test_sizes_count_every_matrix_and_only_layers_with_pages(tmp_path: Path, family: str) -> None:
    reference = save_tiny(tmp_path, family)
    spec = read_spec(locate(str(tmp_path)).config)
    norms = sum(p.numel() for n, p in reference.named_parameters() if "norm" in n)
    assert spec.num_parameters == sum(p.numel() for p in reference.parameters()) - norms
    assert spec.num_recurrent_layers == 2
    assert spec.kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2
    assert spec.recurrent == (2, 4, 8, 12, 4)


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_scale": True}, "layer_scale is in use, which is not supported"),
        ({"output_gate_type": "gelu"}, "output_gate_type 'gelu' is not supported; 'silu'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"linear_num_key_heads": 3}, "4 value heads of linear attention .* over 3 key heads"),
        ({"linear_key_head_dim": "x"}, "linear_key_head_dim is 'x'; a positive integer"),
        ({"layer_types": ["mamba"] * 4}, "layer_types .* 4 layers 'linear_attention' or"),
        ({"layer_types": ["full_attention"]}, "layer_types .* each of the 4 layers"),
        ({"layer_types": ["linear_attention"] * 4}, "has no 'full_attention' layer"),
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, "0.2 of 16 numbers is 3; pairs"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor 1.5"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    save_tiny(tmp_path, "qwen3.5")
    with pytest.raises(CheckpointError, match=message):
        read_spec({**locate(str(tmp_path)).config, **changes})


def test_a_partial_rotation_is_a_quarter_unless_a_config_says_otherwise(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3.5")
    config = locate(str(tmp_path)).config
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
    for given, outer, expected in ((None, None, 4), (None, 0.5, 8), (0.5, 0.25, 8), (0.25, 1.0, 4)):
        inner = rope if given is None else {**rope, "partial_rotary_factor": given}
        values = {**config, "rope_parameters": inner, "partial_rotary_factor": outer}
        assert read_spec(values).attention.rope_size == expected


def test_experts_are_known_by_their_number_whatever_the_class_is_called(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3.5-moe")
    config = locate(str(tmp_path)).config
    spec = read_spec({**config, "architectures": ["Qwen3_5ForCausalLM"]})
    assert spec == read_spec(config)
    assert spec.has_experts


@torch.no_grad()
def test_mtp_tensors_that_are_missing_are_named(tmp_path: Path) -> None:
    """Fine-tuned exports keep the count in config.json and drop the tensors."""
    _, folder = save_with_head(tmp_path, "qwen3.5")
    name = "mtp.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(CheckpointError, match=f"no tensor '{name}'"):
        load_with_head(folder)
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if n[:4] != "mtp."})
    with pytest.raises(
        CheckpointError, match=r"no tensor under 'mtp.' and no 'mtp.fc.weight'.*drop"
    ):
        load_with_head(folder)
    reconfigure(folder, lambda x: {**x, "mtp_num_hidden_layers": 0})
    with pytest.raises(CheckpointError, match=r"config.json says mtp_num_hidden_layers 0"):
        load_with_head(folder)
    reconfigure(folder, lambda x: {**x, "mtp_num_hidden_layers": 2})
    with pytest.raises(CheckpointError, match=r"2 MTP layers \(mtp_num_hidden_layers\)"):
        load_with_head(folder)


@torch.no_grad()
def test_qwen3_next_has_a_head_although_its_config_does_not_say_so(tmp_path: Path) -> None:
    _, folder = save_with_head(tmp_path, "qwen3-next")
    reconfigure(folder, lambda x: {n: v for n, v in x.items() if n != "mtp_num_hidden_layers"})
    load_with_head(folder)
