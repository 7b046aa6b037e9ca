"""fp8 written a second time: transformers' modules with rounded weights and rows, and checkpoints.

Only torch's own conversion to e4m3 is shared with the package.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from tests.tiny import make_tiny

# What is not rounded: kv_b_proj is absorbed into others, gates decide or are small.
WIDE = ("lm_head", "kv_b_proj", "gate", "in_proj_a", "in_proj_b", "shared_expert_gate")
# Sizes that blocks of 128 divide, wherever two projections become one product.
LARGE: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3-moe": {"head_dim": 64, "moe_intermediate_size": 192, "mlp_only_layers": []},
    "deepseek-v3": {
        "q_lora_rank": 128,
        "kv_lora_rank": 112,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 48,
        "moe_intermediate_size": 128,
    },
    "qwen3.5-moe": {
        "head_dim": 128,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
    },
}
for _values in LARGE.values():
    _values |= {"hidden_size": 256, "intermediate_size": 384}


def as_codes(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """e4m3 codes, and one scale for each tile of `rows` by `columns` numbers."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    starts = [range(0, n, size) for n, size in zip(x.shape, (rows, columns), strict=True)]
    scale = torch.ones(len(starts[0]), len(starts[1]))
    for i, row in enumerate(starts[0]):
        for j, column in enumerate(starts[1]):
            tile = x[row : row + rows, column : column + columns]
            largest = tile.abs().max()
            scale[i, j] = largest / 448 if largest else 1.0
            codes[row : row + rows, column : column + columns] = (tile / scale[i, j]).to(
                codes.dtype
            )
    return codes, scale


def as_numbers(codes: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    each = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return codes.float() * each[: codes.shape[0], : codes.shape[1]]


def tile_of(by: str, shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """Of a weight; a row of activations has one line of it."""
    return {"channel": (1, shape[1]), "block": (128, 128), "tensor": (shape[0], shape[1])}[by]


def rounded_weight(weight: Tensor, by: str) -> Tensor:
    tile = tile_of(by, weight.shape)
    return as_numbers(*as_codes(weight, *tile), *tile)


def rounded_rows(x: Tensor, by: str) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    size = 128 if by == "block" else flat.shape[1]
    return as_numbers(*as_codes(flat, 1, size), 1, size).reshape(x.shape)


class Fp8Product(nn.Module):
    """The inputs are divided into `parts` pieces. Each is rounded and multiplied alone."""

    def __init__(self, weight: Tensor, bias: Tensor | None, by: str, parts: int = 1) -> None:
        super().__init__()
        self.by, self.bias = by, bias
        self.weights = [rounded_weight(x, by) for x in weight.chunk(parts, dim=1)]

    def forward(self, x: Tensor) -> Tensor:
        pieces = zip(x.chunk(len(self.weights), dim=-1), self.weights, strict=True)
        products = [linear(rounded_rows(x, self.by), w) for x, w in pieces]
        out = torch.stack(products).sum(0)
        return out if self.bias is None else out + self.bias


class Fp8Experts(nn.Module):
    def __init__(self, stored: Any, by: str, parts: int) -> None:
        super().__init__()
        self.act = stored.act_fn
        self.gate_up = [Fp8Product(x, None, by) for x in stored.gate_up_proj]
        self.down = [Fp8Product(x, None, by, parts) for x in stored.down_proj]

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
                gate, up = self.gate_up[expert](x[row : row + 1]).chunk(2, dim=-1)
                out[row] += self.down[expert](self.act(gate) * up)[0] * weight
        return out


def fp8_reference(
    model: Any,
    by: str,
    *,
    parts_of: Callable[[str], int] = lambda name: 1,
    is_quantised: Callable[[str], bool] = lambda name: True,
) -> Any:
    """The model with products in fp8. `parts_of`: pieces of a module's inputs (see Fp8Product)."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        new: nn.Module | None = None
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            new = Fp8Experts(module, by, parts_of(f"{name}.down_proj"))
        elif type(module) is nn.Linear and last not in WIDE and is_quantised(name):
            new = Fp8Product(module.weight, module.bias, by, parts_of(name))
        if new is not None:
            setattr(model.get_submodule(parent), last, new)
    return model


def save_large(folder: Path, family: str, changes: dict[str, dict[str, Any]] | None = None) -> Any:
    """A random checkpoint, with weights as small as its width asks for."""
    model = make_tiny(family, **({**LARGE, **(changes or {})}[family]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(0.25)
    model.save_pretrained(folder)
    return model


def distance(found_TV: Tensor, wanted_TV: Tensor, plain_TV: Tensor) -> float:
    """How far logits are from those of the reference in fp8, as a share of what fp8 changes.

    The median over tokens of many short sequences: a difference in the last bit may take a number
    to its neighbour in e4m3, which changes the logits of that sequence.
    """
    error_T, change_T = (
        torch.linalg.vector_norm(x - wanted_TV, dim=1) for x in (found_TV, plain_TV)
    )
    assert float(change_T.min()) > 0, "rounding made no difference: nothing was proven"
    return float((error_T / change_T).median())


def assert_within_fp8(found_TV: Tensor, wanted_TV: Tensor, plain_TV: Tensor) -> None:
    assert distance(found_TV, wanted_TV, plain_TV) < 0.02


# ---- checkpoints

CHANNEL_GROUP: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}


def compressed(**weights: Any) -> dict[str, Any]:
    group = {**CHANNEL_GROUP, "weights": {**CHANNEL_GROUP["weights"], **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


# By name: how weights are rounded, the end of the scales' names, and the config.
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fp8 blocks": (
        "block",
        "_scale_inv",
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    ),
    "fp8 tensors": ("tensor", "_scale", {"quant_method": "fp8", "activation_scheme": "static"}),
    "compressed channels": ("channel", "_scale", compressed()),
    "compressed tensors": ("tensor", "_scale", compressed(strategy="tensor")),
    "compressed blocks": (
        "block",
        "_scale",
        compressed(strategy="block", block_structure=[128, 128]),
    ),
    "modelopt": ("tensor", "_scale", {"quant_method": "modelopt", "quant_algo": "FP8"}),
}


def quantise_checkpoint(
    folder: Path, form: str, is_quantised: Callable[[str], bool] = lambda name: True
) -> None:
    """Rewrite the matrices of the layers, in place."""
    by, end, config = FORMS[form]
    path = folder / "model.safetensors"
    tensors = load_file(path)
    named = [n for n in tensors if "_proj" in n and n.endswith(".weight")]
    matrices = [n.removesuffix(".weight") for n in named]
    kept = tuple(f".{x}" for x in WIDE)
    for name in [f"{n}.weight" for n in matrices if not n.endswith(kept) and is_quantised(n)]:
        codes, scale = as_codes(tensors[name], *tile_of(by, tensors[name].shape))
        tensors[name] = codes
        # Published ones have bf16 scales of blocks; these are exact, so that results are.
        tensors[name + end] = scale.reshape(()) if by == "tensor" else scale
        if by == "tensor":
            tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.1)
    save_file(tensors, path, metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
