"""Tiny random checkpoints made with transformers: what all else is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 96
FAMILIES = ("llama", "llama-tied-rope3", "qwen2", "qwen3")  # what a GGUF file may hold
MOE_FAMILIES = ("mixtral", "mixtral-window", "qwen3-moe")
LATENT_FAMILIES = ("deepseek-v3", "glm4-moe-lite")
HYBRID_FAMILIES = ("qwen3.5", "qwen3.5-moe", "qwen3-next")
FOUR_KEY_HEADS = "qwen3.5-four"  # heads of recurrent layers for four ranks


def tiny_config(family: str, **changes: Any) -> Any:
    """A transformers config small enough for thousands of steps."""
    import transformers

    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
    }
    kinds = {"llama": "Llama", "llama-tied-rope3": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    if family == "llama-tied-rope3":
        values["tie_word_embeddings"] = True
        values["rope_parameters"] = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    if family == "qwen3":
        values["head_dim"] = 12
    if family in MOE_FAMILIES:
        kinds[family], more = _moe_values(family)
        values.update(more)
    if family in LATENT_FAMILIES:
        kinds[family], more = _latent_values(family)
        values.update(more)
    if family in (*HYBRID_FAMILIES, FOUR_KEY_HEADS):
        kinds[family], more = _hybrid_values(family)
        values.update(more)
    config_class = getattr(transformers, f"{kinds[family]}Config")
    return config_class(**{**values, **changes})


def _moe_values(family: str) -> tuple[str, dict[str, Any]]:
    """Counts that are no powers of two; a window that ends within pages of 4 and of 16."""
    if family != "qwen3-moe":
        window = 27 if family == "mixtral-window" else None
        return "Mixtral", {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": window,
        }
    return "Qwen3Moe", {
        "head_dim": 12,
        "num_hidden_layers": 3,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    }


def _latent_values(family: str) -> tuple[str, dict[str, Any]]:
    """Sizes of which no two are alike; an eps that is far from the one of the narrow norms."""
    values = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-3,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 20,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.8,
    }
    if family == "glm4-moe-lite":
        return "Glm4MoeLite", values
    values["n_group"], values["topk_group"] = 4, 2
    values["first_k_dense_replace"] = 1
    values["num_nextn_predict_layers"] = 0
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 8,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    }
    return "DeepseekV3", {**values, "rope_parameters": yarn}


def _hybrid_values(family: str) -> tuple[str, dict[str, Any]]:
    """Sizes of which no two are alike; heads of 16 of which 4 numbers are rotated."""
    values = {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    }
    if family == FOUR_KEY_HEADS:
        values |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    if family in ("qwen3.5", FOUR_KEY_HEADS):
        return "Qwen3_5Text", values
    values |= {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 40,
    }
    if family == "qwen3.5-moe":
        return "Qwen3_5MoeText", values
    return "Qwen3Next", {**values, "mlp_only_layers": [1]}


def save_tiny(folder: Path, family: str, *, seed: int = 0, **changes: Any) -> Any:
    """Write a random fp32 checkpoint and return the transformers model."""
    model = make_tiny(family, seed=seed, **changes)
    model.save_pretrained(folder)
    return model


def make_tiny(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """The transformers model, the same in every process."""
    import transformers

    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    kind = type(config).__name__.removesuffix("Config").removesuffix("Text")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    # Wider weights than transformers' 0.02: logits that are far apart make greedy ties unlikely.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.25)
    model.tie_weights()
    model.generation_config.eos_token_id = config.eos_token_id
    return model


def save_noisy_draft(folder: Path, target: Any, *, noise: float, seed: int = 1) -> None:
    """A draft that agrees part of the time: the target with noise on its weights."""
    import copy

    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            scale = noise * parameter.std()
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    draft.save_pretrained(folder)


def greedy_reference(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """What transformers' generate emits, EOS included."""
    limit = min(max_tokens, model.config.max_position_embeddings - len(prompt))
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit
        )
    return [int(t) for t in out[0, len(prompt) :]]
