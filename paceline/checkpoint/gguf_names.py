"""The Hugging Face name of each GGUF tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from paceline.errors import CheckpointError

# Divisors of the rope frequencies. Hugging Face has them in the config.
ROPE_FACTORS = "rope_freqs.weight"

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    ROPE_FACTORS: ROPE_FACTORS,
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None if it has none."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        return None
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def translate(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Hugging Face name -> GGUF name of every weight; an unknown tensor is refused by name."""
    translated: dict[str, str] = {}
    unknown = []
    for name in names:
        known = hf_name(name)
        if known is None:
            unknown.append(name)
        else:
            translated[known] = name
    if unknown:
        shown = ", ".join(unknown[:4]) + (" ..." if len(unknown) > 4 else "")
        raise CheckpointError(
            f"{path} holds {len(unknown)} tensors that Paceline does not know ({shown}); models "
            "of this kind are not supported."
        )
    return translated
