"""A decoder's layers with e4m3 weights: a norm or an activation gives the next product's rows.

The same bits as separate kernels, and fewer kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.kernels import table
from paceline.kernels.fp8.reference import Fp8Rows, Fp8Weight
from paceline.kernels.table import Kernels
from paceline.layers.attention import GroupedAttention
from paceline.layers.mlp import GatedMlp
from paceline.models.decoder import DecoderLayer, LayerPass, Stream
from paceline.models.spec import ModelSpec


class Fp8Product(NamedTuple):
    """What `fp8_linear` takes beside rows."""

    weight: Fp8Weight
    bias: Tensor | None
    out_dtype: torch.dtype

    @classmethod
    def of(cls, linear: Any) -> Fp8Product | None:
        """None if the linear has no e4m3 weight, or does more than multiply."""
        if not isinstance(getattr(linear, "weight", None), Fp8Weight):
            return None
        return cls(linear.weight, linear.bias, linear.out_dtype)


class Fp8Layer(NamedTuple):
    """A layer whose first product is e4m3."""

    layer: DecoderLayer
    attention: GroupedAttention
    qkv: Fp8Product
    # Gate and up, then down. None: the MLP is called as it is (experts, slices of ranks).
    inner: tuple[Fp8Product, Fp8Product] | None

    @classmethod
    def of(cls, layer: DecoderLayer) -> Fp8Layer | None:
        attention, mlp = layer.attention, layer.mlp
        if not isinstance(attention, GroupedAttention):
            return None
        qkv, inner = Fp8Product.of(attention.qkv), None
        if isinstance(mlp, GatedMlp):
            gate_up, down = Fp8Product.of(mlp.gate_up), Fp8Product.of(mlp.down)
            inner = None if gate_up is None or down is None else (gate_up, down)
        return None if qkv is None else cls(layer, attention, qkv, inner)


class Fp8Layers:
    """`FusedLayers` of e4m3 products; a CUDA graph can capture it."""

    computes_all = False

    def __init__(self, spec: ModelSpec, layers: list[Fp8Layer], kernels: Kernels) -> None:
        device = layers[0].qkv.weight.codes_NK.device
        self._eps = spec.norm_eps
        self._layers = layers
        self._add_rms_norm = kernels.add_rms_norm
        self._quantise = table.quantise_rows.on(device)
        self._norm_rows = table.norm_rows.on(device)
        self._silu_rows = table.silu_rows.on(device)
        self._multiply = table.fp8_linear.on(device)

    def __call__(self, given: LayerPass) -> Stream:
        residual_TD, rotation_TH, inputs, pages, unnormed_TD, taps = given
        delta_TD: Tensor | None = None
        for i, (layer, attention, qkv, inner) in enumerate(self._layers):
            inputs.check_wanted()
            if layer.input_norm is None:
                x_TD = residual_TD if unnormed_TD is None else unnormed_TD
                rows = self._quantise(x_TD.to(qkv.out_dtype), qkv.weight.is_blocked)
            else:
                rows = self._normed(residual_TD, delta_TD, layer.input_norm, qkv)
            if taps is not None and i:
                taps.take(i, residual_TD)
            wanted = inputs.wanted if i + 1 == len(self._layers) else None
            product_TN = self._multiply(rows, *qkv)
            mixed_TD = attention.mix(product_TN, rotation_TH, inputs, pages[i], wanted)
            if wanted is not None:
                residual_TD = residual_TD.index_select(0, wanted.entry_N)
            delta_TD = attention.o(mixed_TD)
            if inner is None:
                x_TD = self._add_rms_norm(residual_TD, delta_TD, layer.post_norm, self._eps)
                delta_TD = layer.mlp(x_TD, inputs)
            else:
                rows = self._normed(residual_TD, delta_TD, layer.post_norm, inner[0])
                gate_up_TI = self._multiply(rows, *inner[0])
                rows = self._silu_rows(gate_up_TI, inner[1].weight.is_blocked)
                delta_TD = self._multiply(rows, *inner[1])
        assert delta_TD is not None
        return Stream(residual_TD, delta_TD)

    def _normed(
        self, residual_TD: Tensor, delta_TD: Tensor | None, norm_D: Tensor, product: Fp8Product
    ) -> Fp8Rows:
        """residual += delta; then the rows of its norm for a product."""
        how = product.out_dtype, product.weight.is_blocked
        return self._norm_rows(residual_TD, delta_TD, norm_D, self._eps, *how)
