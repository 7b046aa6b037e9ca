"""A decoder's layers on CUDA: per layer four products with their neighbours fused, and attention.

Decides by row count and table who multiplies; the arithmetic is kernels/gemv's and dispatch's.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.kernels import gemv
from paceline.kernels.dispatch import Kernels
from paceline.kernels.gemv import HeadPlaces, NormedRows, Product
from paceline.kernels.gemv_table import pick_tile
from paceline.layers.attention import ForwardInputs
from paceline.layers.linear import CudaLinear
from paceline.models.decoder import DenseLayer
from paceline.models.spec import ModelSpec
from paceline.state.pages import LayerPages


class Products(Protocol):
    """kernels/gemv or its Triton twin."""

    def scale_rows(
        self, residual_TD: Tensor, norm_weight_D: Tensor, eps: float, like: Tensor
    ) -> NormedRows: ...

    def linear(
        self, x_TK: Tensor, product: Product, out_dtype: torch.dtype | None = None
    ) -> Tensor: ...

    def norm_linear(self, rows: NormedRows, product: Product) -> Tensor: ...

    def norm_linear_silu(self, rows: NormedRows, product: Product) -> Tensor: ...

    def norm_linear_heads(
        self, rows: NormedRows, product: Product, places: HeadPlaces
    ) -> Tensor: ...

    def linear_add(
        self,
        x_TK: Tensor,
        product: Product,
        residual_TD: Tensor,
        norm_weight_D: Tensor | None = None,
        eps: float = 0.0,
    ) -> NormedRows | None: ...


class _Own(NamedTuple):
    """Which products of a layer run in kernels of ours at some row count; else torch's."""

    qkv: bool
    o: bool
    gate_up: bool
    down: bool


class _Weights(NamedTuple):
    qkv: CudaLinear
    o: CudaLinear
    post_norm: Tensor
    gate_up: CudaLinear
    down: CudaLinear


class CudaLayers:
    """`FusedLayers` for linears that are all `CudaLinear`; may be captured."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: list[DenseLayer],
        kernels: Kernels,
        products: Products | None = None,
    ) -> None:
        self._eps = spec.norm_eps
        self._scale = spec.head_size**-0.5
        self._layers = layers
        self._weights = [_weights_of(x) for x in layers]
        # The last layer hands its share over, and the caller's norm follows.
        self._next_norms = [*(x.input_norm for x in layers[1:]), None]
        self._kernels = kernels
        weight = self._weights[0].qkv.weight
        self._products = products or _products_on(weight.device)
        self._own = cache(self._choose)

    def __call__(
        self,
        residual_TD: Tensor,
        rotation_TH: Tensor,
        inputs: ForwardInputs,
        pages: list[LayerPages],
        unnormed_TD: Tensor | None = None,
    ) -> Tensor:
        """What the last layer adds to the fp32 residual, which is updated in place before that."""
        own = self._own(len(residual_TD))
        slot_T, batch = inputs.page_slot_T, inputs.attention
        rows = self._open(residual_TD, unnormed_TD, own.qkv)
        inner_TI = residual_TD
        for i, (weights, kv) in enumerate(zip(self._weights, pages, strict=True)):
            places = HeadPlaces(rotation_TH, kv.key_NSH, kv.value_NSH, slot_T)
            qkv_TD = self._heads(rows, i, places, own)
            attended_TD = self._kernels.paged_attention(
                qkv_TD, kv.key_NSH, kv.value_NSH, batch, self._scale
            )
            rows = self._add(
                (attended_TD, weights.o, own.o), residual_TD, weights.post_norm, own.gate_up
            )
            inner_TI = self._inner(rows, weights.gate_up, own)
            next_norm = self._next_norms[i]
            if next_norm is not None:
                step = (inner_TI, weights.down, own.down)
                rows = self._add(step, residual_TD, next_norm, own.qkv)
        last = self._weights[-1].down
        if own.down:
            return self._products.linear(inner_TI, last.product)
        return last.multiply(inner_TI)

    def _open(self, residual_TD: Tensor, unnormed_TD: Tensor | None, is_own: bool) -> NormedRows:
        norm_D, like = self._layers[0].input_norm, self._weights[0].qkv.weight
        if norm_D is None:
            x_TD = residual_TD if unnormed_TD is None else unnormed_TD
            return NormedRows(x_TD.to(like.dtype), None, self._eps)
        if is_own:
            return self._products.scale_rows(residual_TD, norm_D, self._eps, like)
        return self._norm(residual_TD, norm_D)

    def _norm(self, residual_TD: Tensor, norm_D: Tensor) -> NormedRows:
        x_TD = self._kernels.rms_norm(residual_TD, norm_D, self._eps)
        return NormedRows(x_TD.to(self._weights[0].qkv.weight.dtype), None, self._eps)

    def _heads(self, rows: NormedRows, index: int, places: HeadPlaces, own: _Own) -> Tensor:
        linear, norms = self._weights[index].qkv, self._layers[index].head_norms
        if own.qkv and norms is None:
            return self._products.norm_linear_heads(rows, linear.product, places)
        if own.qkv:
            qkv_TD = self._products.norm_linear(rows, linear.product)
        else:
            qkv_TD = linear.multiply(rows.x_TD)
        rotation_TH, key, value, slot_T = places
        self._kernels.place_heads(qkv_TD, rotation_TH, norms, key, value, slot_T)
        return qkv_TD

    def _inner(self, rows: NormedRows, linear: CudaLinear, own: _Own) -> Tensor:
        if own.gate_up:
            return self._products.norm_linear_silu(rows, linear.product)
        return self._kernels.silu_and_mul(linear.multiply(rows.x_TD))

    def _add(
        self,
        step: tuple[Tensor, CudaLinear, bool],
        residual_TD: Tensor,
        norm_D: Tensor,
        is_next_own: bool,
    ) -> NormedRows:
        """residual += product; what the next product reads, in the form that it wants."""
        x_TK, linear, is_own = step
        if not is_own:
            delta_TD = linear.multiply(x_TK)
            x_TD = self._kernels.add_rms_norm(residual_TD, delta_TD, norm_D, self._eps)
            return NormedRows(x_TD.to(linear.weight.dtype), None, self._eps)
        if is_next_own:
            rows = self._products.linear_add(x_TK, linear.product, residual_TD, norm_D, self._eps)
            assert rows is not None
            return rows
        self._products.linear_add(x_TK, linear.product, residual_TD)
        return self._norm(residual_TD, norm_D)

    def _choose(self, num_rows: int) -> _Own:
        weights = self._weights[0]
        ends = ("heads", "added", "gated", "added")
        linears = (weights.qkv, weights.o, weights.gate_up, weights.down)
        return _Own(
            *(
                pick_tile(end, *x.weight.shape, num_rows, x.weight.dtype, x.weight.device)
                is not None
                for end, x in zip(ends, linears, strict=True)
            )
        )


def _weights_of(layer: DenseLayer) -> _Weights:
    linears = [layer.qkv, layer.o, layer.gate_up, layer.down]
    qkv, o, gate_up, down = (x for x in linears if isinstance(x, CudaLinear))
    return _Weights(qkv, o, layer.post_norm, gate_up, down)


def _products_on(device: torch.device) -> Products:
    if device.type != "cuda":
        return gemv
    from paceline.kernels import gemv_triton

    gemv_triton.tickets(device)  # before any graph is captured
    return gemv_triton
