"""Models in fp8: logits of an independent reference, whichever way the weights came to be fp8."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.layers.fp8 import Fp8Linear, JoinedLinear, RoundedLinear, fp8_linear, rounded_linear
from paceline.layers.linear import DenseLinear, dense, exact_linear
from paceline.layers.moe import MoeMlp, StackedExperts
from paceline.models.decoder import Decoder
from paceline.models.families import read_spec
from paceline.models.reader import WeightFormats
from tests.fp8 import (
    CHANNEL_GROUP,
    FORMS,
    LARGE,
    assert_within_fp8,
    compressed,
    fp8_reference,
    quantise_checkpoint,
    rounded_weight,
    save_large,
)
from tests.models.test_decoder import CPU, EXACT, paged_logits
from tests.models.test_moe import load_as
from tests.tiers import first_or_more
from tests.tiny import VOCAB, save_tiny, tiny_config

By = Literal["channel", "block"]
IDS = torch.randint(3, VOCAB, (16, 3), generator=torch.Generator().manual_seed(5))


def formats(by: By | None, *, is_fixed: bool = False) -> WeightFormats:
    """By `by` None, only what the checkpoint has in fp8."""
    linear = dense(torch.float32, CPU) if is_fixed else exact_linear(CPU)
    fp8 = fp8_linear(torch.float32, CPU) if is_fixed else rounded_linear(linear)
    return WeightFormats(
        *(linear, torch.float32, torch.float32, CPU),
        has_fixed_shapes=is_fixed,
        fp8=fp8,
        rounds_by=by,
    )


def logits_of(model: Decoder) -> Tensor:
    return torch.cat([paged_logits(model, ids, [2, 1]) for ids in IDS])


def logits_as(folder: Path, how: WeightFormats) -> Tensor:
    return logits_of(load_as(folder, how))


def as_wanted(plain: Any, by: str, **more: Any) -> tuple[Tensor, Tensor]:
    """Logits of the reference in fp8, and of the model that was not rounded."""
    models = (fp8_reference(plain, by, **more), plain)
    first, second = (x(IDS).logits.flatten(0, 1) for x in models)
    return first, second


def stacked_parts(name: str) -> int:
    """On a GPU a shared expert is stacked as two experts, whose rows are rounded one by one."""
    return 2 if "shared_expert" in name and name.endswith("down_proj") else 1


def linears_of(model: Decoder) -> list[Any]:
    """Of a dense model."""
    blocks: list[Any] = [(x.attention, x.mlp) for x in model.layers]
    return [x for a, m in blocks for x in (a.qkv, a.o, m.gate_up, m.down)]


# ---- --quantization

CASES = [(f, by, is_fixed) for f in LARGE for by in ("channel", "block") for is_fixed in (0, 1)]
FIRST = [("qwen2", "channel", 0), ("deepseek-v3", "block", 1), ("qwen3.5-moe", "channel", 1)]


@pytest.mark.parametrize(
    ("family", "by", "is_fixed"), first_or_more(CASES, lambda x: x in FIRST), ids=str
)
@torch.no_grad()
def test_logits_are_those_of_a_reference_in_fp8(
    tmp_path: Path, family: str, by: By, is_fixed: int
) -> None:
    plain = save_large(tmp_path, family)
    found = logits_as(tmp_path, formats(by, is_fixed=bool(is_fixed)))
    more = {"parts_of": stacked_parts} if is_fixed else {}
    assert_within_fp8(found, *as_wanted(plain, by, **more))


@torch.no_grad()
def test_gates_of_a_delta_net_and_the_head_are_not_rounded(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3.5")
    model = load_as(tmp_path, formats("channel"))
    net: Any = model.layers[0].attention
    assert isinstance(net.input, JoinedLinear)
    assert [isinstance(x, RoundedLinear) for x in net.input.parts] == [True, False, True]
    assert isinstance(net.output, RoundedLinear)
    assert not isinstance(model.lm_head, RoundedLinear)
    plain: Any = load_as(tmp_path, EXACT).layers[0].attention
    assert isinstance(plain.input, DenseLinear), "one product where nothing is rounded"


def test_a_weight_of_a_layer_counts_one_byte() -> None:
    spec = read_spec(tiny_config("llama").to_dict() | {"architectures": ["LlamaForCausalLM"]})
    tables = 2 * spec.vocab_size * spec.hidden_size
    assert spec.weight_bytes(2) == 2 * spec.num_parameters
    assert spec.weight_bytes(2, is_fp8=True) == spec.num_parameters + tables


# ---- checkpoints in fp8


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_checkpoint_in_fp8_is_served_as_it_is(tmp_path: Path, form: str) -> None:
    plain = save_large(tmp_path, "qwen2")
    quantise_checkpoint(tmp_path, form)
    model = load_as(tmp_path, formats(None))
    assert all(isinstance(x, RoundedLinear) for x in linears_of(model))
    assert_within_fp8(logits_of(model), *as_wanted(plain, FORMS[form][0]))


def test_codes_and_scales_are_kept_and_not_made_anew(tmp_path: Path) -> None:
    """Whose largest number is not 448: a second rounding would change them."""
    save_large(tmp_path, "qwen2")
    quantise_checkpoint(tmp_path, "fp8 blocks")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] = (tensors[name].float() / 4).to(torch.float8_e4m3fn)
    tensors[name + "_scale_inv"] *= 3
    save_file(tensors, path, metadata={"format": "pt"})
    model = load_as(tmp_path, formats(None, is_fixed=True))
    kept = linears_of(model)[5]
    assert isinstance(kept, Fp8Linear)
    assert torch.equal(kept.weight.codes_NK.view(torch.uint8), tensors[name].view(torch.uint8))
    assert torch.equal(kept.weight.scale, tensors[name + "_scale_inv"])
    assert kept.nbytes == tensors[name].nbytes + tensors[name + "_scale_inv"].nbytes


@pytest.mark.parametrize("is_fused", [False, True], ids=["one by one", "fused"])
@pytest.mark.parametrize("is_fixed", [False, True], ids=["compact", "fixed"])
@torch.no_grad()
def test_experts_in_fp8_are_served_as_they_are(
    tmp_path: Path, is_fixed: bool, is_fused: bool
) -> None:
    """Layer 0 has experts of both layouts' sizes; the shared expert is in fp8 as well."""
    plain = save_large(tmp_path, "deepseek-v3")
    quantise_checkpoint(tmp_path, "fp8 blocks")
    if is_fused:
        fuse_experts(tmp_path, layer=1)
    model = load_as(tmp_path, formats(None, is_fixed=is_fixed))
    more = {"parts_of": stacked_parts} if is_fixed else {}
    assert_within_fp8(logits_of(model), *as_wanted(plain, "block", **more))
    blocks = [x.mlp for x in model.layers if isinstance(x.mlp, MoeMlp)]
    if is_fixed:
        assert all(isinstance(x.experts, StackedExperts) for x in blocks)
        assert all(x.experts.weights.down_EHI.dtype == torch.float8_e4m3fn for x in blocks)  # type: ignore[attr-defined]
        assert all(x.shared is None for x in blocks)


@torch.no_grad()
def test_experts_whose_gate_ends_within_a_block_are_dequantised_where_they_are_stacked(
    tmp_path: Path,
) -> None:
    """192 rows of gate, then 192 of up: the second block would have rows of both."""
    plain = save_large(tmp_path, "qwen3-moe")
    quantise_checkpoint(tmp_path, "fp8 blocks")
    mlp: Any = load_as(tmp_path, formats(None, is_fixed=True)).layers[0].mlp
    gate_up, down, *scales = mlp.experts.weights
    assert scales == [None, None]
    theirs = plain.model.layers[0].mlp.experts
    parts = theirs.gate_up_proj[2].chunk(2)
    assert torch.equal(gate_up[2], torch.cat([rounded_weight(x, "block") for x in parts]))
    assert torch.equal(down[2], rounded_weight(theirs.down_proj[2], "block"))
    # One by one they are two products side by side.
    apart: Any = load_as(tmp_path, formats(None)).layers[0].mlp
    assert isinstance(apart.experts.experts[2].gate_up, JoinedLinear)


def fuse_experts(folder: Path, layer: int) -> None:
    path, at = folder / "model.safetensors", f"model.layers.{layer}.mlp.experts."
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


@torch.no_grad()
def test_a_shared_expert_that_is_not_in_fp8_is_computed_apart(tmp_path: Path) -> None:
    plain = save_large(tmp_path, "deepseek-v3")
    quantise_checkpoint(tmp_path, "fp8 blocks", lambda name: "shared" not in name)
    model = load_as(tmp_path, formats(None, is_fixed=True))
    blocks = [x.mlp for x in model.layers if isinstance(x.mlp, MoeMlp)]
    assert blocks
    assert all(x.shared is not None for x in blocks)
    wanted = as_wanted(plain, "block", is_quantised=lambda name: "shared" not in name)
    assert_within_fp8(logits_of(model), *wanted)


@torch.no_grad()
def test_projections_of_several_kinds_are_one_layer(tmp_path: Path) -> None:
    """A checkpoint that leaves k_proj and up_proj alone."""
    plain = save_large(tmp_path, "qwen2")
    is_quantised = lambda name: not name.endswith(("k_proj", "up_proj"))  # noqa: E731
    quantise_checkpoint(tmp_path, "compressed channels", is_quantised)
    model = load_as(tmp_path, formats(None))
    qkv = linears_of(model)[0]
    assert isinstance(qkv, JoinedLinear)
    assert [isinstance(x, RoundedLinear) for x in qkv.parts] == [True, False, True]
    assert_within_fp8(logits_of(model), *as_wanted(plain, "channel", is_quantised=is_quantised))


@pytest.mark.parametrize("change", ["other blocks", "wide activations"])
@torch.no_grad()
def test_what_fp8_products_do_not_fit_is_dequantised_and_said(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_large(tmp_path, "qwen2")
    quantise_checkpoint(tmp_path, "compressed channels")
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    if change == "wide activations":
        values["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    else:
        values["quantization_config"] = compressed(strategy="block", block_structure=[1, 256])
        tensors = load_file(tmp_path / "model.safetensors")
        for name in [n for n in tensors if n.endswith("down_proj.weight_scale")]:
            tensors[name] = tensors[name].repeat(1, 2).contiguous()
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    path.write_text(json.dumps(values))
    with caplog.at_level(logging.INFO):
        model = load_as(tmp_path, formats(None))
    assert not any(isinstance(x, RoundedLinear) for x in linears_of(model))
    assert sum("its fp8 weights are dequantised" in x.message for x in caplog.records) == 1
    wanted = logits_as(tmp_path, EXACT)
    torch.testing.assert_close(logits_of(model), wanted, rtol=1e-4, atol=1e-4)


def test_which_scales_of_a_checkpoint_are_not_used_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_large(tmp_path, "qwen2")
    quantise_checkpoint(tmp_path, "modelopt")
    values = json.loads((tmp_path / "config.json").read_text())
    algorithm = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": algorithm}))
    with caplog.at_level(logging.INFO):
        model = load_as(tmp_path, formats(None))
    said = " ".join(x.message for x in caplog.records)
    assert "its scales of activations are not used" in said
    assert "its scales of the KV cache are used by --kv-cache-dtype fp8 alone" in said
    assert "tensors are not used" not in said
    assert all(isinstance(x, RoundedLinear) for x in linears_of(model))


# ---- what is refused


def group(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {**CHANNEL_GROUP, **changes}}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
    ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "'fp8' of type 'e5m2'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"blocks of \[128\], not of"),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "'modelopt' 'W4A16_AWQ'"),
    ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "'modelopt' 'MXFP8'"),
    ({**compressed(), "format": "pack-quantized"}, "in the format 'pack-quantized'"),
    ({**compressed(), "format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
    ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
    (compressed(type="int"), "'compressed-tensors' int of 8 bits"),
    (compressed(strategy="group"), "weights by 'group'"),
    (compressed(strategy="block"), "blocks of None"),
    ({**compressed(), "config_groups": {}}, "none or several schemes"),
    (
        {**compressed(), **group(input_activations={"type": "int", "num_bits": 8})},
        "int of 8 bits",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=str)
def test_other_formats_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": values}
    with pytest.raises(CheckpointError, match=message) as caught:
        read_spec(config)
    assert "--quantization fp8 rounds them" in str(caught.value)


def test_experts_of_one_layer_in_two_formats_are_refused_where_they_are_stacked(
    tmp_path: Path,
) -> None:
    save_large(tmp_path, "qwen3-moe")
    quantise_checkpoint(tmp_path, "compressed channels", lambda name: "experts.3." not in name)
    with pytest.raises(CheckpointError, match="some experts of a layer are in fp8 and others"):
        load_as(tmp_path, formats(None, is_fixed=True))
    load_as(tmp_path, formats(None))


def test_scales_of_numbers_that_are_not_fp8_are_refused(tmp_path: Path) -> None:
    save_large(tmp_path, "qwen2")
    quantise_checkpoint(tmp_path, "compressed channels")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.down_proj.weight"
    codes = tensors[name]
    tensors[name] = codes.to(torch.int8)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name}' has scales and is stored in torch.int8"):
        load_as(tmp_path, formats(None))
    tensors |= {name: codes, name + "_scale": torch.ones(5, 1)}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has shape \[5, 1\]; scales by output of"):
        load_as(tmp_path, formats(None))
