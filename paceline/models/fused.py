"""All layers of a decoder in one call: numba machine code on the CPU, fused kernels on CUDA.

Holds addresses; the decoder's layers keep the tensors alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.kernels.panels.reference import PanelWeight
from paceline.kernels.table import REFERENCE, Kernels, has_numba
from paceline.layers.linear import CudaLinear, PanelLinear
from paceline.models.decoder import DecoderLayer, DenseLayer, FusedLayers, LayerPass, Stream
from paceline.models.fused_cuda import CudaLayers
from paceline.models.fused_fp8 import Fp8Layer, Fp8Layers
from paceline.models.spec import ModelSpec
from paceline.state.pages import LayerPages
from paceline.state.recurrent import LayerStorage

if TYPE_CHECKING:
    from paceline.kernels.vector.layers import Step


def fuse_layers(
    spec: ModelSpec, layers: list[DecoderLayer], kernels: Kernels, device: torch.device
) -> FusedLayers | None:
    """None if the layers are of several shapes, or if a layer has a part without a fused kernel."""
    e4m3 = [x for layer in layers if (x := Fp8Layer.of(layer)) is not None]
    if len(e4m3) == len(layers):
        return Fp8Layers(spec, e4m3, kernels)
    dense = [d for layer in layers if (d := DenseLayer.of(layer)) is not None]
    if len(dense) < len(layers):
        return None
    linears = [x for y in dense for x in (y.qkv, y.o, y.gate_up, y.down)]
    if all(isinstance(x, CudaLinear) for x in linears):
        return CudaLayers(spec, dense, kernels)
    if any(x.attention != spec.attention for x in spec.layers):
        return None
    has_references = any(x is y for x, y in zip(kernels, REFERENCE, strict=True) if x is not None)
    if has_references or not has_numba(device) or spec.sliding_window is not None:
        return None
    weights: list[tuple[PanelWeight, ...]] = []
    for layer in dense:
        if layer.input_norm is None or layer.plain is None:
            return None
        parts = (layer.qkv, layer.o, layer.gate_up, layer.down)
        panels = tuple(x.weight for x in parts if isinstance(x, PanelLinear))
        # Padded outputs would change the row stride of the next kernel's input.
        if len(panels) < len(parts) or any(x.width != x.num_outputs for x in panels):
            return None
        weights.append(panels)
    return _NumbaLayers(spec, dense, weights)


class _NumbaLayers:
    """See kernels/vector/layers."""

    computes_all = True

    def __init__(
        self,
        spec: ModelSpec,
        layers: list[DenseLayer],
        weights: list[tuple[PanelWeight, ...]],
    ) -> None:
        from paceline.kernels.vector import layers as numba_layers

        numba_layers.compile_ahead()
        self._kernels = numba_layers
        self._layers = numba_layers.address_table(
            [
                numba_layers.LayerTensors(
                    *(x.input_norm, x.post_norm, x.plain.head_norms, x.plain.kv_scales), linears
                )
                for x, linears in zip(layers, weights, strict=True)
                if x.input_norm is not None and x.plain is not None
            ]
        )
        self._shape = numba_layers.LayerSizes(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            hidden=spec.hidden_size,
            inner=weights[0][3].num_inputs,
            eps=spec.norm_eps,
        )
        self._pages: Sequence[LayerStorage] = []
        self._page_table = numba_layers.page_table([])

    def __call__(self, given: LayerPass) -> Stream:
        residual_TD, rotation_TH, inputs, pages, unnormed_TD, taps = given
        assert unnormed_TD is None, "every layer here has a norm"
        assert inputs.wanted is None, "the fused call computes all entries"
        if pages is not self._pages:
            self._pages = pages
            kv = [(x.key_NSH, x.value_NSH) for x in pages if isinstance(x, LayerPages)]
            self._page_table = self._kernels.page_table(kv)
        step = self._kernels.Step(
            residual_TD, rotation_TH, inputs.page_slot_T, inputs.attention, inputs.unwanted
        )
        first = 0
        # A tap ends one call and begins the next: between calls the stream can be copied.
        if taps is not None:
            for stop in sorted(x for x in taps.ids if 0 < x < len(pages)):
                residual_TD.add_(self._run(first, stop, step))
                taps.take(stop, residual_TD)
                first = stop
        delta_TD = self._run(first, len(pages), step)
        inputs.check_wanted()
        return Stream(residual_TD, delta_TD)

    def _run(self, first: int, stop: int, step: Step) -> Tensor:
        table, pages = self._layers[first:stop], self._page_table[first:stop]
        return self._kernels.run_layers(table, pages, self._shape, step)
