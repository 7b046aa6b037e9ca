"""A whole stack of decoder layers without attention: fused products against a chain with cuBLAS.

Used by bench/gemm_gpu for timing; weights are random.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.model_configs import CONFIGS
from paceline.kernels.elementwise import triton as elementwise
from paceline.kernels.linear import tiles
from paceline.kernels.table import Kernels
from paceline.layers.attention import ForwardInputs, GroupedAttention
from paceline.layers.linear import CudaLinear
from paceline.layers.mlp import GatedMlp
from paceline.models.decoder import DecoderLayer, DenseLayer, LayerPass
from paceline.models.families import read_spec
from paceline.models.fused_cuda import CudaLayers, Tiles
from paceline.state.pages import LayerPages

SPECS = {name: read_spec(CONFIGS[name]) for name in ("sm", "l8")}


def no_attention(qkv_TD: Tensor, key: Tensor, *_: Any) -> Tensor:
    """Replaces attention by a view of the right shape, partly undefined. Runs no kernel."""
    rows, width = qkv_TD.shape
    num_q = width - 2 * key.shape[0] * key.shape[2]
    return qkv_TD.view(-1)[: rows * num_q].view(rows, num_q)


def query_as_attention(qkv_TD: Tensor, key: Tensor, *_: Any) -> Tensor:
    """Returns the queries, which are all defined."""
    return qkv_TD[:, : qkv_TD.shape[1] - 2 * key.shape[0] * key.shape[2]].contiguous()


KERNELS = Kernels(
    elementwise.rms_norm,
    elementwise.add_rms_norm,
    elementwise.silu_and_mul,
    elementwise.place_heads,
    no_attention,
)


class _TorchLayers(CudaLayers):
    """The path for many rows: torch's products with separate kernels between them."""

    def _choose(self, num_rows: int) -> list[Tiles]:
        return [Tiles(None, None, None, None)] * len(self._layers)


def _layer(attention: GroupedAttention, mlp: GatedMlp, width: int) -> DenseLayer:
    layer = DenseLayer.of(DecoderLayer(_norm(width), attention, _norm(width), mlp))
    assert layer is not None
    return layer


class Stack:
    """Random layers of one model."""

    def __init__(self, name: str, num_layers: int | None = None) -> None:
        spec = self.spec = SPECS[name]
        width, head = spec.hidden_size, spec.head_size
        inner = CONFIGS[name]["intermediate_size"]
        num_q, num_kv = spec.num_heads * head, spec.num_kv_heads * head
        self.layers = [
            _layer(
                GroupedAttention(
                    qkv=_linear(num_q + 2 * num_kv, width),
                    o=_linear(width, num_q),
                    kernels=KERNELS,
                    scale=head**-0.5,
                ),
                GatedMlp(
                    gate_up=_linear(2 * inner, width),
                    down=_linear(width, inner),
                    silu_and_mul=KERNELS.silu_and_mul,
                ),
                width,
            )
            for _ in range(num_layers or spec.num_layers)
        ]
        cache = (spec.num_kv_heads, 512, head)
        self.pages = [
            LayerPages(*(torch.zeros(cache, dtype=torch.bfloat16, device="cuda") for _ in "kv"))
            for _ in self.layers
        ]
        self.fused = CudaLayers(spec, self.layers, KERNELS)
        self.plain = _TorchLayers(spec, self.layers, KERNELS)

    def run(self, residual_TD: Tensor, rotation_TH: Tensor, inputs: Any, is_fused: bool) -> Tensor:
        """The last layer's output; `residual_TD` is updated in place."""
        layers = self.fused if is_fused else self.plain
        return layers(LayerPass(residual_TD, rotation_TH, inputs, self.pages)).delta_TD

    def difference(self, rows: int) -> float:
        """Relative, between the fused layers and the chain of plain ones."""
        residual, rotation, inputs = self.inputs(rows)
        sums = []
        self._attend_with(query_as_attention)
        for is_fused in (True, False):
            copy = residual.clone()
            sums.append(self.run(copy, rotation, inputs, is_fused) + copy)
        self._attend_with(no_attention)
        return float((sums[0] - sums[1]).norm() / sums[1].norm())

    def _attend_with(self, paged_attention: Any) -> None:
        kernels = KERNELS._replace(paged_attention=paged_attention)
        for layers in (self.fused, self.plain):
            layers._kernels = kernels
        for layer in self.layers:
            assert layer.plain is not None
            layer.plain.kernels = kernels

    def forget(self) -> None:
        """Call after the table has changed."""
        tiles.pick_tile.cache_clear()
        self.fused._tiles.cache_clear()

    def inputs(self, rows: int) -> tuple[Tensor, Tensor, ForwardInputs]:
        torch.manual_seed(rows)
        residual = torch.randn(rows, self.spec.hidden_size, device="cuda")
        angle = torch.rand(rows, self.spec.head_size // 2, device="cuda")
        slot = torch.arange(rows, device="cuda", dtype=torch.int32)
        rotation = torch.polar(torch.ones_like(angle), angle)
        nothing: Any = None
        return residual, rotation, ForwardInputs(slot, slot, slot, nothing)


def _norm(width: int) -> Tensor:
    return torch.rand(width, device="cuda").to(torch.bfloat16) + 0.5


def _linear(n: int, k: int) -> CudaLinear:
    weight = torch.empty(n, k, device="cuda", dtype=torch.bfloat16)
    return CudaLinear(weight.normal_(0, k**-0.5), None)
