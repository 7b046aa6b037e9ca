"""Tiny EAGLE-1 heads and their plain arithmetic: no cache, no batch, one sequence from its start.

Heads are trained on a few sequences for a moment, so that part of their drafts is right.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
_WINDOW = 40
EAGLE_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 3000.0,
    "max_position_embeddings": 8,  # of its training: no limit
    "vocab_size": 96,
    "torch_dtype": "float32",
}


@dataclass
class PlainEagle:
    """What an EAGLE-1 head is, written down as its definition reads."""

    config: dict[str, Any]
    weights: Tensors
    lm_head_VD: Tensor

    def forward(self, feature_ND: Tensor, token_N: Tensor) -> Tensor:
        """Outputs of rows 0...N - 1; row i holds feature i and token i + 1."""
        w = self.weights
        x_ND = torch.cat((w["embed_tokens.weight"][token_N], feature_ND), dim=-1)
        x_ND = x_ND @ w["fc.weight"].T + w.get("fc.bias", 0.0)
        for index in range(self.config["num_hidden_layers"]):
            at = f"layers.{index}."
            inner = x_ND
            if index:
                inner = self._norm(x_ND, w[at + "input_layernorm.weight"])
            x_ND = x_ND + self._attention(inner, at + "self_attn.")
            inner = self._norm(x_ND, w[at + "post_attention_layernorm.weight"])
            gate, up, down = (w[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x_ND = x_ND + (torch.nn.functional.silu(inner @ gate.T) * (inner @ up.T)) @ down.T
        return x_ND

    def _norm(self, x_ND: Tensor, weight_D: Tensor) -> Tensor:
        eps: float = self.config["rms_norm_eps"]
        scale = (x_ND.square().mean(-1, keepdim=True) + eps).rsqrt()
        return x_ND * scale * weight_D

    def _attention(self, x_ND: Tensor, at: str) -> Tensor:
        q, k, v = (x_ND @ self.weights[f"{at}{n}_proj.weight"].T for n in "qkv")
        heads, kv_heads = (
            self.config["num_attention_heads"],
            self.config["num_key_value_heads"],
        )
        count, group = x_ND.shape[-2], heads // kv_heads
        q = self._rotated(q.unflatten(-1, (heads, -1)))
        k = self._rotated(k.unflatten(-1, (kv_heads, -1))).repeat_interleave(group, -2)
        v = v.unflatten(-1, (kv_heads, -1)).repeat_interleave(group, -2)
        scores = torch.einsum("...qhd,...khd->...hqk", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        out = torch.einsum("...hqk,...khd->...qhd", scores.softmax(-1), v)
        return out.flatten(-2) @ self.weights[f"{at}o_proj.weight"].T

    def _rotated(self, x_NHD: Tensor) -> Tensor:
        half = x_NHD.shape[-1] // 2
        theta = self.config.get("rope_theta", 10000.0)
        freq = theta ** (-torch.arange(half) / half)
        angle = torch.arange(x_NHD.shape[-3])[:, None, None] * freq
        a, b = x_NHD[..., :half], x_NHD[..., half:]
        return torch.cat(
            (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1
        )

    def drafts(self, feature_ND: Tensor, tokens: Sequence[int], k: int) -> list[int]:
        """K greedy drafts after `tokens`; `feature_ND` are the target's, of all but the last."""
        fed, feature_ND = list(tokens[1:]), feature_ND[: len(tokens) - 1]
        drafts: list[int] = []
        while len(drafts) < k:
            out_ND = self.forward(feature_ND, torch.tensor(fed))
            drafts.append(int((out_ND[-1] @ self.lm_head_VD.T).argmax()))
            feature_ND = torch.cat((feature_ND, out_ND[-1:]))
            fed.append(drafts[-1])
        return drafts


def features(target: Any, tokens: Sequence[int]) -> Tensor:
    """The target's hidden states after its final norm, by transformers."""
    with torch.no_grad():
        out = target.model(torch.tensor([list(tokens)]))
    return out.last_hidden_state[0]  # type: ignore[no-any-return]


def random_head(target: Any, *, seed: int = 0, **changes: Any) -> PlainEagle:
    """Weights wide enough that every part of the head matters to its drafts."""
    config = {**EAGLE_CONFIG, "vocab_size": target.config.vocab_size, **changes}
    width, inner = config["hidden_size"], config["intermediate_size"]
    head = width // config["num_attention_heads"]
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.25

    weights: Tensors = {
        "embed_tokens.weight": target.get_input_embeddings().weight.detach().clone(),
        "fc.weight": rand(width, 2 * width),
    }
    for index in range(config["num_hidden_layers"]):
        at = f"layers.{index}."
        kv_rows = config["num_key_value_heads"] * head
        weights |= {
            at + "self_attn.q_proj.weight": rand(width, width),
            at + "self_attn.k_proj.weight": rand(kv_rows, width),
            at + "self_attn.v_proj.weight": rand(kv_rows, width),
            at + "self_attn.o_proj.weight": rand(width, width),
            at + "mlp.gate_proj.weight": rand(inner, width),
            at + "mlp.up_proj.weight": rand(inner, width),
            at + "mlp.down_proj.weight": rand(width, inner),
            at + "post_attention_layernorm.weight": 1 + rand(width),
        }
        if index:
            weights[at + "input_layernorm.weight"] = 1 + rand(width)
    lm_head_VD = target.get_output_embeddings().weight.detach()
    return PlainEagle(config, weights, lm_head_VD)


def trained_head(
    target: Any, sequences: Sequence[Sequence[int]], *, num_steps: int = 100, **options: Any
) -> PlainEagle:
    """A head that has half learned these sequences by heart: the last `_WINDOW` tokens of each."""
    head = random_head(target, **options)
    known = [s for s in sequences if len(s) > _WINDOW]
    feature_BND = torch.stack([features(target, s)[-_WINDOW - 1 : -2] for s in known])
    token_BN = torch.tensor([s[-_WINDOW:-1] for s in known])
    after = torch.tensor([s[1 - _WINDOW :] for s in known]).flatten()
    learned = [w for name, w in head.weights.items() if "embed" not in name]
    with torch.enable_grad():
        for weight in learned:
            weight.requires_grad_()
        optimizer = torch.optim.Adam(learned, lr=0.02)
        for _ in range(num_steps):
            once = head.forward(feature_BND, token_BN)
            # Its own outputs as features: what the second draft is made from.
            twice = head.forward(torch.cat((feature_BND[:, :1], once[:, :-1]), dim=1), token_BN)
            logits = torch.stack((once, twice)) @ head.lm_head_VD.T
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 2), after.repeat(2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for weight in learned:
        weight.requires_grad_(False)
    return head


def save_head(
    folder: Path, head: PlainEagle, *, prefix: str = "", as_safetensors: bool = False
) -> None:
    """As `pytorch_model.bin` without a prefix, as published heads are, or otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head.config))
    tensors = {prefix + name: value.contiguous() for name, value in head.weights.items()}
    if as_safetensors:
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
