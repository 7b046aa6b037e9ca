"""A GGUF's metadata becomes the config.json that its model came from, or a refusal by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from paceline.checkpoint.gguf_config import llama3_factors
from paceline.checkpoint.source import locate
from paceline.errors import CheckpointError
from tests.checkpoint.gguf_writing import write_gguf
from tests.checkpoint.vocabularies import byte_level
from tests.tiny import FAMILIES, save_tiny

SAME_KEYS = (
    "architectures",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "vocab_size",
    "tie_word_embeddings",
    "rms_norm_eps",
)


def factors_of(model: Any) -> Any:
    """What the model's rope divides the plain frequencies by."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters["rope_theta"]
    plain = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return (plain / model.model.rotary_emb.inv_freq.double()).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_is_that_of_the_model(tmp_path: Path, family: str) -> None:
    model = save_tiny(tmp_path / "hf", family)
    factors = factors_of(model) if family == "llama-tied-rope3" else None
    path = tmp_path / "model.gguf"
    write_gguf(path, model, rope_factors=factors)
    config = locate(str(path)).config
    original = model.config.to_dict()
    for key in SAME_KEYS:
        assert config[key] == original[key], key
    assert config["rope_theta"] == original["rope_parameters"]["rope_theta"]
    assert config["head_dim"] == model.model.rotary_emb.inv_freq.numel() * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_built_from_our_config_computes_the_same_logits(
    tmp_path: Path, family: str
) -> None:
    model = save_tiny(tmp_path / "hf", family)
    factors = factors_of(model) if family == "llama-tied-rope3" else None
    path = tmp_path / "model.gguf"
    extra = {"llama.rope.scaling.original_context_length": 32} if factors is not None else None
    write_gguf(path, model, rope_factors=factors, extra=extra)
    config = locate(str(path)).config
    made = transformers.AutoConfig.for_model(**config)
    again = transformers.AutoModelForCausalLM.from_config(made).eval()
    again.load_state_dict(model.state_dict())
    ids = torch.arange(60).reshape(1, 60) % 90
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_llama_3_factors_are_given_back_as_the_parameters_they_came_from() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=1,
        vocab_size=8,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling},
    )
    rope = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    plain = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    ours = llama3_factors(scaling, 128, 500000.0)
    np.testing.assert_allclose(ours, (plain / rope.inv_freq.double()).numpy(), rtol=1e-5)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_recognised_in_its_table(tmp_path: Path, factor: float) -> None:
    model = save_tiny(
        tmp_path / "hf",
        "llama",
        hidden_size=64,
        num_attention_heads=1,
        num_key_value_heads=1,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    write_gguf(tmp_path / "model.gguf", model, rope_factors=factors_of(model))
    scaling = locate(str(tmp_path / "model.gguf")).config["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_a_table_of_ones_is_no_scaling(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "llama")
    write_gguf(tmp_path / "model.gguf", model, rope_factors=np.ones(4))
    assert "rope_scaling" not in locate(str(tmp_path / "model.gguf")).config


def test_an_unknown_table_is_kept_as_it_is(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "llama")
    write_gguf(tmp_path / "model.gguf", model, rope_factors=[1.0, 1.25, 2.5, 3.0])
    scaling = locate(str(tmp_path / "model.gguf")).config["rope_scaling"]
    assert scaling == {"rope_type": "gguf_factors", "factors": [1.0, 1.25, 2.5, 3.0]}


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 1.0}, None),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_scaling_in_the_metadata_is_translated(
    tmp_path: Path, extra: dict[str, Any], expected: Any
) -> None:
    model = save_tiny(tmp_path / "hf", "llama")
    write_gguf(tmp_path / "model.gguf", model, extra=extra)
    assert locate(str(tmp_path / "model.gguf")).config.get("rope_scaling") == expected


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported"),
        ({"general.architecture": "qwen35"}, "GGUF files of 'qwen35' are not supported.*original"),
        ({"general.architecture": "qwen35moe"}, "GGUF files of 'qwen35moe'"),
        ({"general.architecture": "qwen3next"}, "GGUF files of 'qwen3next'"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale is 0.5"),
        ({"llama.rope.dimension_count": 4}, "rope over 4 of 8"),
        ({"llama.attention.value_length": 16}, "8 for keys and 16 for values"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs from layer to layer"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_what_we_cannot_compute_is_refused_by_name(
    tmp_path: Path, extra: dict[str, Any], named: str
) -> None:
    model = save_tiny(tmp_path / "hf", "llama")
    write_gguf(tmp_path / "model.gguf", model, extra=extra)
    with pytest.raises(CheckpointError, match=named):
        locate(str(tmp_path / "model.gguf"))


def test_rope_factors_of_the_wrong_number_are_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "llama")
    write_gguf(tmp_path / "model.gguf", model, rope_factors=[1.0, 2.0])
    with pytest.raises(CheckpointError, match="2 factors; 4 are needed"):
        locate(str(tmp_path / "model.gguf"))


def test_a_number_per_layer_is_one_number_when_all_agree(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "llama")
    extra = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [48, 48]}
    write_gguf(tmp_path / "model.gguf", model, extra=extra)
    config = locate(str(tmp_path / "model.gguf")).config
    assert (config["num_key_value_heads"], config["intermediate_size"]) == (2, 48)


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "llama")
    path = tmp_path / "model.gguf"
    write_gguf(path, model)
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.block_cuont"))
    with pytest.raises(CheckpointError, match=r"has no llama\.block_count"):
        locate(str(path))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", "float32"), ("BF16", "bfloat16"), ("F16", "float16"), ("Q8_0", "float16")],
)
def test_the_dtype_is_what_the_matrices_are_stored_in(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    model = save_tiny(tmp_path / "hf", "llama", intermediate_size=64)
    write_gguf(tmp_path / "model.gguf", model, kind=kind)
    assert locate(str(tmp_path / "model.gguf")).config["torch_dtype"] == dtype


def test_every_token_that_ends_a_turn_ends_generation(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "llama")
    extra = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 7}
    vocabulary = byte_level("smollm")
    write_gguf(tmp_path / "model.gguf", model, vocabulary=vocabulary, extra=extra)
    files = locate(str(tmp_path / "model.gguf"))
    eos = vocabulary.special["eos"]
    assert files.config["eos_token_id"] == eos
    assert files.generation_config["eos_token_id"] == [eos, 7]
    assert files.config["bos_token_id"] == vocabulary.special["bos"]
