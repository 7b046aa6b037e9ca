"""Qwen3.5 and Qwen3-Next with their MTP head, written down as the definition reads.

One sequence, token by token, in float64, from the tensors of a checkpoint. It shares no code with
Paceline or transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu, softplus


class PlainQwen:
    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self.weights = {name: value.double() for name, value in stored.items()}
        self.is_next = self.config["model_type"] == "qwen3_next"

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """After the final norm."""
        x_ND = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for i, kind in enumerate(self.config["layer_types"]):
            x_ND = self._layer(x_ND, f"model.layers.{i}.", is_linear=kind == "linear_attention")
        return self._norm(x_ND, "model.norm.weight")

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return hidden_ND @ self.weights["lm_head.weight"].T

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(self.hidden(tokens)[-1]).argmax()))
        return tokens[len(prompt) :]

    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """After `tokens`: row i pairs the feature of position i with token i + 1."""
        feature_ND, fed = self.hidden(tokens[:-1]), list(tokens[1:])
        for _ in range(count):
            token_ND = self.weights["model.embed_tokens.weight"][torch.tensor(fed)]
            both = (
                self._norm(token_ND, "mtp.pre_fc_norm_embedding.weight"),
                self._norm(feature_ND, "mtp.pre_fc_norm_hidden.weight"),
            )
            x_ND = torch.cat(both, dim=1) @ self.weights["mtp.fc.weight"].T
            x_ND = self._layer(x_ND, "mtp.layers.0.", is_linear=False)
            out_D = self._norm(x_ND, "mtp.norm.weight")[-1]
            fed.append(int(self.logits(out_D).argmax()))
            feature_ND = torch.cat((feature_ND, out_D[None]))
        return fed[len(tokens) - 1 :]

    def _layer(self, x_ND: Tensor, at: str, *, is_linear: bool) -> Tensor:
        normed_ND = self._norm(x_ND, at + "input_layernorm.weight")
        mix = self._delta_net if is_linear else self._attention
        x_ND = x_ND + mix(normed_ND, at)
        normed_ND = self._norm(x_ND, at + "post_attention_layernorm.weight")
        has_experts = at + "mlp.gate.weight" in self.weights
        mlp = self._experts if has_experts else self._mlp
        out_ND: Tensor = x_ND + mlp(normed_ND, at + "mlp.")
        return out_ND

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self._scaled(x) * (1 + self.weights[name])

    def _scaled(self, x: Tensor) -> Tensor:
        eps: float = self.config["rms_norm_eps"]
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    # ---- mixers

    def _attention(self, x_ND: Tensor, at: str) -> Tensor:
        config, w, at = self.config, self.weights, at + "self_attn."
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        size, count = config["head_dim"], len(x_ND)
        query, gate = (x_ND @ w[at + "q_proj.weight"].T).view(count, heads, 2 * size).chunk(2, -1)
        key, value = (
            (x_ND @ w[f"{at}{n}_proj.weight"].T).view(count, kv_heads, size) for n in "kv"
        )
        query = self._rotated(self._norm(query, at + "q_norm.weight"))
        key = self._rotated(self._norm(key, at + "k_norm.weight"))
        out = torch.empty(count, heads, size, dtype=torch.float64)
        for h in range(heads):
            own = h * kv_heads // heads
            for i in range(count):
                score = key[: i + 1, own] @ query[i, h] * size**-0.5
                out[i, h] = score.softmax(0) @ value[: i + 1, own]
        return (out * torch.sigmoid(gate)).flatten(1) @ w[at + "o_proj.weight"].T

    def _rotated(self, x_NHD: Tensor) -> Tensor:
        rope = self.config["rope_parameters"]
        size = int(x_NHD.shape[-1] * rope["partial_rotary_factor"])
        freq = rope["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.arange(len(x_NHD))[:, None, None] * freq
        a, b, rest = x_NHD.split((size // 2, size // 2, x_NHD.shape[-1] - size), dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    def _delta_net(self, x_ND: Tensor, at: str) -> Tensor:
        w, at = self.weights, at + "linear_attn."
        keys, values, key_size, value_size, taps = (
            int(self.config[f"linear_{x}"])
            for x in (
                "num_key_heads",
                "num_value_heads",
                "key_head_dim",
                "value_head_dim",
                "conv_kernel_dim",
            )
        )
        u_NC, z_NV, b_NH, a_NH = self._projected(x_ND, at, keys, key_size)
        state = torch.zeros(values, key_size, value_size, dtype=torch.float64)
        outs = []
        for t in range(len(x_ND)):
            window = [u_NC[t - j] if t >= j else torch.zeros_like(u_NC[0]) for j in range(taps)]
            conv_CJ = w[at + "conv1d.weight"][:, 0]
            mixed_C = silu(sum(conv_CJ[:, taps - 1 - j] * window[j] for j in range(taps)))  # type: ignore[arg-type]
            q, k, v = mixed_C.split((keys * key_size, keys * key_size, values * value_size))
            q, k = (x.view(keys, key_size) for x in (q, k))
            q, k = (x / (x.square().sum(1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            beta = torch.sigmoid(b_NH[t])
            decay = (-w[at + "A_log"].exp() * softplus(a_NH[t] + w[at + "dt_bias"])).exp()
            out = torch.empty(values, value_size, dtype=torch.float64)
            for h in range(values):
                own = h * keys // values
                state[h] *= decay[h]
                delta = (v.view(values, -1)[h] - k[own] @ state[h]) * beta[h]
                state[h] += torch.outer(k[own], delta)
                out[h] = q[own] @ state[h] * key_size**-0.5
            outs.append(self._scaled(out) * w[at + "norm.weight"])
        gated_NV = torch.stack(outs).flatten(1) * silu(z_NV)
        return gated_NV @ w[at + "out_proj.weight"].T

    def _projected(self, x_ND: Tensor, at: str, keys: int, key_size: int) -> list[Tensor]:
        """Inputs of the convolution, z, b and a."""
        w = self.weights
        if not self.is_next:
            return [x_ND @ w[f"{at}in_proj_{n}.weight"].T for n in ("qkv", "z", "b", "a")]
        by_head = (x_ND @ w[at + "in_proj_qkvz.weight"].T).unflatten(1, (keys, -1))
        rest = (by_head.shape[-1] - 2 * key_size) // 2
        q, k, v, z = (x.flatten(1) for x in by_head.split((key_size, key_size, rest, rest), dim=-1))
        b, a = (x_ND @ w[at + "in_proj_ba.weight"].T).unflatten(1, (keys, -1)).chunk(2, dim=-1)
        return [torch.cat((q, k, v), dim=1), z, b.flatten(1), a.flatten(1)]

    # ---- MLPs

    def _mlp(self, x_ND: Tensor, at: str) -> Tensor:
        gate, up, down = (self.weights[f"{at}{n}_proj.weight"] for n in ("gate", "up", "down"))
        return (silu(x_ND @ gate.T) * (x_ND @ up.T)) @ down.T

    def _experts(self, x_ND: Tensor, at: str) -> Tensor:
        w, out = self.weights, []
        for x_D in x_ND:
            score, chosen = (
                (w[at + "gate.weight"] @ x_D).softmax(0).topk(self.config["num_experts_per_tok"])
            )
            parts = [
                s * self._mlp(x_D, f"{at}experts.{e}.")
                for s, e in zip(score / score.sum(), chosen.tolist(), strict=True)
            ]
            gate = torch.sigmoid(w[at + "shared_expert_gate.weight"] @ x_D)
            out.append(torch.stack(parts).sum(0) + gate * self._mlp(x_D, at + "shared_expert."))
        return torch.stack(out)
