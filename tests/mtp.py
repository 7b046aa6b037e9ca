"""Tiny MTP layers: a decoder layer of the target's own kind, by transformers, and what is around.

The reference runs that layer over the whole sequence, without a cache.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.eagle import features

# What Qwen calls the tensors around the layer.
QWEN_NAMES = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
}


@dataclass
class PlainMtp:
    """What an MTP layer is. `target` lends its embedding, its rotary table and its head."""

    target: Any
    layer: Any
    weights: dict[str, Tensor]  # enorm, hnorm, eh_proj, shared_head.norm

    @property
    def is_qwen(self) -> bool:
        """Of a hybrid: other names, and norms that are stored as what is added to 1."""
        return hasattr(self.target.config, "linear_num_key_heads")

    def features(self, target: Any, tokens: Sequence[int]) -> Tensor:
        return features(target, tokens)

    def read(self, feature_ND: Tensor) -> Tensor:
        return feature_ND

    def forward(self, feature_ND: Tensor, token_N: Tensor) -> Tensor:
        w, is_one = self.weights, feature_ND.dim() == 2
        if is_one:
            feature_ND, token_N = feature_ND[None], token_N[None]
        token_ND = self._norm(self.target.get_input_embeddings().weight.detach()[token_N], "enorm")
        both_ND = torch.cat((token_ND, self._norm(feature_ND, "hnorm")), dim=-1)
        x_ND = both_ND @ w["eh_proj.weight"].T
        position = torch.arange(x_ND.shape[1])[None]
        rotary = self.target.model.rotary_emb
        # Older versions of transformers want a row of positions for each axis of an image.
        axes = position.expand(3, -1, -1) if hasattr(rotary, "mrope_section") else position
        rotations = rotary(x_ND, position_ids=axes)
        x_ND = self.layer(
            x_ND,
            attention_mask=self._mask(x_ND.shape[1]),
            position_ids=position,
            position_embeddings=rotations,
        )
        out_ND = self._norm(x_ND, "shared_head.norm")
        return out_ND[0] if is_one else out_ND

    def _mask(self, count: int) -> Tensor:
        """A position sees those before it; with a window, only the last `window` ones."""
        distance = torch.arange(count)[:, None] - torch.arange(count)
        window = getattr(self.target.config, "sliding_window", None) or count
        is_seen = (distance >= 0) & (distance < window)
        return torch.zeros(1, 1, count, count).masked_fill(~is_seen, float("-inf"))

    def _norm(self, x_ND: Tensor, name: str) -> Tensor:
        eps: float = self.target.config.rms_norm_eps
        scale = (x_ND.square().mean(-1, keepdim=True) + eps).rsqrt()
        return x_ND * scale * (self.weights[f"{name}.weight"] + self.is_qwen)

    def logits(self, out_ND: Tensor) -> Tensor:
        lm_head_VD: Tensor = self.target.get_output_embeddings().weight.detach()
        return out_ND @ lm_head_VD.T

    def token_of(self, index: int) -> int:
        return index

    def learned(self) -> list[Tensor]:
        return [*self.weights.values(), *self.layer.parameters()]


def random_mtp(target: Any, *, seed: int = 0) -> PlainMtp:
    """The target's last layer with other numbers, which are wide enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    width = target.config.hidden_size

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.25

    layer = copy.deepcopy(target.model.layers[-1]).requires_grad_(False)
    head = PlainMtp(target, layer, {})
    one = 0 if head.is_qwen else 1
    for name, parameter in layer.named_parameters():
        parameter.copy_(rand(*parameter.shape) + one * ("norm" in name))
    norms = ("enorm", "hnorm", "shared_head.norm")
    head.weights = {f"{x}.weight": one + rand(width) for x in norms}
    head.weights["eh_proj.weight"] = rand(width, 2 * width)
    return head


def save_mtp(
    folder: Path, target_folder: str | Path, head: PlainMtp, *, with_copies: bool = True
) -> None:
    """The target's checkpoint with the layer after its last one; copies: of embedding and head."""
    shutil.copytree(target_folder, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["mtp_num_hidden_layers" if head.is_qwen else "num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    count = len(head.target.model.layers)
    state = _as_written(head, folder / "carrier", f"model.layers.{count - 1}.")
    if head.is_qwen:
        state = {f"layers.0.{name}": value for name, value in state.items()}
        state |= {QWEN_NAMES[name]: value for name, value in head.weights.items()}
        with_copies = False
    else:
        state |= head.weights
    if with_copies:
        state["embed_tokens.weight"] = head.target.get_input_embeddings().weight.detach()
        state["shared_head.head.weight"] = head.target.get_output_embeddings().weight.detach()
    at = "mtp." if head.is_qwen else f"model.layers.{count}."
    tensors |= {at + name: value.contiguous().clone() for name, value in state.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _as_written(head: PlainMtp, folder: Path, at: str) -> dict[str, Tensor]:
    """The layer's tensors under the names of files: in the target, in the place of its last."""
    carrier = copy.deepcopy(head.target)
    carrier.model.layers[-1] = head.layer
    carrier.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    shutil.rmtree(folder)
    return {n.removeprefix(at): x for n, x in tensors.items() if n.startswith(at)}
