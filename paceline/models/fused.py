"""A decoder's layers as one call: of machine code on the CPU, of fused kernels on CUDA.

Holds addresses only; the decoder holds the tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.kernels.dispatch import REFERENCE, Kernels, has_numba
from paceline.kernels.matmul import PanelWeight
from paceline.layers.attention import ForwardInputs
from paceline.layers.linear import CudaLinear, PanelLinear
from paceline.models.decoder import DecoderLayer, DenseLayer, FusedLayers, Stream, Taps
from paceline.models.fused_cuda import CudaLayers
from paceline.models.spec import ModelSpec
from paceline.state.pages import LayerPages

if TYPE_CHECKING:
    from paceline.kernels.numba_layers import Step


def fuse_layers(
    spec: ModelSpec, layers: list[DecoderLayer], kernels: Kernels, device: torch.device
) -> FusedLayers | None:
    """None where some layer has a part that only torch computes."""
    dense = [d for layer in layers if (d := DenseLayer.of(layer)) is not None]
    if len(dense) < len(layers):
        return None
    linears = [x for y in dense for x in (y.qkv, y.o, y.gate_up, y.down)]
    if all(isinstance(x, CudaLinear) for x in linears):
        return CudaLayers(spec, dense, kernels)
    has_references = any(x is y for x, y in zip(kernels, REFERENCE, strict=True) if x is not None)
    if has_references or not has_numba(device) or spec.sliding_window is not None:
        return None
    weights: list[tuple[PanelWeight, ...]] = []
    for layer in dense:
        if layer.input_norm is None:
            return None
        parts = (layer.qkv, layer.o, layer.gate_up, layer.down)
        panels = tuple(x.weight for x in parts if isinstance(x, PanelLinear))
        # Padded outputs would move the rows of the next kernel apart.
        if len(panels) < len(parts) or any(x.width != x.num_outputs for x in panels):
            return None
        weights.append(panels)
    return _NumbaLayers(spec, dense, weights)


class _NumbaLayers:
    """See kernels/numba_layers."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: list[DenseLayer],
        weights: list[tuple[PanelWeight, ...]],
    ) -> None:
        from paceline.kernels import numba_layers

        numba_layers.compile_ahead()
        self._kernels = numba_layers
        self._layers = numba_layers.address_table(
            [
                numba_layers.LayerTensors(x.input_norm, x.post_norm, x.head_norms, linears)
                for x, linears in zip(layers, weights, strict=True)
                if x.input_norm is not None
            ]
        )
        self._shape = numba_layers.Shape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            hidden=spec.hidden_size,
            inner=spec.intermediate_size,
            eps=spec.norm_eps,
        )
        self._pages: list[LayerPages] = []
        self._page_table = numba_layers.page_table([])

    def __call__(
        self,
        residual_TD: Tensor,
        rotation_TH: Tensor,
        inputs: ForwardInputs,
        pages: list[LayerPages],
        unnormed_TD: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Stream:
        assert unnormed_TD is None, "no layer here goes without a norm"
        assert inputs.wanted is None, "all outputs come out of one call"
        if pages is not self._pages:
            self._pages = pages
            kv = [(x.key_NSH, x.value_NSH) for x in pages]
            self._page_table = self._kernels.page_table(kv)
        step = self._kernels.Step(residual_TD, rotation_TH, inputs.page_slot_T, inputs.attention)
        head_bytes, first = 4 * pages[0].key_NSH.stride(0), 0
        # The stream between two layers is seen where one call ends and the next begins.
        if taps is not None:
            for stop in sorted(x for x in taps.ids if 0 < x < len(pages)):
                residual_TD.add_(self._run(first, stop, head_bytes, step))
                taps.take(stop, residual_TD)
                first = stop
        return Stream(residual_TD, self._run(first, len(pages), head_bytes, step))

    def _run(self, first: int, stop: int, head_bytes: int, step: Step) -> Tensor:
        table, pages = self._layers[first:stop], self._page_table[first:stop]
        return self._kernels.run_layers(table, pages, head_bytes, self._shape, step)
