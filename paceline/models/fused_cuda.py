"""A decoder's layers on CUDA: attention, and four matrix products with fused neighbours.

Chooses our kernels or cuBLAS for each product, by row count and a table of measured tiles.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels import table
from paceline.kernels.linear.reference import HeadPlaces, NormedRows
from paceline.kernels.linear.tiles import Tile, pick_tile
from paceline.kernels.table import Kernels
from paceline.layers.attention import WantedEntries
from paceline.layers.linear import CudaLinear
from paceline.models.decoder import DenseLayer, LayerPass, Stream
from paceline.models.spec import ModelSpec
from paceline.state.pages import LayerPages


class _Products:
    """The products of a device, picked once."""

    def __init__(self, device: torch.device) -> None:
        self.scale_rows = table.scale_rows.on(device)
        self.linear = table.linear.on(device)
        self.norm_linear = table.norm_linear.on(device)
        self.norm_linear_silu = table.norm_linear_silu.on(device)
        self.linear_silu = table.linear_silu.on(device)
        self.norm_linear_heads = table.norm_linear_heads.on(device)
        self.linear_add = table.linear_add.on(device)


class Tiles(NamedTuple):
    """The tile of each product at some row count; None: torch multiplies."""

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
    """`FusedLayers` for linears that are all `CudaLinear`; a CUDA graph can capture it."""

    computes_all = False

    def __init__(
        self,
        spec: ModelSpec,
        layers: list[DenseLayer],
        kernels: Kernels,
    ) -> None:
        self._eps = spec.norm_eps
        self._layers = layers
        self._weights = [_weights_of(x) for x in layers]
        # The last layer's output is returned: the caller adds and norms it.
        self._next_norms = [*(x.input_norm for x in layers[1:]), None]
        self._kernels = kernels
        self._products = _Products(self._weights[0].qkv.weight.device)
        self._tiles = cache(self._choose)

    def __call__(self, given: LayerPass) -> Stream:
        residual_TD, _, inputs, _, unnormed_TD, taps = given
        tiles = self._tiles(len(residual_TD))
        rows = self._open(residual_TD, unnormed_TD, tiles[0])
        inner_TI = residual_TD
        for i, weights in enumerate(self._weights):
            next_norm = self._next_norms[i]
            wanted = inputs.wanted if next_norm is None else None
            mixed_TD = self._mix(rows, i, given, wanted, tiles[i].qkv)
            if wanted is not None:
                residual_TD = residual_TD.index_select(0, wanted.entry_N)
                tiles = self._tiles(len(wanted.entry_N))
            step = (mixed_TD, weights.o, tiles[i].o)
            rows = self._add(step, residual_TD, weights.post_norm, tiles[i].gate_up)
            inner_TI = self._inner(rows, weights.gate_up, tiles[i].gate_up)
            if next_norm is not None:
                step = (inner_TI, weights.down, tiles[i].down)
                rows = self._add(step, residual_TD, next_norm, tiles[i + 1].qkv)
                if taps is not None:
                    taps.take(i + 1, residual_TD)
        last, tile = self._weights[-1].down, tiles[-1].down
        if tile is None:
            return Stream(residual_TD, last.multiply(inner_TI))
        return Stream(residual_TD, self._products.linear(inner_TI, last.product, None, tile))

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

    def _mix(
        self,
        rows: NormedRows,
        index: int,
        given: LayerPass,
        wanted: WantedEntries | None,
        tile: Tile | None,
    ) -> Tensor:
        """The layer's first product, and all that comes before its second one."""
        layer, linear = self._layers[index], self._weights[index].qkv
        rotation_TH, inputs, storage = given.rotation_TH, given.inputs, given.pages[index]
        plain = layer.plain
        if plain is None or plain.head_norms is not None or tile is None:
            product_TN = (
                linear.multiply(rows.x_TD)
                if tile is None
                else (self._products.norm_linear(rows, linear.product, tile))
            )
            return layer.attention.mix(product_TN, rotation_TH, inputs, storage, wanted)
        assert isinstance(storage, LayerPages)
        key, value, batch = storage.key_NSH, storage.value_NSH, inputs.attention
        scales = plain.kv_scales
        places = HeadPlaces(rotation_TH, key, value, inputs.page_slot_T, scales)
        qkv_TD = self._products.norm_linear_heads(rows, linear.product, places, tile)
        if wanted is not None:
            qkv_TD, batch = qkv_TD.index_select(0, wanted.entry_N), wanted.attention
        return self._kernels.paged_attention(qkv_TD, key, value, batch, plain.scale, scales)

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
        """residual += product. Returns the next product's input, in the form its kernel needs."""
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

    def _choose(self, num_rows: int) -> list[Tiles]:
        """By layer."""
        return [_tiles_of(x, num_rows) for x in self._weights]


def _tiles_of(weights: _Weights, num_rows: int) -> Tiles:
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
