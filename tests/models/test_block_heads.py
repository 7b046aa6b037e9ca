"""Heads that draft blocks: what is read of a checkpoint, and what is refused, with the numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import CheckpointError, ConfigError
from paceline.models.heads.dflash import DFlashSpec
from paceline.models.heads.registry import pick_method
from paceline.speculation import SpeculativeConfig
from tests.block_heads import MASK, random_block, save_block
from tests.drafters.recording import recorded
from tests.e2e.ladder import Workshop
from tests.heads import read_head


def config_of(workshop: Workshop, folder: Path, kind: str = "dflash", form: str = "z-lab") -> Any:
    save_block(folder, random_block(workshop.target("llama"), kind), form=form)
    return json.loads((folder / "config.json").read_text())


def spec_of(workshop: Workshop, config: Any, method: str = "dflash", k: int = 3) -> DFlashSpec:
    from paceline.models.families import read_spec

    target = read_spec(workshop.target("llama").config.to_dict() | _LLAMA)
    found = read_head(method, "a/head", config, target, num_speculative_tokens=k)
    assert isinstance(found, DFlashSpec)
    return found


_LLAMA = {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target_hidden_size": 40}, "hidden states of 40 numbers, the target's have 32"),
        ({"vocab_size": 90}, "vocabulary of 90 tokens, the target has 96"),
        ({"num_target_layers": 36}, "a target of 36 layers, this one has 2"),
        ({"dflash_config": {"mask_token_id": 96}}, "mask token 96, but the embedding has 96 rows"),
        ({"dflash_config": {"target_layer_ids": [0, 9]}}, r"layers \[0, 9\], .* the target has 2"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "the last one's output cannot be read"),
        ({"dflash_config": {"block_size": 3}}, "blocks of 3 tokens, which makes 2 drafts"),
        ({"layer_types": ["full_attention"]}, "2 layers and 1 layer_types"),
        ({"is_neox_style": False}, "has is_neox_style False"),
        ({"dflash_config": {"attention_value_scale": 0.5}}, "attention_value_scale 0.5"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias True"),
        ({"architectures": ["LiLiCorrDraftModel"]}, "a LiLiCorr head"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "a Laguna head"),
        ({"dflash_config": {"projector_type": "domino"}}, "a Domino head"),
        ({"pard2_target_layers": [1]}, "a PARD2 head"),
        ({"architectures": ["MedusaModel"]}, "a Medusa head"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "a MLP speculator head"),
    ],
    ids=str,
)
def test_a_head_for_another_target_or_of_another_kind_is_refused(
    workshop: Workshop, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    config = config_of(workshop, tmp_path)
    inner = config["dflash_config"] | changes.get("dflash_config", {})
    with pytest.raises(CheckpointError, match=says):
        spec_of(workshop, config | changes | {"dflash_config": inner})


def test_a_missing_mask_token_is_named(workshop: Workshop, tmp_path: Path) -> None:
    config = config_of(workshop, tmp_path)
    del config["dflash_config"]["mask_token_id"]
    with pytest.raises(CheckpointError, match="no mask token"):
        spec_of(workshop, config)


@pytest.mark.parametrize("kind", ["rnn", "other"])
def test_dspark_heads_of_other_types_are_refused(
    workshop: Workshop, tmp_path: Path, kind: str
) -> None:
    config = config_of(workshop, tmp_path, "dspark")
    config["dflash_config"]["markov_head_type"] = kind
    with pytest.raises(CheckpointError, match=f"type '{kind}', .*; vanilla and gated are"):
        spec_of(workshop, config, "dspark")


def test_every_key_of_dflash2_is_required(workshop: Workshop, tmp_path: Path) -> None:
    config = config_of(workshop, tmp_path, "dflash2")
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        inner = {k: v for k, v in config["dflash_config"].items() if k != key}
        with pytest.raises(CheckpointError, match=key):
            spec_of(workshop, config | {"dflash_config": inner})


def test_dsparks_anchor_gives_a_draft_unless_the_head_says_otherwise(
    workshop: Workshop, tmp_path: Path
) -> None:
    config = config_of(workshop, tmp_path, "dspark", "speculators")
    del config["sample_from_anchor"]
    assert spec_of(workshop, config, "dspark", 8).layout.width == 8
    filling = spec_of(workshop, config | {"sample_from_anchor": False}, "dspark", 7)
    assert (filling.layout.first_output, filling.layout.width) == (1, 8)
    # deepseek-ai's dflash heads of seven drafts are of this kind, without a markov head.
    plain = spec_of(workshop, config | {"markov_rank": 0}, "dspark", 7)
    assert (plain.chain, plain.layout.first_output) == (None, 0)


def test_directions_of_layers_are_those_of_training(workshop: Workshop, tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"]
    more = {"layer_types": types, "sliding_window": 11}
    config = config_of(workshop, tmp_path) | more
    del config["is_causal"]
    assert spec_of(workshop, config).kinds == ((11, True, False), (None, False, False))
    for stated in (True, False):
        assert spec_of(workshop, config | {"is_causal": stated}).kinds == (
            (11, stated, False),
            (None, stated, False),
        )
    config = config_of(workshop, tmp_path, form="speculators")
    config["transformer_layer_config"] |= more
    for non_causal in (True, False):
        config["sliding_window_non_causal"] = non_causal
        kinds = ((12, not non_causal, True), (None, False, False))
        assert spec_of(workshop, config).kinds == kinds


def test_a_head_tells_its_kind_and_another_method_is_refused(
    workshop: Workshop, tmp_path: Path
) -> None:
    found = {}
    for kind in ("dflash", "dflash2", "dspark"):
        for form in ("z-lab", "speculators"):
            config = config_of(workshop, tmp_path, kind, form)
            options = SpeculativeConfig.from_mapping({"model": "a/b", "num_speculative_tokens": 1})
            found[kind, form] = pick_method("a/b", config, options)
    assert {(kind, method) for (kind, _), method in found.items()} == {
        ("dflash", "dflash"),
        ("dflash2", "dflash"),
        ("dspark", "dspark"),
    }
    with pytest.raises(CheckpointError, match='is a DSpark head: give "method": "dspark"'):
        spec_of(workshop, config_of(workshop, tmp_path, "dspark"), "dflash")


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({"method": "p-eagle"}, "peagle"),
        ({"method": "eagle3", "parallel_drafting": True}, "peagle"),
        ({"method": "draft_model", "parallel_drafting": True}, "pard"),
        ({"method": "dflash", "parallel_drafting": True}, "dflash"),
        ({"method": "dflash2"}, "dflash"),
    ],
)
def test_methods_have_the_names_of_others_too(given: dict[str, Any], method: str) -> None:
    values = {"model": "a/b", "num_speculative_tokens": 3} | given
    assert SpeculativeConfig.from_mapping(values).method == method


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator", "custom_class", "pard2", "domino"])
def test_other_methods_are_refused_by_name(method: str) -> None:
    values = {"method": method, "model": "a/b", "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match=f"speculative method '{method}'"):
        SpeculativeConfig.from_mapping(values)
    with pytest.raises(ConfigError, match='"ngram" cannot'):
        SpeculativeConfig.from_mapping(
            {"method": "ngram", "parallel_drafting": True, "num_speculative_tokens": 2}
        )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fc.weight", r"no tensor 'model.fc.weight'"),
        ("layers.1.self_attn.k_norm.weight", "k_norm.weight"),
        ("markov_head.markov_w2.weight", "markov_w2.weight"),
    ],
)
def test_a_missing_tensor_and_a_wrong_shape_are_named(
    workshop: Workshop, tmp_path: Path, name: str, says: str
) -> None:
    save_block(tmp_path, random_block(workshop.target("llama"), "dspark"))
    tensors = load_file(tmp_path / "model.safetensors")
    spec = {"method": "dspark", "model": str(tmp_path), "num_speculative_tokens": 3}
    rest = {k: v for k, v in tensors.items() if k != name}
    save_file(rest, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=says), recorded(workshop, spec):
        pass
    save_file(rest | {name: torch.zeros(3, 5)}, tmp_path / "model.safetensors")
    with (
        pytest.raises(CheckpointError, match=re.escape("has shape [3, 5]")),
        recorded(workshop, spec),
    ):
        pass


def test_a_mask_embedding_beside_the_weights_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    save_block(tmp_path, random_block(workshop.target("llama")))
    torch.save({"mask_token_id": MASK}, tmp_path / "mask_embedding.pt")
    spec = {"method": "dflash", "model": str(tmp_path), "num_speculative_tokens": 3}
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt"), recorded(workshop, spec):
        pass
