"""The models of the GPU benchmarks as config.json files (weights are random), and their sizes.

usage: python bench/model_configs.py DIR
No checkpoints: `load_format="dummy"` makes the weights on the device.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
_SM = _LLAMA | {  # SmolLM2-135M
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49_152,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_L8 = _LLAMA | {  # Llama-3.1-8B
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 128_000,
    "eos_token_id": 128_009,
}
_GLM = {  # GLM-4.7-Flash
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "vocab_size": 154_880,
    "hidden_size": 2048,
    "intermediate_size": 10_240,
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
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "rope_theta": 1_000_000.0,
    "partial_rotary_factor": 1.0,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
_Q30 = {  # Qwen3-30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
_Q35 = {  # Qwen3.5-9B: three layers of four are gated delta nets
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
    },
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
_Q35_MOE = _Q35 | {  # Qwen3.5-35B-A3B
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_TINY = _SM | {  # rehearsals of benchmarks without a GPU
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
# The heads are EAGLE-1: one layer, and the target's lm_head.
CONFIGS: dict[str, dict[str, Any]] = {
    "sm": _SM,
    "sm-eagle": _SM | {"num_hidden_layers": 1, "tie_word_embeddings": False},
    "l8": _L8,
    "l8-eagle": _L8 | {"num_hidden_layers": 1},
    "l8-long": _L8 | {"max_position_embeddings": 131_072},
    "glm": _GLM,
    "glm-spread": _GLM | {"dummy_router_bias": 0.0},
    "q30": _Q30,
    "q35": _Q35,
    "q35-moe": _Q35_MOE,
    "tiny": _TINY,
}
_BYTES = 2  # bf16


def write_configs(folder: Path) -> None:
    for name, config in CONFIGS.items():
        path = folder / name / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def weight_bytes_per_step(
    model: str, head: str | None, num_drafts: int, quantization: str | None = None
) -> int | None:
    """Weights that one step reads: the target's layers and lm_head once, the head's per draft.

    Gathered rows of the embedding are negligible. None for MoE models, whose reads depend on the
    batch. With quantization a weight of a layer is one byte; those of lm_head stay as they are.
    """
    target = CONFIGS[model]
    if "num_experts_per_tok" in target:
        return None
    layers = target["num_hidden_layers"] * _layer(target)
    count = (layers if quantization is None else layers // _BYTES) + _lm_head(target)
    if head is not None:
        config = CONFIGS[head]
        fc = 2 * config["hidden_size"] ** 2
        own = config["num_hidden_layers"] * _layer(config)
        count += num_drafts * (fc + own + _lm_head(target))
    return int(count * _BYTES)


def _layer(config: Mapping[str, Any]) -> int:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    attention = hidden * head_size * 2 * (heads + config["num_key_value_heads"])
    return int(attention + 3 * hidden * config["intermediate_size"])


def _lm_head(config: Mapping[str, Any]) -> int:
    return int(config["hidden_size"] * config["vocab_size"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, metavar="DIR")
    write_configs(parser.parse_args().folder)
