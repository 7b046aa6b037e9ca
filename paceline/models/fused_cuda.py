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
from paceline.kernels.gemv_table import Tile, pick_tile
from paceline.layers.attention import ForwardInputs
from paceline.layers.linear import CudaLinear
from paceline.models.decoder import DenseLayer, Stream, Taps
from paceline.models.spec import ModelSpec
from paceline.state.pages import LayerPages


class Products(Protocol):
    """kernels/gemv or its Triton twin."""

    def scale_rows(
        self, residual_TD: Tensor, norm_weight_D: Tensor, eps: float, like: Tensor
    ) -> NormedRows: ...

    def linear(
        self,
        x_TK: Tensor,
        product: Product,
        out_dtype: torch.dtype | None = None,
        tile: Tile | None = None,
    ) -> Tensor: ...

    def norm_linear(
        self, rows: NormedRows, product: Product, tile: Tile | None = None
    ) -> Tensor: ...

    def norm_linear_silu(
        self, rows: NormedRows, product: Product, tile: Tile | None = None
    ) -> Tensor: ...

    def linear_silu(self, x_TK: Tensor, product: Product) -> Tensor: ...

    def norm_linear_heads(
        self, rows: NormedRows, product: Product, places: HeadPlaces, tile: Tile | None = None
    ) -> Tensor: ...

    def linear_add(
        self,
        x_TK: Tensor,
        product: Product,
        residual_TD: Tensor,
        norm_weight_D: Tensor | None = None,
        eps: float = 0.0,
        tile: Tile | None = None,
    ) -> NormedRows | None: ...


class Tiles(NamedTuple):
    """How the products of a layer are cut at some row count; None: torch's product."""

    qkv: Tile | None
    o: Tile | None
    gate_up: Tile | None
    down: Tile | None


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
        self._tiles = cache(self._choose)

    def __call__(
        self,
        residual_TD: Tensor,
        rotation_TH: Tensor,
        inputs: ForwardInputs,
        pages: list[LayerPages],
        unnormed_TD: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Stream:
        tiles = self._tiles(len(residual_TD))
        slot_T, batch = inputs.page_slot_T, inputs.attention
        rows = self._open(residual_TD, unnormed_TD, tiles)
        inner_TI = residual_TD
        for i, (weights, kv) in enumerate(zip(self._weights, pages, strict=True)):
            places = HeadPlaces(rotation_TH, kv.key_NSH, kv.value_NSH, slot_T)
            qkv_TD = self._heads(rows, i, places, tiles.qkv)
            if i + 1 == len(pages) and inputs.wanted is not None:
                batch, entry_N = inputs.wanted.attention, inputs.wanted.entry_N
                qkv_TD, residual_TD = (x.index_select(0, entry_N) for x in (qkv_TD, residual_TD))
                tiles = self._tiles(len(entry_N))
            attended_TD = self._kernels.paged_attention(
                qkv_TD, kv.key_NSH, kv.value_NSH, batch, self._scale
            )
            step = (attended_TD, weights.o, tiles.o)
            rows = self._add(step, residual_TD, weights.post_norm, tiles.gate_up)
            inner_TI = self._inner(rows, weights.gate_up, tiles.gate_up)
            next_norm = self._next_norms[i]
            if next_norm is not None:
                step = (inner_TI, weights.down, tiles.down)
                rows = self._add(step, residual_TD, next_norm, tiles.qkv)
                if taps is not None:
                    taps.take(i + 1, residual_TD)
        last = self._weights[-1].down
        if tiles.down is None:
            return Stream(residual_TD, last.multiply(inner_TI))
        return Stream(residual_TD, self._products.linear(inner_TI, last.product, None, tiles.down))

    def _open(self, residual_TD: Tensor, unnormed_TD: Tensor | None, tiles: Tiles) -> NormedRows:
        norm_D, like = self._layers[0].input_norm, self._weights[0].qkv.weight
        if norm_D is None:
            x_TD = residual_TD if unnormed_TD is None else unnormed_TD
            return NormedRows(x_TD.to(like.dtype), None, self._eps)
        if tiles.qkv is None:
            return self._norm(residual_TD, norm_D)
        return self._products.scale_rows(residual_TD, norm_D, self._eps, like)

    def _norm(self, residual_TD: Tensor, norm_D: Tensor) -> NormedRows:
        x_TD = self._kernels.rms_norm(residual_TD, norm_D, self._eps)
        return NormedRows(x_TD.to(self._weights[0].qkv.weight.dtype), None, self._eps)

    def _heads(self, rows: NormedRows, index: int, places: HeadPlaces, tile: Tile | None) -> Tensor:
        linear, norms = self._weights[index].qkv, self._layers[index].head_norms
        if tile is None:
            qkv_TD = linear.multiply(rows.x_TD)
        elif norms is None:
            return self._products.norm_linear_heads(rows, linear.product, places, tile)
        else:
            qkv_TD = self._products.norm_linear(rows, linear.product, tile)
        rotation_TH, key, value, slot_T = places
        self._kernels.place_heads(qkv_TD, rotation_TH, norms, key, value, slot_T)
        return qkv_TD

    def _inner(self, rows: NormedRows, linear: CudaLinear, tile: Tile | None) -> Tensor:
        if tile is None:
            return self._products.linear_silu(rows.x_TD, linear.product)
        return self._products.norm_linear_silu(rows, linear.product, tile)

    def _add(
        self,
        step: tuple[Tensor, CudaLinear, Tile | None],
        residual_TD: Tensor,
        norm_D: Tensor,
        next_tile: Tile | None,
    ) -> NormedRows:
        """residual += product; what the next product reads, in the form that it wants."""
        x_TK, linear, tile = step
        if tile is None:
            delta_TD = linear.multiply(x_TK)
            x_TD = self._kernels.add_rms_norm(residual_TD, delta_TD, norm_D, self._eps)
            return NormedRows(x_TD.to(linear.weight.dtype), None, self._eps)
        add = self._products.linear_add
        if next_tile is None:
            add(x_TK, linear.product, residual_TD, tile=tile)
            return self._norm(residual_TD, norm_D)
        rows = add(x_TK, linear.product, residual_TD, norm_D, self._eps, tile)
        assert rows is not None
        return rows

    def _choose(self, num_rows: int) -> Tiles:
        weights = self._weights[0]
        ends = ("heads", "added", "gated", "added")
        linears = (weights.qkv, weights.o, weights.gate_up, weights.down)
        return Tiles(
            *(
                pick_tile(end, *x.weight.shape, num_rows, x.weight.dtype, x.weight.device)
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
