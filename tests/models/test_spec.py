"""Specs from config.json of both generations; what is not supported is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import CheckpointError
from paceline.models.spec import read_spec

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


def test_head_size_is_explicit_or_derived() -> None:
    assert read_spec(LLAMA).head_size == 8
    assert read_spec({**LLAMA, "head_dim": 12}).head_size == 12
    assert read_spec({**LLAMA, "head_dim": None}).head_size == 8


def test_biases_follow_the_family() -> None:
    assert not read_spec(LLAMA).has_qkv_bias
    qwen2 = read_spec({**LLAMA, "architectures": ["Qwen2ForCausalLM"]})
    assert qwen2.has_qkv_bias
    assert not qwen2.has_o_bias
    assert read_spec({**LLAMA, "attention_bias": True}).has_o_bias


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
