"""Writes tiny GGUF files from transformers models, the way llama.cpp's converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.checkpoint.vocabularies import Vocabulary

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(rows: Any, heads: int) -> Any:
    """Hugging Face's q or k rows in the order of llama-architecture GGUFs."""
    half = rows.shape[0] // heads // 2
    moved = rows.reshape(heads, 2, half, *rows.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(moved).reshape(rows.shape)


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def write_gguf(
    path: Path,
    model: Any,
    *,
    kind: str = "F32",
    vocabulary: Vocabulary | None = None,
    extra: dict[str, Any] | None = None,
    rope_factors: Any = None,
) -> None:
    """Matrices are stored as `kind`, vectors as F32. `extra` adds or overrides metadata."""
    config = model.config
    writer = _header(path, config, extra or {})
    if vocabulary is not None:
        write_vocabulary(writer, vocabulary)
    stored = gguf.GGMLQuantizationType[kind]
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        if config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
            is_q = ".q_proj." in name
            heads = config.num_attention_heads if is_q else config.num_key_value_heads
            values = permuted(values, heads)
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(
                gguf_name(name), gguf.quants.quantize(values, stored), raw_dtype=stored
            )
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_factors, np.float32))
    finish(writer)


def _header(path: Path, config: Any, extra: dict[str, Any]) -> Any:
    arch = config.model_type
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    values: dict[str, Any] = {
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.vocab_size": config.vocab_size,
        **extra,
    }
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", arch))
    for key, value in values.items():
        add_value(writer, key, value)
    return writer


def add_value(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)


def write_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    if vocabulary.pre is not None:
        writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges([" ".join(m) for m in vocabulary.merges])
    for name, token_id in vocabulary.special.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    for name, flag in vocabulary.flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)
    if vocabulary.template is not None:
        writer.add_chat_template(vocabulary.template)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer_only(path: Path, vocabulary: Vocabulary, architecture: str = "llama") -> None:
    """A file with a vocabulary and one small tensor, for tests that load no model."""
    writer = gguf.GGUFWriter(path, architecture)
    write_vocabulary(writer, vocabulary)
    writer.add_tensor("token_embd.weight", np.zeros((len(vocabulary.tokens), 4), np.float32))
    finish(writer)
