"""Specs from config.json of both generations; what is not supported is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import CheckpointError
from paceline.models.blocks.grouped_attention import GroupedSpec
from paceline.models.families import read_spec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def test_old_and_new_rope_keys_read_the_same() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {**scaling, "rope_type": "llama3"}}
    new = {**LLAMA, "rope_parameters": {**scaling, "rope_type": "llama3", "rope_theta": 5e5}}
    assert read_spec(old) == read_spec(new)
    assert read_spec(new).rope.kind == "llama3"
    assert read_spec(LLAMA).rope.theta == 10000.0


def test_old_scaling_keys_added_beside_the_new_keys_count() -> None:
    """As in transformers: model cards say how to write a longer window into config.json."""
    yarn = {"factor": 4.0, "original_max_position_embeddings": 64}
    added = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    for name in ("type", "rope_type"):
        rope = read_spec({**added, "rope_scaling": {name: "yarn", **yarn}}).rope
        assert (rope.kind, rope.factor, rope.theta) == ("yarn", 4.0, 5e5)


def test_head_size_is_explicit_or_derived() -> None:
    assert read_spec(LLAMA).head_size == 8
    assert read_spec({**LLAMA, "head_dim": 12}).head_size == 12
    assert read_spec({**LLAMA, "head_dim": None}).head_size == 8


def attention_of(config: dict[str, Any]) -> GroupedSpec:
    attention = read_spec(config).attention
    assert isinstance(attention, GroupedSpec)
    return attention


def test_biases_follow_the_family() -> None:
    assert not attention_of(LLAMA).has_qkv_bias
    qwen2 = attention_of({**LLAMA, "architectures": ["Qwen2ForCausalLM"]})
    assert qwen2.has_qkv_bias
    assert not qwen2.has_o_bias
    assert attention_of({**LLAMA, "attention_bias": True}).has_o_bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        ({"architectures": ["LlamaForCausalML"]}, "Did you mean 'LlamaForCausalLM'"),
        ({"architectures": None, "model_type": "rwkv"}, "'rwkv' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide over 3"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq'"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantised with 'mxfp4'"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "quantised with 'modelopt' 'NVFP4'"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}},
            r"quantised with fp8 in blocks of \[0, 128\], not of \[rows, columns\]",
        ),
        ({"quantization_config": "awq"}, "quantization_config is 'awq'; an object is needed"),
        ({"architectures": 3}, "architectures is 3; a list is needed"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; a positive number is needed"),
        ({"head_dim": 1.5}, "head_dim is 1.5; a positive integer is needed"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; an object"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor is -2; a positive number"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 64,
            },
            "sliding_window 64",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_spec({**LLAMA, **changes})
