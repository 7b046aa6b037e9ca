"""Tiny EAGLE-1 heads and their plain arithmetic: no cache, no batch, one sequence from its start.

Heads are trained on a few sequences for a moment, so that part of their drafts is right. What all
plain heads have in common is here too: see tests/eagle3.py and tests/mtp.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

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


class PlainHead(Protocol):
    """A head as its definition reads: row i holds feature i and token i + 1."""

    def features(self, target: Any, tokens: Sequence[int]) -> Tensor:
        """What it reads of the target, by transformers."""

    def read(self, feature_ND: Tensor) -> Tensor:
        """The features that the head reads, from the target's."""

    def forward(self, feature_ND: Tensor, token_N: Tensor) -> Tensor:
        """The next features, of rows 0...N - 1."""

    def logits(self, out_ND: Tensor) -> Tensor:
        """Over its own vocabulary."""

    def token_of(self, index: int) -> int:
        """The target's id of a draft id; -1 if there is none."""

    def learned(self) -> list[Tensor]:
        """What training changes."""


Head = TypeVar("Head", bound=PlainHead)


def drafts_of(head: PlainHead, feature_ND: Tensor, tokens: Sequence[int]) -> Iterator[int]:
    """Greedy drafts after `tokens`; `feature_ND` are the target's, of all but the last."""
    fed, own_ND = list(tokens[1:]), head.read(feature_ND[: len(tokens) - 1])
    while True:
        out_ND = head.forward(own_ND, torch.tensor(fed))
        fed.append(head.token_of(int(head.logits(out_ND[-1:])[0].argmax())))
        yield fed[-1]
        own_ND = torch.cat((own_ND, out_ND[-1:]))


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
                inner = self.norm(x_ND, w[at + "input_layernorm.weight"])
            x_ND = self.with_mlp(x_ND + self.attention(inner, at + "self_attn."), at)
        return x_ND

    def with_mlp(self, x_ND: Tensor, at: str) -> Tensor:
        inner = self.norm(x_ND, self.weights[at + "post_attention_layernorm.weight"])
        names = (f"{at}mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        gate, up, down = (self.weights[name] for name in names)
        return x_ND + (torch.nn.functional.silu(inner @ gate.T) * (inner @ up.T)) @ down.T

    def norm(self, x_ND: Tensor, weight_D: Tensor) -> Tensor:
        eps: float = self.config["rms_norm_eps"]
        scale = (x_ND.square().mean(-1, keepdim=True) + eps).rsqrt()
        return x_ND * scale * weight_D

    def attention(self, x_ND: Tensor, at: str) -> Tensor:
        w = self.weights
        names = [f"{at}{n}_proj" for n in "qkv"]
        q, k, v = (x_ND @ w[f"{n}.weight"].T + w.get(f"{n}.bias", 0.0) for n in names)
        heads, kv_heads = (
            self.config["num_attention_heads"],
            self.config["num_key_value_heads"],
        )
        count, group = x_ND.shape[-2], heads // kv_heads
        q, k = q.unflatten(-1, (heads, -1)), k.unflatten(-1, (kv_heads, -1))
        if f"{at}q_norm.weight" in self.weights:
            q, k = (
                self.norm(x, self.weights[f"{at}{n}_norm.weight"]) for x, n in ((q, "q"), (k, "k"))
            )
        q, k = self._rotated(q), self._rotated(k).repeat_interleave(group, -2)
        v = v.unflatten(-1, (kv_heads, -1)).repeat_interleave(group, -2)
        scores = torch.einsum("...qhd,...khd->...hqk", q, k) * q.shape[-1] ** -0.5
        distance = torch.arange(count)[:, None] - torch.arange(count)
        window = self.config.get("sliding_window") or count
        scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
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

    def features(self, target: Any, tokens: Sequence[int]) -> Tensor:
        return features(target, tokens)

    def read(self, feature_ND: Tensor) -> Tensor:
        return feature_ND

    def logits(self, out_ND: Tensor) -> Tensor:
        return out_ND @ self.lm_head_VD.T

    def token_of(self, index: int) -> int:
        return index

    def learned(self) -> list[Tensor]:
        return [w for name, w in self.weights.items() if "embed" not in name]


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


def train(
    head: Head, target: Any, sequences: Sequence[Sequence[int]], *, num_steps: int = 100
) -> Head:
    """It half learns these sequences by heart: the last `_WINDOW` tokens of each."""
    known = [s for s in sequences if len(s) > _WINDOW]
    feature_BND = torch.stack([head.features(target, s)[-_WINDOW - 1 : -2] for s in known])
    token_BN = torch.tensor([s[-_WINDOW:-1] for s in known])
    count = head.logits(head.forward(head.read(feature_BND[:1]), token_BN[:1])).shape[-1]
    index_of = {head.token_of(index): index for index in range(count)}
    # What it has no word for, it learns nothing about.
    after = torch.tensor([index_of.get(t, -100) for s in known for t in s[1 - _WINDOW :]])
    learned = head.learned()
    with torch.enable_grad():
        for weight in learned:
            weight.requires_grad_()
        optimizer = torch.optim.Adam(learned, lr=0.02)
        for _ in range(num_steps):
            own_BND = head.read(feature_BND)
            once = head.forward(own_BND, token_BN)
            # Its own outputs as features: what the second draft is made from.
            twice = head.forward(torch.cat((own_BND[:, :1], once[:, :-1]), dim=1), token_BN)
            logits = head.logits(torch.stack((once, twice)))
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
