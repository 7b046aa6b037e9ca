"""The common decoder body: Llama and its relatives, on one device, over a varlen batch.

Computes; never loads (models/loading) and never looks at requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.kernels.attention import AttentionBatch
from paceline.kernels.dispatch import Kernels
from paceline.kernels.rope import HeadNorms
from paceline.layers.linear import Linear
from paceline.models.spec import ModelSpec
from paceline.state.pages import LayerPages


@dataclass(slots=True)
class DecoderLayer:
    """Weights of one block. q and k rows hold interleaved rotary pairs."""

    input_norm: Tensor | None  # None: the layer reads the residual stream as it is
    qkv: Linear
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    head_norms: HeadNorms | None = None


@dataclass(slots=True)
class ForwardInputs:
    """What a forward needs of the step: one entry per token of the varlen batch."""

    token_T: Tensor  # int64 ids, all valid
    position_T: Tensor  # int64, clamped to the rotary table
    page_slot_T: Tensor  # int64 flat slot to write KV to; -1 writes nothing
    attention: AttentionBatch


class FusedLayers(Protocol):
    """All layers of a stack as one call: `LayerStack._run_layers`, on the CPU to the bit."""

    def __call__(
        self,
        residual_TD: Tensor,
        rotation_TH: Tensor,
        inputs: ForwardInputs,
        pages: list[LayerPages],
        unnormed_TD: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(slots=True, kw_only=True)
class LayerStack:
    """Decoder layers over a residual stream: what a causal LM and a draft head have in common."""

    spec: ModelSpec
    layers: list[DecoderLayer]
    rotation: Tensor  # complex64 [max_model_len, head_size / 2]
    kernels: Kernels
    fused: FusedLayers | None = None  # the loop of `_run_layers` in one call, where there is one

    def run(
        self,
        residual_TD: Tensor,
        inputs: ForwardInputs,
        pages: list[LayerPages],
        unnormed_TD: Tensor | None = None,
    ) -> Tensor:
        """What the last layer adds to the residual, which is updated in place before that.

        `unnormed_TD` is what a first layer without a norm reads: the residual, in the type of
        activations.
        """
        rotation_TH = self.rotation.index_select(0, inputs.position_T)
        if self.fused is not None:
            return self.fused(residual_TD, rotation_TH, inputs, pages, unnormed_TD)
        return self._run_layers(residual_TD, rotation_TH, inputs, pages, unnormed_TD)

    def _run_layers(
        self,
        residual_TD: Tensor,
        rotation_TH: Tensor,
        inputs: ForwardInputs,
        pages: list[LayerPages],
        x_TD: Tensor | None = None,
    ) -> Tensor:
        eps, scale = self.spec.norm_eps, self.spec.head_size**-0.5
        rms_norm, add_rms_norm, silu_and_mul, place_heads, paged_attention = self.kernels
        slot_T, batch = inputs.page_slot_T, inputs.attention
        delta_TD: Tensor | None = None
        for layer, kv in zip(self.layers, pages, strict=True):
            if delta_TD is not None:
                assert layer.input_norm is not None, "only a first layer goes without a norm"
                x_TD = add_rms_norm(residual_TD, delta_TD, layer.input_norm, eps)
            elif layer.input_norm is not None:
                x_TD = rms_norm(residual_TD, layer.input_norm, eps)
            assert x_TD is not None
            key, value = kv.key_NSH, kv.value_NSH
            qkv_TD = layer.qkv(x_TD)
            place_heads(qkv_TD, rotation_TH, layer.head_norms, key, value, slot_T)
            delta_TD = layer.o(paged_attention(qkv_TD, key, value, batch, scale))
            x_TD = add_rms_norm(residual_TD, delta_TD, layer.post_norm, eps)
            delta_TD = layer.down(silu_and_mul(layer.gate_up(x_TD)))
        assert delta_TD is not None
        return delta_TD

    @property
    def layer_bytes(self) -> int:
        return sum(x.nbytes for y in self.layers for x in (y.qkv, y.o, y.gate_up, y.down))


@dataclass(slots=True, kw_only=True)
class Decoder(LayerStack):
    """A whole causal LM: tokens in, final hidden states out; logits on request."""

    embedding_VD: Tensor
    final_norm: Tensor
    lm_head: Linear

    def forward(self, inputs: ForwardInputs, pages: list[LayerPages]) -> Tensor:
        """Hidden states after the final norm, [T, D]; KV of every token lands in its page slot."""
        residual_TD = self.embedding_VD.index_select(0, inputs.token_T).float()
        delta_TD = self.run(residual_TD, inputs, pages)
        return self.kernels.add_rms_norm(residual_TD, delta_TD, self.final_norm, self.spec.norm_eps)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """fp32 logits [N, V] of the rows that sample."""
        return self.lm_head(hidden_ND).float()

    @property
    def nbytes(self) -> int:
        return self.layer_bytes + self.embedding_VD.nbytes + self.lm_head.nbytes
