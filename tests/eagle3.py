"""Tiny EAGLE-3 heads and their plain arithmetic, in the two forms in which heads are published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.eagle import PlainEagle

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
EAGLE3_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8,  # of its training: no limit
    "vocab_size": 96,
}


@dataclass
class PlainEagle3(PlainEagle):
    """What an EAGLE-3 head is. `taps`: after how many layers it reads the target; (): its end."""

    taps: tuple[int, ...]
    offset_V: Tensor | None  # d2t

    def is_set(self, flag: str) -> bool:
        return bool(self.config.get(flag, False))

    def features(self, target: Any, tokens: Sequence[int]) -> Tensor:
        return tapped(target, tokens, self.taps) if self.taps else super().features(target, tokens)

    def read(self, feature_ND: Tensor) -> Tensor:
        w = self.weights
        if not self.taps:
            return feature_ND
        if self.is_set("fc_norm"):
            parts = enumerate(feature_ND.chunk(len(self.taps), dim=-1))
            normed = [self.norm(x, w[f"fc_norm.{i}.weight"]) for i, x in parts]
            feature_ND = torch.cat(normed, dim=-1)
        if self.is_set("norm_before_fc"):
            feature_ND = self.norm(feature_ND, w["input_norm.weight"])
        return feature_ND @ w["fc.weight"].T

    def forward(self, feature_ND: Tensor, token_N: Tensor) -> Tensor:
        w, at = self.weights, "layers.0."
        hidden_ND = self.norm(feature_ND, w[at + "hidden_norm.weight"])
        token_ND = self.norm(w["embed_tokens.weight"][token_N], w[at + "input_layernorm.weight"])
        x_ND = hidden_ND if self.is_set("norm_before_residual") else feature_ND
        both_ND = torch.cat((token_ND, hidden_ND), dim=-1)
        x_ND = self.with_mlp(x_ND + self.attention(both_ND, at + "self_attn."), at)
        for index in range(1, self.config["num_hidden_layers"]):
            at = f"layers.{index}."
            inner = self.norm(x_ND, w[at + "input_layernorm.weight"])
            x_ND = self.with_mlp(x_ND + self.attention(inner, at + "self_attn."), at)
        return self.norm(x_ND, w["norm.weight"]) if self.is_set("norm_output") else x_ND

    def logits(self, out_ND: Tensor) -> Tensor:
        if not self.is_set("norm_output"):
            out_ND = self.norm(out_ND, self.weights["norm.weight"])
        return out_ND @ self.weights.get("lm_head.weight", self.lm_head_VD).T

    def token_of(self, index: int) -> int:
        return index if self.offset_V is None else index + int(self.offset_V[index])


def tapped(target: Any, tokens: Sequence[int], taps: Sequence[int]) -> Tensor:
    """transformers' residual stream after each tapped layer, side by side."""
    seen: list[Tensor] = []
    # What transformers calls the last hidden state is normed; what goes into that norm is not.
    hook = target.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        out = target.model(torch.tensor([list(tokens)]), output_hidden_states=True)
    hook.remove()
    streams = [*out.hidden_states[:-1], seen[0]]
    return torch.cat([streams[k][0] for k in taps], dim=-1)


def random_eagle3(
    target: Any,
    *,
    seed: int = 0,
    taps: tuple[int, ...] = (0, 1, 2),
    draft_vocab: int | None = 60,
    **changes: Any,
) -> PlainEagle3:
    """Weights wide enough that every part of the head matters to its drafts."""
    config = {**EAGLE3_CONFIG, "vocab_size": target.config.vocab_size, **changes}
    width, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or width // config["num_attention_heads"]
    q_rows, kv_rows = (config[f"num_{x}_heads"] * size for x in ("attention", "key_value"))
    target_width = target.config.hidden_size
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.25

    weights: dict[str, Tensor] = {
        "embed_tokens.weight": target.get_input_embeddings().weight.detach().clone(),
        "layers.0.hidden_norm.weight": 1 + rand(width),
        "norm.weight": 1 + rand(width),
        "lm_head.weight": rand(draft_vocab or config["vocab_size"], width),
    }
    if taps:
        weights["fc.weight"] = rand(width, len(taps) * target_width)
    if config.get("norm_before_fc"):
        weights["input_norm.weight"] = 1 + rand(len(taps) * target_width)
    if config.get("fc_norm"):
        weights |= {f"fc_norm.{i}.weight": 1 + rand(target_width) for i in range(len(taps))}
    for index in range(config["num_hidden_layers"]):
        at = f"layers.{index}."
        columns = width if index else 2 * width
        weights |= {
            at + "self_attn.q_proj.weight": rand(q_rows, columns),
            at + "self_attn.k_proj.weight": rand(kv_rows, columns),
            at + "self_attn.v_proj.weight": rand(kv_rows, columns),
            at + "self_attn.o_proj.weight": rand(width, q_rows),
            at + "mlp.gate_proj.weight": rand(inner, width),
            at + "mlp.up_proj.weight": rand(inner, width),
            at + "mlp.down_proj.weight": rand(width, inner),
            at + "input_layernorm.weight": 1 + rand(width),
            at + "post_attention_layernorm.weight": 1 + rand(width),
        }
        if config["model_type"] == "qwen3":
            weights |= {f"{at}self_attn.{x}_norm.weight": 1 + rand(size) for x in "qk"}
    offset_V = None
    if draft_vocab is not None:
        chosen = torch.randperm(config["vocab_size"], generator=generator)[:draft_vocab]
        offset_V = chosen.sort().values - torch.arange(draft_vocab)
    lm_head_VD = target.get_output_embeddings().weight.detach()
    return PlainEagle3(config, weights, lm_head_VD, taps, offset_V)


def save_eagle3(folder: Path, head: PlainEagle3, *, form: str = "flat") -> None:
    """`flat` as the first published heads, `nested` as `speculators` writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.contiguous() for name, value in head.weights.items()}
    is_flat = form == "flat"
    if is_flat:  # the first layer has another name, and the embedding is the target's
        tensors = {n.replace("layers.0.", "midlayer."): x for n, x in tensors.items()}
        del tensors["embed_tokens.weight"]
    vocab_size = head.config["vocab_size"]
    if head.offset_V is not None:
        tensors["d2t"] = head.offset_V
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool)
        token_V = head.offset_V + torch.arange(len(head.offset_V))
        tensors["t2d"][token_V.clamp(0, vocab_size - 1)] = True
    layers = {k: v for k, v in head.config.items() if k not in FLAGS}
    flags = {k: v for k, v in head.config.items() if k in FLAGS}
    more = {"draft_vocab_size": len(head.weights["lm_head.weight"]), "torch_dtype": "float32"}
    if is_flat:
        taps = {TAPS_KEY: list(head.taps)} if head.taps else {"use_aux_hidden_state": False}
        config = layers | more | flags | {"eagle_config": taps}
        config["architectures"] = ["LlamaForCausalLMEagle3"]
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        config = {"norm_before_residual": False} | more | flags
        config |= {"speculators_model_type": "eagle3", "transformer_layer_config": layers}
        config |= {"architectures": ["Eagle3Speculator"], TAPS_KEY: list(head.taps)}
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
